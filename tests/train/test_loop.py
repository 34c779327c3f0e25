"""What the loop decides: when to evaluate, save and end. The model is a line through points; all else is real."""

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
from maxhydra.train.checkpoint import open_checkpointer
from maxhydra.train.loop import LoopContext, TrainResult, fit
from maxhydra.train.metrics import MetricsLogger, StepCost
from maxhydra.train.preemption import PreemptionSignal
from maxhydra.train.progress import open_progress
from maxhydra.train.state import Guard, TrainState
from maxhydra.train.step import make_step
from maxhydra.train.trackers import _Trackers

OPTIMIZER = Optimizer(transform=optax.sgd(0.1), schedule=lambda step: 0.1)


class Batches:
    """Points on a line; `poison` is the number of a batch that holds a NaN."""

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


def go(
    folder: Path, train: Train, saving: Checkpoint, *, evals: list[float], past: tuple[float, ...] = (), **batches: Any
) -> TrainResult:
    """Run the loop with these eval losses in turn."""
    run = RunDirectory(folder, writes=False)
    turns: Iterator[float] = iter(evals)
    params = {"w": jnp.zeros(())}
    key = jax.random.key_data(jax.random.key(0))
    state = TrainState(jnp.zeros((), jnp.int32), params, {}, OPTIMIZER.transform.init(params), key, Guard.fresh())
    writer = MetricsWriter(run.metrics_path)
    progress = open_progress(Progress.none, total=train.steps, start=0, shown=False)
    work = StepCost(tokens=1, flops=2.0, devices=1, peak_tflops=1.0)
    checkpointer = open_checkpointer(run.checkpoints, saving)
    parts = LoopContext(
        train=train,
        saving=saving,
        step=jax.jit(make_step(loss, OPTIMIZER, train)),
        batches=Batches(**batches),  # type: ignore[arg-type]
        evaluate=lambda state: {"eval/loss": next(turns)},
        checkpointer=checkpointer,
        meter=MetricsLogger(work, run=run, writer=writer, tracker=_Trackers(), progress=progress, step=0),
        past_eval_losses=past,
    )
    with PreemptionSignal() as interrupt:
        ending = fit(parts, state, start=0, interrupt=interrupt)
    checkpointer.close()
    return ending


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def test_logs_evaluates_and_saves_when_due(tmp_path: Path) -> None:
    train = Train(steps=25, log_every=10, eval_every=10)
    ending = go(tmp_path, train, Checkpoint(every=10, keep=5), evals=[3.0, 2.0, 1.0])
    assert (ending.status, ending.step) == ("finished", 25)
    assert series(tmp_path / "metrics.jsonl", "loss")[0] == [1, 10, 20, 25]
    assert series(tmp_path / "metrics.jsonl", "eval/loss") == ([10, 20, 25], [3.0, 2.0, 1.0])
    assert saved(tmp_path) == [10, 20, 25]
    row = read_metrics(tmp_path / "metrics.jsonl")[1]
    speed = {"step_time", "tokens_per_second", "tflops_per_device", "mfu", "input_wait"}
    assert {"step", "loss", "grad_norm", "learning_rate", "tokens", "skipped"} | speed <= set(row)
    np.testing.assert_allclose(row["tokens_per_second"], 4 / row["step_time"])
    assert row["data/epoch"] == 1.0
    np.testing.assert_allclose(row["mfu"], 8.0 / row["step_time"] / 1e12)


def test_ends_at_the_target(tmp_path: Path) -> None:
    train = Train(steps=100, eval_every=10, target_eval_loss=1.5)
    ending = go(tmp_path, train, Checkpoint(every=1000), evals=[3.0, 1.4, 1.0])
    assert (ending.status, ending.step) == ("finished", 20)
    assert "target_eval_loss" in ending.reason
    assert saved(tmp_path) == [20]


def test_ends_without_improvement(tmp_path: Path) -> None:
    train = Train(steps=100, eval_every=10, early_stop=EarlyStop(patience=2, min_delta=0.1))
    ending = go(tmp_path, train, Checkpoint(every=1000), evals=[3.0, 2.0, 1.95, 1.93, 0.5])
    assert (ending.status, ending.step) == ("finished", 40)


def test_small_improvements_add_up_to_one(tmp_path: Path) -> None:
    """As in Lightning and Keras: what is compared with is the loss of the last improvement."""
    train = Train(steps=60, eval_every=10, early_stop=EarlyStop(patience=2, min_delta=0.1))
    ending = go(tmp_path, train, Checkpoint(every=1000), evals=[3.0, 2.94, 2.88, 2.82, 2.76, 2.7])
    assert (ending.status, ending.reason) == ("finished", "all 60 steps done")


def test_patience_counts_evaluations_before_a_resume(tmp_path: Path) -> None:
    train = Train(steps=100, eval_every=10, early_stop=EarlyStop(patience=2))
    ending = go(tmp_path, train, Checkpoint(every=1000), evals=[2.2, 0.5], past=(3.0, 2.0, 2.1))
    assert ending.step == 10


@pytest.mark.parametrize("third", [2.0, math.nan])
def test_keeps_the_newest_and_the_best(tmp_path: Path, third: float) -> None:
    """One that is no number is better than no other."""
    train = Train(steps=60, eval_every=10)
    go(tmp_path, train, Checkpoint(every=10, keep=2, keep_best=1), evals=[3.0, 1.0, third, 2.5, 2.6, 2.7])
    assert saved(tmp_path) == [20, 50, 60]


@pytest.mark.parametrize(("log_every", "told"), [(5, "train.log_every=1 would show"), (23, "loss nan")])
def test_a_nan_ends_the_run_and_is_not_saved(tmp_path: Path, log_every: int, told: str) -> None:
    """Its numbers are told where they were logged, and no other step's in their place."""
    train = Train(steps=60, log_every=log_every, eval_every=0)
    ending = go(tmp_path, train, Checkpoint(every=10, keep=5), evals=[1.0], poison=23)
    assert (ending.status, ending.step) == ("failed", 22)
    assert f"step 23 is not finite ({told}" in ending.reason
    assert np.isfinite(float(ending.state.params["w"]))
    assert saved(tmp_path) == [10, 20]


def test_a_failed_save_does_not_keep_the_next_from_being_tried(tmp_path: Path, monkeypatch: Any) -> None:
    """There is no room for the save of step 10, and there is again at the end."""
    real, calls = shutil.disk_usage, []

    def no_room_at_first(path: Path) -> Any:
        calls.append(path)
        return real(path)._replace(free=0) if len(calls) == 1 else real(path)

    monkeypatch.setattr(shutil, "disk_usage", no_room_at_first)
    ending = go(tmp_path, Train(steps=15, eval_every=0), Checkpoint(every=10), evals=[1.0])
    assert ending.status == "finished"
    assert len(calls) == 2 and saved(tmp_path) == [15]
