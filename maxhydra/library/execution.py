"""Compose configs and run them in this process."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

# Registers model=from_hf, an option whose values are read from a Hugging Face folder.
import maxhydra.convert  # noqa: F401
from maxhydra.config.compose.composer import compose as compose_overrides
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.schema.config import Config
from maxhydra.config.serialize import read_run_facts
from maxhydra.record.atomic_io import from_number

ORIGIN = "_origin"


@dataclasses.dataclass(frozen=True)
class _Origin:
    """Choices and overrides of a config, which its run records so that it can be started again."""

    choices: dict[str, str]
    overrides: list[str]
    config_dir: str | None


@dataclasses.dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    path: Path | None
    """The run folder; None for a task that keeps none, such as plan."""
    status: str
    """finished, preempted or failed."""
    reason: str
    metrics: dict[str, float]
    """The last value of each metric."""
    objective: float | None
    """The value of the metric that config.objective names."""


def compose(overrides: Sequence[str] = (), *, config_dir: str | Path | None = None) -> Config:
    """Return the config that `maxhydra OVERRIDES` runs with; raise ConfigError with every problem if it is not valid.

    `config_dir` is a folder of options, as `--config-dir`.
    """
    folder = None if config_dir is None else str(config_dir)
    composed = compose_overrides(list(overrides), folder)
    # Not a field: a config that is changed with dataclasses.replace has no origin.
    object.__setattr__(composed.config, ORIGIN, _Origin(composed.choices, list(overrides), folder))
    return composed.config


def run(config: Config | Sequence[str], *, config_dir: str | Path | None = None) -> RunResult:
    """Run a config, or the config of overrides, in this process, and return how it ended.

    A run with a `run.name` that exists resumes. An interrupt (Ctrl-C) saves a training run, which is then preempted. A
    failed run is a result, not an exception; ConfigError is raised if the config does not fit the machine or the data.
    """
    if not isinstance(config, Config):
        config = compose(config, config_dir=config_dir)
    origin = getattr(config, ORIGIN, None)
    if origin is None:
        # Its run would record no overrides, so that it could not be started again.
        hint = "change it by overrides: run([*overrides, 'train.steps=100'])"
        raise ConfigError(Problem("config", "was not returned by maxhydra.compose", hint=hint))
    # jax is imported here, after the config is known to be valid.
    from maxhydra import tasks  # noqa: PLC0415
    from maxhydra.cli.run_job import write_run_report  # noqa: PLC0415
    from maxhydra.runtime import signals  # noqa: PLC0415

    try:
        with _signals():
            result = tasks.run(
                config, choices=origin.choices, overrides=origin.overrides, path=None, config_dir=origin.config_dir
            )
    except signals.Interrupted:
        raise KeyboardInterrupt from None
    metrics = result.metrics
    if result.path is not None and result.writes:
        write_run_report(result)
        stored = read_run_facts(result.path).get("metrics", {})
        metrics = {name: float(from_number(value)) for name, value in stored.items()}
    return RunResult(result.path, result.status, result.reason, metrics, result.objective)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Handle signals while a run is active; Python allows that in the main thread only."""
    from maxhydra.runtime import signals  # noqa: PLC0415

    with signals.installed() if threading.current_thread() is threading.main_thread() else contextlib.nullcontext():
        yield
