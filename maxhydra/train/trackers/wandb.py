"""Weights & Biases: one W&B run per run directory, however many sessions it has."""

import contextlib
import sys
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.run import Tracker as TrackerConfig
from maxhydra.record import redact_argv
from maxhydra.train.trackers import Backend, Rollouts, TrackedOutcome, TrackedSession, missing_package


class _Wandb:
    def __init__(self, run: Any, table: Any):
        self._run, self._table = run, table

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # W&B ignores steps that it already has. After a resume they have the same values, so nothing is lost.
        self._run.log(dict(metrics), step=step)

    def log_outcome(self, outcome: TrackedOutcome) -> None:
        if outcome.sample is not None:
            self._run.summary["sample"] = outcome.sample
        # W&B has the metrics of the last step, and ignores what comes later for it.
        self.log_rollouts(outcome.step + 1, outcome.rollouts)

    def log_rollouts(self, step: int, rollouts: Rollouts) -> None:
        for kind, rows in rollouts.items():
            columns = list(dict.fromkeys(name for row in rows for name in row))
            data = [[str(row.get(name, "")) for name in columns] for row in rows]
            self._run.log({f"rollouts/{kind}": self._table(columns=columns, data=data)}, step=step)

    def close(self) -> None:
        self._run.finish()


def open_tracker(tracker: TrackerConfig, session: TrackedSession) -> Backend:
    """Start W&B with the id that the run's first session recorded in run.json."""
    try:
        import wandb  # noqa: PLC0415
    except ImportError as error:
        raise missing_package(error, "wandb", tracker) from None

    facts = session.run.read()
    identity = session.facts("wandb").get("id") or uuid.uuid4().hex[:12]
    session.record("wandb", id=identity)
    git = facts.get("git") or {}
    settings = wandb.Settings(
        # W&B would upload uncommitted changes unredacted; the run directory has them with secrets removed.
        disable_git=True,
        disable_code=True,
        git_commit=git.get("sha"),
        git_remote_url=git.get("remote"),
        console="off",
        silent=True,
    )
    try:
        with _redacted_argv():
            run = wandb.init(
                project=tracker.project,
                entity=tracker.entity,
                id=identity,
                name=session.run.path.name,
                tags=session.config_dict["run"]["tags"],
                notes=session.config_dict["run"]["notes"],
                config=session.config_dict,
                dir=str(session.run.path),
                mode=tracker.mode.value,
                resume="allow",
                settings=settings,
            )
    except wandb.errors.Error as error:
        hint = "log in with `wandb login`, or set tracker.mode=offline and upload the run later with `wandb sync`"
        raise ConfigError(
            Problem("tracker.mode", f"W&B did not start: {error}", value=tracker.mode.value, hint=hint)
        ) from None
    session.record("wandb", id=identity, project=tracker.project, url=run.url)
    return _Wandb(run, wandb.Table)


@contextlib.contextmanager
def _redacted_argv() -> Iterator[None]:
    """Redact sys.argv while W&B copies it."""
    command = sys.argv
    sys.argv = [command[0], *redact_argv(command[1:])]
    try:
        yield
    finally:
        sys.argv = command
