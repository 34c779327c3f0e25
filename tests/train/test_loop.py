"""The decisions of the loop: when to evaluate, save and end. The model is a linear fit; everything else is real."""

import dataclasses
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

from maxhydra.config import ConfigError
from maxhydra.config.schema.run import Checkpoint, EarlyStop, Nonfinite, Progress, Train
from maxhydra.optim import Optimizer
from maxhydra.record import MetricsWriter, RunDirectory, read_metrics, series
from maxhydra.runtime.progress import open_step_progress
from maxhydra.train.checkpoint import open_checkpointer
from maxhydra.train.evaluate import held_out_loss
from maxhydra.train.loop import LoopContext, TrainResult, fit
from maxhydra.train.loss import LossFn
from maxhydra.train.metrics import LearningMonitor, MetricsLogger, StepCost
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
    loss_fn: LossFn = loss,
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
        step=jax.jit(make_step(loss_fn, OPTIMIZER, train)),
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


@pytest.mark.parametrize(
    ("log_every", "detail"), [(5, "set train.log_every=1 to log"), (23, "loss nan"), (1, "loss nan")]
)
def test_a_nan_ends_the_run_and_is_not_saved(tmp_path: Path, log_every: int, detail: str) -> None:
    """The reason has the step's own metrics if they were logged, and never those of another step."""
    train = Train(steps=60, log_every=log_every, eval_every=0)
    result = run_loop(tmp_path, train, Checkpoint(every=10, keep=5), evals=[1.0], poison=23)
    assert (result.status, result.step) == ("failed", 22)
    assert f"step 23 is not finite ({detail}" in result.reason
    assert np.isfinite(float(result.state.params["w"]))
    assert saved_steps(tmp_path) == [10, 20]
    assert max(series(tmp_path / "metrics.jsonl", "loss")[0]) <= 25


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


def masked(params: dict, batch: dict, key: Any) -> dict:
    return {"loss": 0 * params["w"], "nll": 0 * params["w"], "weight": jnp.zeros(())}


def flat(params: dict, batch: dict, key: Any) -> dict:
    """A loss that does not depend on the params."""
    return loss({"w": jax.lax.stop_gradient(params["w"])}, batch, key)


def overflowing(params: dict, batch: dict, key: Any) -> dict:
    """Not finite as soon as an update has been made."""
    sums = loss(params, batch, key)
    return {**sums, "loss": sums["loss"] / jnp.where(params["w"] == 0, 1.0, 0.0)}


def constant(params: dict, batch: dict, key: Any) -> dict:
    """A gradient, but always the same loss: no update is large enough to change it."""
    sums = loss(params, batch, key)
    return {**sums, "loss": 12.0 + sums["loss"] - jax.lax.stop_gradient(sums["loss"])}


@pytest.mark.parametrize(
    ("loss_fn", "reason"),
    [
        (masked, "none of the 12 updates was applied: no token of the batch has a loss"),
        (flat, "none of the 12 updates was applied: the gradient is exactly 0"),
        (overflowing, "1 of the 12 updates was applied: the loss or the gradient is not finite"),
        (constant, "the loss was exactly 3 at every logged step"),
    ],
)
def test_a_run_that_learns_nothing_warns_and_fails(
    tmp_path: Path, loss_fn: LossFn, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    train = Train(steps=12, log_every=4, eval_every=0, on_nonfinite=Nonfinite.skip)
    with caplog.at_level("WARNING", "maxhydra"):
        result = run_loop(tmp_path / "run", train, Checkpoint(), evals=[1.0], loss_fn=loss_fn)
    assert (result.status, result.step) == ("failed", 12)
    assert reason in result.reason and "train.allow_no_learning=true" in result.reason
    (warning,) = caplog.messages
    assert "skipped" in warning or "exactly 3" in warning

    allowed = dataclasses.replace(train, allow_no_learning=True)
    result = run_loop(tmp_path / "allowed", allowed, Checkpoint(), evals=[1.0], loss_fn=loss_fn)
    assert (result.status, result.reason) == ("finished", "all 12 steps done")


def test_the_first_logged_step_without_effect_is_named() -> None:
    """Skipped steps before a resume count; a run that learns later, or has learned before, does not fail."""
    effective = {"loss": 2.0, "grad_norm": 1.0, "tokens": 8.0}
    masked_out = {"loss": 0.0, "grad_norm": 0.0, "tokens": 0.0}
    monitor = LearningMonitor(step=0, past_losses=[])
    for step in (1, 2, 3):
        monitor.observe(step, {**masked_out, "skipped": step})
    assert "none of the 3 updates" in (monitor.verdict() or "")
    monitor.observe(5, {**effective, "skipped": 3})
    assert monitor.verdict() is None

    monitor.observe(6, {**effective, "skipped": 3, "groups/informative": 0.0})
    assert "no group of 6 batches had different rewards" in (monitor.verdict() or "")

    resumed = LearningMonitor(step=3, past_losses=[0.0] * 3)
    resumed.observe(4, {**masked_out, "skipped": 4})
    assert "none of the 4 updates" in (resumed.verdict() or "")


def test_held_out_batches_without_a_loss_are_rejected() -> None:
    batch = {"tokens": jnp.ones((2, 4)), "weights": jnp.zeros((2, 4))}
    with pytest.raises(ConfigError, match=r"train.eval_batches=2: evaluates 2 held-out batches in which no token"):
        held_out_loss(masked, lambda: iter([batch] * 3), limit=2, parts=1)
    assert held_out_loss(masked, lambda: iter([batch] * 3), limit=0, parts=1) is None
