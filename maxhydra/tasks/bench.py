"""Speed and memory of what the config would do here: a line of JSON for each measurement, printed and kept."""

from collections.abc import Iterator
from contextlib import closing

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.tasks.bench import BenchTask, Measured
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
    subject = BenchTarget(config, job.machine, job.choices, job.overrides)
    lines: list[BenchRecord] = []
    try:
        for what in task.what:
            for line in _measured(subject, task, what):
                lines.append(line)
                _keep(job, line)
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
        reason = "decodes in one process, which may have many devices"
        raise ConfigError(
            Problem("task.what", reason, value=task.what, hint=f"{job.machine.process_count} were started")
        )


def _measured(subject: BenchTarget, task: BenchTask, what: Measured) -> Iterator[BenchRecord]:
    if what is Measured.pretrain:
        yield measure_training(subject, warm_up=task.warm_up, steps=task.steps)
    elif what is Measured.decode:
        yield from measure_decoding(subject, task.load, task.engine)
    else:
        yield from measure_kernels(subject)


def _keep(job: Job, line: BenchRecord) -> None:
    if job.run.writes:
        text = to_json(line)
        with open(job.run.path / LINES, "a", encoding="utf-8") as file:
            file.write(text + "\n")
        print(text, flush=True)


def _metrics(lines: list[BenchRecord]) -> dict[str, float]:
    """Of the training step, by the names that training logs, for objectives and the report."""
    step = next((line for line in lines if line["bench"] == "pretrain"), None)
    if step is None:
        return {}
    named = {"tokens_per_second": step["tokens_per_second"], "tflops_per_device": step["tflops_per_device"]}
    named |= {"step_time": step["step_ms"] / 1e3, "loss": step["loss"][1]}
    return named | ({"mfu": step["mfu"]} if step["mfu"] is not None else {})
