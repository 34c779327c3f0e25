"""Benchmark training, decoding and kernels of a config: one line of JSON per measurement, printed and stored."""

from collections.abc import Iterator
from contextlib import closing

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.tasks.analysis import BenchTask, Measured
from maxhydra.measure import BenchRecord, BenchTarget, OutOfMemoryError
from maxhydra.measure.decoding import measure_decoding
from maxhydra.measure.kernels import measure_kernels
from maxhydra.measure.record import with_synthetic_data
from maxhydra.measure.training import measure_training
from maxhydra.record import MetricsWriter
from maxhydra.record.atomic_io import to_json
from maxhydra.tasks import Job, Outcome

NEEDS_DEVICES = KEEPS_RUN = True
LINES = "bench.jsonl"


def run(job: Job) -> Outcome:
    task = job.config.task
    assert isinstance(task, BenchTask)
    _check(job, task)
    config = with_synthetic_data(job.config, job.choices, job.overrides)
    target = BenchTarget(config, job.machine, job.choices, job.overrides)
    lines: list[BenchRecord] = []
    try:
        for what in task.what:
            for line in _measure(target, task, what):
                lines.append(line)
                _write(job, line)
    except OutOfMemoryError as error:
        return Outcome("failed", str(error), facts={"lines": lines})
    metrics = _metrics(lines)
    if job.run.writes and metrics:
        with closing(MetricsWriter(job.run.metrics_path)) as writer:
            writer.truncate(0)
            writer.write(task.steps, metrics)
    return Outcome("finished", f"{len(lines)} measurements in {LINES}", metrics, {"lines": lines})


def _check(job: Job, task: BenchTask) -> None:
    if Measured.decode in task.what and job.machine.process_count > 1:
        reason = "decode supports only one process, with any number of devices"
        hint = f"{job.machine.process_count} processes were started"
        raise ConfigError(Problem("task.what", reason, value=task.what, hint=hint))


def _measure(target: BenchTarget, task: BenchTask, what: Measured) -> Iterator[BenchRecord]:
    if what is Measured.pretrain:
        yield measure_training(target, warm_up=task.warm_up, steps=task.steps)
    elif what is Measured.decode:
        yield from measure_decoding(target, task.load, task.engine)
    else:
        yield from measure_kernels(target)


def _write(job: Job, line: BenchRecord) -> None:
    if job.run.writes:
        text = to_json(line)
        with open(job.run.path / LINES, "a", encoding="utf-8") as file:
            file.write(text + "\n")
        print(text, flush=True)


def _metrics(lines: list[BenchRecord]) -> dict[str, float]:
    """Metrics of the training step, under the names that training logs, for objectives and reports."""
    step = next((line for line in lines if line["bench"] == "pretrain"), None)
    if step is None:
        return {}
    metrics = {"tokens_per_second": step["tokens_per_second"], "tflops_per_device": step["tflops_per_device"]}
    metrics |= {"step_time": step["step_ms"] / 1e3, "loss": step["loss"][1]}
    return metrics | ({"mfu": step["mfu"]} if step["mfu"] is not None else {})
