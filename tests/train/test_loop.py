"""The decisions of the loop: when to evaluate, save and end. The model is a linear fit; everything else is real."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxhydra.config.schema.run import Checkpoint, EarlyStop, Progress, Train
from maxhydra.optim import Optimizer
from maxhydra.record import MetricsWriter, RunDirectory, read_metrics, series
from maxhydra.runtime.progress import open_step_progress
from maxhydra.train.checkpoint import open_checkpointer
from maxhydra.train.loop import LoopContext, TrainResult, fit
from maxhydra.train.metrics import MetricsLogger, StepCost
from maxhydra.train.preemption import PreemptionSignal
from maxhydra.train.state import Guard, TrainState
from maxhydra.train.step import make_step
from maxhydra.train.trackers import _Trackers

OPTIMIZER = Optimizer(transform=optax.sgd(0.1), schedule=lambda step: 0.1)


class Batches:
    """Points on a line; `poison` is the number of the batch that contains a NaN."""

    def __init__(self, poison: int | None = None):
        self._count, self._poison = 0, poison

    def take(self, state: TrainState) -> dict[str, np.ndarray]:
        self._count += 1
        x = np.random.default_rng(self._count).normal(size=(4,)).astype(np.float32)
        return {"x": x * (np.nan if self._count == self._poison else 1.0)}

    def metrics(self) -> dict[str, float]:
        return {"data/epoch": self._count / 10}

    def state(self) -> dict[str, int]:
        return {"count": self._count}


def loss(params: dict, batch: dict, key: Any) -> dict:
    error = jnp.square(params["w"] * batch["x"] - 3 * batch["x"])
    return {"loss": error.sum(), "nll": error.sum(), "weight": jnp.float32(batch["x"].size)}


def run_loop(
    folder: Path,
    train: Train,
    checkpoint: Checkpoint,
    *,
    evals: list[float],
    past: tuple[float, ...] = (),
    **batches: Any,
) -> TrainResult:
    """Run the loop with the given sequence of eval losses."""
    run = RunDirectory(folder, writes=False)
    eval_losses: Iterator[float] = iter(evals)
    params = {"w": jnp.zeros(())}
    key = jax.random.key_data(jax.random.key(0))
    state = TrainState(jnp.zeros((), jnp.int32), params, {}, OPTIMIZER.transform.init(params), key, Guard.fresh())
    writer = MetricsWriter(run.metrics_path)
    progress = open_step_progress(Progress.none, total=train.steps, start=0, shown=False)
    cost = StepCost(tokens=1, flops=2.0, devices=1, peak_tflops=1.0)
    checkpointer = open_checkpointer(run.checkpoints, checkpoint)
    context = LoopContext(
        train=train,
        checkpoint=checkpoint,
        step=jax.jit(make_step(loss, OPTIMIZER, train)),
        batches=Batches(**batches),  # type: ignore[arg-type]
        evaluate=lambda state: {"eval/loss": next(eval_losses)},
        checkpointer=checkpointer,
        metrics=MetricsLogger(cost, run=run, writer=writer, tracker=_Trackers(), progress=progress, step=0),
        past_eval_losses=past,
    )
    with PreemptionSignal() as preemption:
        result = fit(context, state, start=0, preemption=preemption)
    checkpointer.close()
    return result


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def test_logs_evaluates_and_saves_when_due(tmp_path: Path) -> None:
    train = Train(steps=25, log_every=10, eval_every=10)
    result = run_loop(tmp_path, train, Checkpoint(every=10, keep=5), evals=[3.0, 2.0, 1.0])
    assert (result.status, result.step) == ("finished", 25)
    assert series(tmp_path / "metrics.jsonl", "loss")[0] == [1, 10, 20, 25]
    assert series(tmp_path / "metrics.jsonl", "eval/loss") == ([10, 20, 25], [3.0, 2.0, 1.0])
    assert saved_steps(tmp_path) == [10, 20, 25]
    row = read_metrics(tmp_path / "metrics.jsonl")[1]
    speed = {"step_time", "tokens_per_second", "tflops_per_device", "mfu", "input_wait"}
    assert {"step", "loss", "grad_norm", "learning_rate", "tokens", "skipped"} | speed <= set(row)
    np.testing.assert_allclose(row["tokens_per_second"], 4 / row["step_time"])
    assert row["data/epoch"] == 1.0
    np.testing.assert_allclose(row["mfu"], 8.0 / row["step_time"] / 1e12)


def test_ends_at_the_target(tmp_path: Path) -> None:
    train = Train(steps=100, eval_every=10, target_eval_loss=1.5)
    result = run_loop(tmp_path, train, Checkpoint(every=1000), evals=[3.0, 1.4, 1.0])
    assert (result.status, result.step) == ("finished", 20)
    assert "target_eval_loss" in result.reason
    assert saved_steps(tmp_path) == [20]


def test_ends_without_improvement(tmp_path: Path) -> None:
    train = Train(steps=100, eval_every=10, early_stop=EarlyStop(patience=2, min_delta=0.1))
    result = run_loop(tmp_path, train, Checkpoint(every=1000), evals=[3.0, 2.0, 1.95, 1.93, 0.5])
    assert (result.status, result.step) == ("finished", 40)


def test_small_improvements_add_up_to_one(tmp_path: Path) -> None:
    """As in Lightning and Keras, a loss is compared with that of the last improvement."""
    train = Train(steps=60, eval_every=10, early_stop=EarlyStop(patience=2, min_delta=0.1))
    result = run_loop(tmp_path, train, Checkpoint(every=1000), evals=[3.0, 2.94, 2.88, 2.82, 2.76, 2.7])
    assert (result.status, result.reason) == ("finished", "all 60 steps done")


def test_patience_counts_evaluations_before_a_resume(tmp_path: Path) -> None:
    train = Train(steps=100, eval_every=10, early_stop=EarlyStop(patience=2))
    result = run_loop(tmp_path, train, Checkpoint(every=1000), evals=[2.2, 0.5], past=(3.0, 2.0, 2.1))
    assert result.step == 10


@pytest.mark.parametrize("third", [2.0, math.nan])
def test_keeps_the_newest_and_the_best(tmp_path: Path, third: float) -> None:
    """A NaN loss is never the best."""
    train = Train(steps=60, eval_every=10)
    run_loop(tmp_path, train, Checkpoint(every=10, keep=2, keep_best=1), evals=[3.0, 1.0, third, 2.5, 2.6, 2.7])
    assert saved_steps(tmp_path) == [20, 50, 60]


@pytest.mark.parametrize(("log_every", "detail"), [(5, "set train.log_every=1 to log"), (23, "loss nan")])
def test_a_nan_ends_the_run_and_is_not_saved(tmp_path: Path, log_every: int, detail: str) -> None:
    """The reason has the step's own metrics if they were logged, and never those of another step."""
    train = Train(steps=60, log_every=log_every, eval_every=0)
    result = run_loop(tmp_path, train, Checkpoint(every=10, keep=5), evals=[1.0], poison=23)
    assert (result.status, result.step) == ("failed", 22)
    assert f"step 23 is not finite ({detail}" in result.reason
    assert np.isfinite(float(result.state.params["w"]))
    assert saved_steps(tmp_path) == [10, 20]


def test_the_next_save_is_tried_after_a_failed_one(tmp_path: Path, monkeypatch: Any) -> None:
    """The disk is full at the save of step 10, and has space again at the end."""
    real, calls = shutil.disk_usage, []

    def full_at_first(path: Path) -> Any:
        calls.append(path)
        return real(path)._replace(free=0) if len(calls) == 1 else real(path)

    monkeypatch.setattr(shutil, "disk_usage", full_at_first)
    result = run_loop(tmp_path, Train(steps=15, eval_every=0), Checkpoint(every=10), evals=[1.0])
    assert result.status == "finished"
    assert len(calls) == 2 and saved_steps(tmp_path) == [15]
