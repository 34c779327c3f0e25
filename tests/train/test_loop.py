"""The decisions of the loop: when to evaluate, save and end. The model is a linear fit; everything else is real."""

import dataclasses
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxhydra.config import Config, ConfigError
from maxhydra.config.schema.checkpoint import Checkpoint
from maxhydra.config.schema.health import Profile
from maxhydra.config.schema.health import Watchdog as WatchdogSettings
from maxhydra.config.schema.model import Model
from maxhydra.config.schema.run import EarlyStop, Nonfinite, Progress, Train
from maxhydra.optim import Optimizer
from maxhydra.record import MetricsWriter, RunDirectory, read_metrics, series
from maxhydra.runs.profile import profile_folders, summarize_profile
from maxhydra.runtime import signals
from maxhydra.runtime.profiler import Profiler
from maxhydra.runtime.progress import open_step_progress
from maxhydra.runtime.usage import UsageSampler
from maxhydra.runtime.watchdog import Watchdog
from maxhydra.train import loop as loop_module
from maxhydra.train import metrics as metrics_module
from maxhydra.train.callbacks import Callbacks
from maxhydra.train.checkpoint import open_checkpointer
from maxhydra.train.evaluate import held_out_loss
from maxhydra.train.loop import LoopContext, TrainResult, end_reason, fit, is_evaluation_missing
from maxhydra.train.loss import LossFn
from maxhydra.train.metrics import LearningMonitor, MetricsHistory, MetricsLogger, StepCost
from maxhydra.train.save_schedule import SaveSchedule, Tier
from maxhydra.train.state import Guard, TrainState
from maxhydra.train.statistics import StatisticsLogger
from maxhydra.train.step import make_step
from maxhydra.train.trackers import Trackers

OPTIMIZER = Optimizer(transform=optax.sgd(0.1), schedule=lambda step: 0.1)


class Batches:
    """Points on a line; `poison` is the number of the batch that contains a NaN, `signal_at` of that with a signal."""

    def __init__(self, poison: int | None = None, signal_at: int | None = None):
        self._count, self._poison, self._signal_at = 0, poison, signal_at

    def take(self, step: int, state: TrainState) -> dict[str, np.ndarray]:
        self._count += 1
        if self._count == self._signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
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
    evals: list[float] | Iterator[float],
    past: tuple[float, ...] = (),
    loss_fn: LossFn = loss,
    start: int = 0,
    step_fn: Any = None,
    step_for_profile: Any = None,
    profiler: Profiler | None = None,
    run: RunDirectory | None = None,
    **batches: Any,
) -> TrainResult:
    """Run the loop with the given sequence of eval losses, and those of earlier sessions."""
    run = run or RunDirectory(folder, writes=False)
    eval_losses: Iterator[float] = iter(evals)
    params = {"w": jnp.zeros(())}
    key = jax.random.key_data(jax.random.key(0))
    state = TrainState(jnp.zeros((), jnp.int32), params, {}, OPTIMIZER.transform.init(params), key, Guard.fresh())
    history = MetricsHistory.read(run.metrics_path, start=start)
    history.evaluations.update({number - len(past): {"eval/loss": loss} for number, loss in enumerate(past)})
    writer = MetricsWriter(run.metrics_path)
    progress = open_step_progress(Progress.none, total=train.steps, start=0, shown=False)
    cost = StepCost(tokens=1, flops=2.0, devices=1, peak_tflops=1.0)
    checkpointer = open_checkpointer(run.checkpoints, checkpoint, history.evaluations)
    callbacks = Callbacks(Config(train=train), run, start=start)
    step_fn = step_fn or jax.jit(make_step(loss_fn, OPTIMIZER, train))
    context = LoopContext(
        train=train,
        checkpoint=checkpoint,
        step=step_fn,
        step_for_profile=lambda: step_for_profile or step_fn,
        batches=Batches(**batches),  # type: ignore[arg-type]
        evaluate=lambda state: {"eval/loss": next(eval_losses)},
        checkpointer=checkpointer,
        metrics=MetricsLogger(
            cost,
            run=run,
            writer=writer,
            trackers=[Trackers(), callbacks],
            progress=progress,
            usage=UsageSampler(0.01, sample=lambda: {"system/cpu_share": 0.5}),
            step=start,
        ),
        history=history,
        watchdog=Watchdog(WatchdogSettings(factor=None), run.path),
        profiler=profiler or Profiler(Profile(), run.path),
        statistics=StatisticsLogger(None, None, lambda: writer, Model()),
        callbacks=callbacks,
    )
    with signals.Deferral() as deferral:
        result = fit(context, state, start=start, deferral=deferral)
    checkpointer.close()
    return result


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


@pytest.mark.slow
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
    # The first interval contains the compilation, and so samples.
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["system/cpu_share"] == 0.5
    np.testing.assert_allclose(row["mfu"], 8.0 / row["step_time"] / 1e12)


class SimulatedSaves:
    """Steps of `step` seconds, and saves that block for some time and are committed later."""

    def __init__(self, checkpoint: Checkpoint, *, block: float, commit: float, step: float = 1.0):
        self._step = step
        self.now, self.blocked, self._committed_at = 0.0, 0.0, 0.0
        self._block, self._commit = block, commit
        self._schedule = SaveSchedule(
            checkpoint, is_saving=lambda: self.now < self._committed_at, clock=lambda: self.now
        )

    def run(self, steps: int) -> dict[int, Tier]:
        saved = {}
        for step in range(1, steps + 1):
            self.now += self._step
            if (tier := self._schedule.due_tier(step)) is not None:
                saved[step] = tier
                with self._schedule.measure(step, tier):
                    started, self.now = self.now, max(self.now, self._committed_at) + self._block
                    self._committed_at = self.now + self._commit
                    self.blocked += self.now - started
        return saved


@pytest.mark.parametrize(
    ("block", "commit", "shortest", "longest"),
    # Limited by max_overhead, one save per 20 steps, and by the disk.
    [(0.2, 1.0, 15, 25), (0.01, 8.0, 8, 13), (0.0, 0.0, 1, 2)],
)
def test_saves_are_as_frequent_as_the_disk_and_max_overhead_allow(
    block: float, commit: float, shortest: int, longest: int
) -> None:
    saves = SimulatedSaves(Checkpoint(every=10**6, max_overhead=0.01), block=block, commit=commit)
    steps = list(saves.run(3000))
    intervals = np.diff(steps[len(steps) // 2 :])
    assert shortest <= intervals.min() and intervals.max() <= longest
    assert saves.blocked / saves.now <= 0.0101


def test_fixed_intervals_are_saved_too() -> None:
    """The run's folder at multiples of `every`; everything else goes to the hosts' disks if there are local saves."""
    fixed = SimulatedSaves(Checkpoint(every=4, local_every=3), block=1, commit=1).run(9)
    assert fixed == {3: Tier.local, 4: Tier.run, 6: Tier.local, 8: Tier.run, 9: Tier.local}
    checkpoint = Checkpoint(every=100, local_every=70, max_overhead=0.01, every_minutes=None)
    both = SimulatedSaves(checkpoint, block=0.1, commit=5).run(400)
    assert [step for step, tier in both.items() if tier is Tier.run] == [100, 200, 300, 400]
    assert {70, 140, 210, 280, 350} < {step for step, tier in both.items() if tier is Tier.local}
    assert len(both) > 20


def test_saves_by_time() -> None:
    """The first after a minute, then one in ten minutes; expensive saves less often."""
    cheap = SimulatedSaves(Checkpoint(every=10**6), block=0.0, commit=1).run(2000)
    assert list(cheap) == [61, 661, 1261, 1861]
    expensive = SimulatedSaves(Checkpoint(every=10**6), block=90.0, commit=1)
    assert list(expensive.run(20000))[:3] == [61, 1711, 3421] and expensive.blocked / expensive.now < 0.06
    assert list(SimulatedSaves(Checkpoint(every=500), block=0.0, commit=1).run(1600)) == [61, 500, 1000, 1500]
    assert not SimulatedSaves(Checkpoint(every=10**6, every_minutes=None), block=0.0, commit=1).run(2000)
    slow = SimulatedSaves(Checkpoint(every=10**6, every_minutes=2, first_minutes=0.5), block=0.0, commit=1, step=50.0)
    assert list(slow.run(10)) == [2, 4, 6, 8, 10]


def test_a_run_saves_by_time(tmp_path: Path) -> None:
    train = Train(steps=40, log_every=1, eval_every=0)
    checkpoint = Checkpoint(every=1000, keep=100, every_minutes=1e-4, first_minutes=1e-5)
    run_loop(tmp_path, train, checkpoint, evals=[1.0])
    assert 40 in saved_steps(tmp_path) and len(saved_steps(tmp_path)) > 1


def test_max_overhead_saves_between_the_fixed_steps(tmp_path: Path) -> None:
    train = Train(steps=40, log_every=1, eval_every=0)
    run_loop(tmp_path, train, Checkpoint(every=1000, keep=100, max_overhead=0.5), evals=[1.0])
    assert 40 in saved_steps(tmp_path) and len(saved_steps(tmp_path)) > 1


@pytest.mark.slow
def test_steps_are_profiled_when_due_and_by_signal(tmp_path: Path) -> None:
    settings = Profile(steps=[5, 7], every=10, length=2, memory=True)
    with signals.installed():
        os.kill(os.getpid(), signal.SIGUSR2)
        profiler = Profiler(settings, tmp_path, program=lambda: 'ROOT %add.1 = f32[] add(), metadata={op_name="x/y"}')
        run_loop(tmp_path, Train(steps=20), Checkpoint(every=100), evals=[1.0], profiler=profiler)
        profiler.close()
    folders = profile_folders(tmp_path)
    # The last one ends with the run.
    assert [(path.name, summarize_profile(path).steps) for path in folders] == [
        ("step_00001", 2),
        ("step_00005", 3),
        ("step_00010", 2),
        ("step_00020", 1),
    ]
    summary = summarize_profile(folders[1])
    assert summary.devices == 1 and 0 < summary.idle < 1 and summary.operations[0].milliseconds > 0
    assert (folders[1] / "memory.prof").stat().st_size and next(folders[1].glob("plugins/profile/*/*.xplane.pb"))
    assert (folders[1] / "operations.json").read_text() == '{"add.1": "x/y"}'


@pytest.mark.slow
def test_profiled_steps_alone_run_the_program_for_profiles(tmp_path: Path) -> None:
    train, profiled = Train(steps=6), []
    usual = jax.jit(make_step(loss, OPTIMIZER, train))

    def step_for_profile(state: TrainState, batch: dict) -> Any:
        profiled.append(int(state.step) + 1)
        return usual(state, batch)

    profiler = Profiler(Profile(steps=[3, 4]), tmp_path)
    run_loop(
        tmp_path,
        train,
        Checkpoint(every=100),
        evals=[1.0],
        profiler=profiler,
        step_fn=usual,
        step_for_profile=step_for_profile,
    )
    assert profiled == [3, 4]


def test_a_process_that_is_not_selected_profiles_only_by_signal(tmp_path: Path) -> None:
    other = Profiler(Profile(steps=[1, 2], every=4), tmp_path, process=1)
    assert not any(other.is_due(step) for step in range(1, 9))
    with signals.installed():
        os.kill(os.getpid(), signal.SIGUSR2)
        assert other.is_due(3) and not other.is_due(4)


class Clock:
    """Time that passes only while something waits. The thread that waits for the end of steps has a separate time."""

    def __init__(self) -> None:
        self._now = {True: 0.0, False: 0.0}

    def perf_counter(self) -> float:
        return self._now[self._is_step_clock()]

    def wait_until(self, moment: float) -> None:
        self._now[self._is_step_clock()] = max(self.perf_counter(), moment)

    @staticmethod
    def _is_step_clock() -> bool:
        return threading.current_thread().name.startswith("step-clock")


class SlowDevice:
    """A device that takes `seconds` per step, while the host may dispatch one further step."""

    def __init__(self, train: Train, seconds: float, clock: Clock):
        self._step, self._seconds, self._busy_until = jax.jit(make_step(loss, OPTIMIZER, train)), seconds, 0.0
        self._clock = clock

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, "SlowArray"]]:
        state, metrics = self._step(state, batch)
        self._clock.wait_until(self._busy_until - self._seconds)
        self._busy_until = max(self._busy_until, self._clock.perf_counter()) + self._seconds
        return state, {name: SlowArray(value, self._busy_until, self._clock) for name, value in metrics.items()}


@dataclasses.dataclass(frozen=True)
class SlowArray:
    """An array that is computed at a time in the future."""

    value: jax.Array
    ready: float
    clock: Clock

    def is_ready(self) -> bool:
        return self.clock.perf_counter() >= self.ready

    def block_until_ready(self) -> "SlowArray":
        self.clock.wait_until(self.ready)
        return self

    def __array__(self) -> np.ndarray:
        return np.asarray(self.block_until_ready().value)


def test_throughput_is_tokens_over_device_time_at_every_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines before an evaluation, a save and the end included: flushes are irregular there, steps are not."""
    train, seconds, clock = Train(steps=9, log_every=3, eval_every=4), 0.1, Clock()
    for module in (loop_module, metrics_module):
        monkeypatch.setattr(module, "time", clock)

    def slow_evaluations() -> Iterator[float]:
        for loss in (3.0, 2.0, 1.0):
            clock.wait_until(clock.perf_counter() + 0.15)
            yield loss

    device = SlowDevice(train, seconds, clock)
    run = Recorded(tmp_path / "run", writes=False)
    run_loop(run.path, train, Checkpoint(every=5), evals=slow_evaluations(), step_fn=device, run=run)
    steps, rates = series(tmp_path / "run" / "metrics.jsonl", "tokens_per_second")
    assert steps == [1, 3, 6, 9]
    # Time between flushes instead of steps gave 2.8 times this rate.
    assert rates == pytest.approx([4 / seconds] * 4)
    assert run.spent == pytest.approx({"steps": 9 * seconds, "input_wait": 0.0, "eval": 3 * 0.15, "save": 0.0})


class Recorded(RunDirectory):
    """Keeps the seconds by activity that the loop records."""

    def heartbeat(self, **facts: Any) -> None:
        self.spent = facts.get("spent")


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


@pytest.mark.parametrize(("values", "ends"), [([0.5, 0.6, 0.55, 0.6], True), ([0.5, 0.6, 0.55, 0.7], False)])
def test_a_metric_of_which_more_is_better_must_grow(values: list[float], ends: bool) -> None:
    metric = "eval/hellaswag/acc_norm"
    history: Any = SimpleNamespace(evaluations={40: {metric: values[-1]}}, eval_values=lambda name: values)
    reason = end_reason(Train(steps=100, early_stop=EarlyStop(patience=2, metric=metric)), history, 40)
    assert reason == (f"{metric} did not improve in 2 evaluations" if ends else None)


def test_patience_counts_evaluations_before_a_resume(tmp_path: Path) -> None:
    train = Train(steps=100, eval_every=10, early_stop=EarlyStop(patience=2))
    result = run_loop(tmp_path, train, Checkpoint(every=1000), evals=[2.2, 0.5], past=(3.0, 2.0, 2.1))
    assert result.step == 10


@pytest.mark.slow
@pytest.mark.parametrize("third", [2.0, math.nan])
def test_keeps_the_newest_and_the_best(tmp_path: Path, third: float) -> None:
    """A NaN loss is never the best."""
    train = Train(steps=60, eval_every=10)
    run_loop(tmp_path, train, Checkpoint(every=10, keep=2, keep_best=1), evals=[3.0, 1.0, third, 2.5, 2.6, 2.7])
    assert saved_steps(tmp_path) == [20, 50, 60]


@pytest.mark.slow
def test_the_best_checkpoint_may_be_evaluated_after_its_save(tmp_path: Path) -> None:
    """The evaluation of step 10 was interrupted, and the session that resumed at step 10 repeated it."""
    checkpoint, train = Checkpoint(every=10, keep=1, keep_best=1), Train(steps=10, eval_every=0)
    run_loop(tmp_path, train, checkpoint, evals=interrupted_evaluation())
    (tmp_path / "metrics.jsonl").write_text('{"step": 10, "eval/loss": 1.0}\n')
    run_loop(tmp_path, Train(steps=30, eval_every=10), checkpoint, evals=[2.0, 3.0], start=10)
    assert saved_steps(tmp_path) == [10, 30]


def interrupted_evaluation() -> Iterator[float]:
    raise signals.Interrupted
    yield 0.0


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


@pytest.mark.slow
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
    # Threads of other tests may log warnings too.
    assert len([message for message in caplog.messages if "is skipped" in message or "exactly 3" in message]) == 1

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
    assert "none of the 3 updates" in (monitor.failure_reason() or "")
    monitor.observe(5, {**effective, "skipped": 3})
    assert monitor.failure_reason() is None

    monitor.observe(9, {**effective, "skipped": 3, "groups/informative": 0.0})
    assert monitor.failure_reason() is None  # too few batches to tell
    monitor.observe(10, {**effective, "skipped": 3, "groups/informative": 0.0})
    assert "no group of 10 batches had different rewards" in (monitor.failure_reason() or "")

    resumed = LearningMonitor(step=3, past_losses=[0.0] * 3)
    resumed.observe(4, {**masked_out, "skipped": 4})
    assert "none of the 4 updates" in (resumed.failure_reason() or "")


def test_held_out_batches_without_a_loss_are_rejected() -> None:
    batch = {"tokens": jnp.ones((2, 4)), "weights": jnp.zeros((2, 4))}
    with pytest.raises(ConfigError, match=r"train.eval_batches=2: evaluates 2 held-out batches in which no token"):
        held_out_loss(masked, lambda: iter([batch] * 3), limit=2, parts=1)
    assert held_out_loss(masked, lambda: iter([batch] * 3), limit=0, parts=1) is None


@pytest.fixture
def handled_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # After this time the process, which is that of the tests, would end.
    monkeypatch.setattr(signals, "GRACE_SECONDS", 3600.0)
    with signals.installed():
        yield
        # Without this, the process would have to end soon.
        signals.dismiss()


def interrupted_after(losses: list[float]) -> Iterator[float]:
    """Eval losses, then an evaluation during which a signal arrives."""
    yield from losses
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        signals.check()
        time.sleep(0.01)


@pytest.mark.usefixtures("handled_signals")
@pytest.mark.parametrize("evals", [[3.0, 2.0], [3.0, 2.0, 2.5]])
def test_an_interrupted_evaluation_is_repeated_after_the_resume(tmp_path: Path, evals: list[float]) -> None:
    """The second case is interrupted at the last step: something remains to be done, the evaluation."""
    train = Train(steps=30, eval_every=10, log_every=10, early_stop=EarlyStop(patience=2))
    settings = Checkpoint(every=1000, keep=5)
    step = 10 * len(evals)
    result = run_loop(tmp_path, train, settings, evals=interrupted_after(evals[:-1]))
    assert (result.status, result.step, result.reason) == (
        "preempted",
        step,
        f"SIGTERM at step {step}, during its evaluation",
    )
    assert saved_steps(tmp_path) == [step]
    assert series(tmp_path / "metrics.jsonl", "eval/loss")[1] == evals[:-1]


def test_a_session_starts_with_the_evaluation_that_was_interrupted(tmp_path: Path) -> None:
    """Here, that evaluation is the second one without improvement, so the session ends with it."""
    train = Train(steps=40, eval_every=10, log_every=10, early_stop=EarlyStop(patience=2))
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    rows = [(10, {"eval/loss": 1.0}), (20, {"eval/loss": 1.2}), (30, {"loss": 3.0, "grad_norm": 0.5})]
    for step, metrics in rows:
        writer.write(step, metrics)
    writer.close()
    result = run_loop(tmp_path, train, Checkpoint(every=1000), evals=[1.1], start=30)
    assert (result.status, result.step) == ("finished", 30)
    assert result.metrics == {"loss": 3.0, "grad_norm": 0.5, "eval/loss": 1.1}
    assert series(tmp_path / "metrics.jsonl", "eval/loss") == ([10, 20, 30], [1.0, 1.2, 1.1])


@pytest.mark.usefixtures("handled_signals")
def test_a_signal_during_the_last_step_changes_nothing(tmp_path: Path) -> None:
    result = run_loop(tmp_path, Train(steps=7, eval_every=0), Checkpoint(), evals=[1.0], signal_at=7)
    assert (result.status, result.reason, saved_steps(tmp_path)) == ("finished", "all 7 steps done", [7])


@pytest.mark.usefixtures("handled_signals")
def test_a_signal_ends_the_run_after_its_step(tmp_path: Path) -> None:
    result = run_loop(tmp_path, Train(steps=7, eval_every=0), Checkpoint(), evals=[1.0], signal_at=5)
    assert (result.status, result.reason, saved_steps(tmp_path)) == ("preempted", "SIGTERM at step 5", [5])


def test_every_evaluation_is_judged_once(tmp_path: Path) -> None:
    """Versions before this one logged the evaluation of step 0 at every start."""
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for step, loss in [(0, 2.0), (0, 2.0), (2, 2.1), (4, 1.0)]:
        writer.write(step, {"eval/loss": loss})
    writer.close()
    train = Train(steps=12, eval_every=2, eval_start=True, early_stop=EarlyStop(patience=2))
    history = MetricsHistory.read(tmp_path / "metrics.jsonl", start=2)
    assert list(history.evaluations) == [0, 2] and end_reason(train, history, 2) is None
    history.evaluations[4] = {"eval/loss": 2.0}
    assert end_reason(train, history, 4) == "eval loss did not improve in 2 evaluations"
    assert MetricsHistory.read(tmp_path / "metrics.jsonl", start=0).is_empty


def test_a_run_that_ended_is_recognized(tmp_path: Path) -> None:
    history = MetricsHistory(4, {"loss": 1.0}, {2: {"eval/loss": 2.0}, 4: {"eval/loss": 0.9}})
    target = Train(steps=12, eval_every=2, target_eval_loss=1.0)
    assert end_reason(target, history, 4) == "eval loss 0.9000 reached train.target_eval_loss"
    assert end_reason(Train(steps=4), history, 4) == "all 4 steps done"
    assert end_reason(Train(steps=12), history, 4) is None
    assert not is_evaluation_missing(target, history, evaluates=True)
    del history.evaluations[4]
    assert is_evaluation_missing(target, history, evaluates=True)
    assert not is_evaluation_missing(target, history, evaluates=False)
    # A new run that starts from the state of another run has no history.
    assert not is_evaluation_missing(target, MetricsHistory(4, {}, {}), evaluates=True)
