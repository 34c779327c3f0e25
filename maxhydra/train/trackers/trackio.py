"""Trackio: one Trackio run per run directory, in Trackio's local folder (TRACKIO_DIR) or on the server it names."""

import contextlib
import io
import uuid
from collections.abc import Mapping
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.run import Tracker as TrackerConfig
from maxhydra.train.trackers import Backend, Rollouts, TrackedOutcome, TrackedSession, missing_package


class _Trackio:
    def __init__(self, run: Any, module: Any, last_steps: Mapping[str, int]):
        self._run, self._module, self._last_steps = run, module, last_steps

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # Trackio keeps all values of a step. Steps that a resumed session repeats have the same values.
        new = {name: value for name, value in metrics.items() if step > self._last_steps.get(name, -1)}
        if new:
            self._run.log(new, step=step)

    def log_outcome(self, outcome: TrackedOutcome) -> None:
        if outcome.sample is not None:
            sample = self._module.Markdown(f"```\n{outcome.sample}\n```")
            self._run.log({"sample": sample}, step=outcome.step)
        self.log_rollouts(outcome.step, outcome.rollouts)

    def log_rollouts(self, step: int, rollouts: Rollouts) -> None:
        content: dict[str, Any] = {}
        for kind, rows in rollouts.items():
            name = f"rollouts/{kind}"
            if step <= self._last_steps.get(name, -1):
                continue
            columns = list(dict.fromkeys(column for row in rows for column in row))
            data = [[str(row.get(column, "")) for column in columns] for row in rows]
            content[name] = self._module.Table(columns=columns, data=data)
        if content:
            self._run.log(content, step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()


def open_tracker(tracker: TrackerConfig, session: TrackedSession) -> Backend:
    """Start or continue the Trackio run whose name the run's first session recorded in run.json."""
    try:
        import trackio  # noqa: PLC0415
    except ImportError as error:
        raise missing_package(error, "trackio", tracker) from None
    known = session.facts("trackio").get("name")
    # Runs of other folders may have the same name.
    name = known or f"{session.run.path.name}-{uuid.uuid4().hex[:6]}"
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            run = trackio.init(
                project=tracker.project,
                name=name,
                config=session.config_dict,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
    except (ValueError, OSError) as error:
        hint = "names of projects have letters, digits, - and _"
        reason = f"Trackio did not start: {error}"
        raise ConfigError(Problem("tracker.project", reason, value=tracker.project, hint=hint)) from None
    session.record("trackio", name=name, project=tracker.project)
    last_steps: dict[str, int] = {}
    for row in _logged(trackio, tracker.project, name, known):
        last_steps |= dict.fromkeys((key for key in row if key != "step"), int(row["step"]))
    return _Trackio(run, trackio, last_steps)


def _logged(trackio: Any, project: str, name: str, known: str | None) -> list[dict[str, Any]]:
    """The rows that earlier sessions have logged, in order of their steps."""
    if known is None:
        return []
    rows: list[dict[str, Any]] = trackio.SQLiteStorage.get_logs(project, name)
    return sorted(rows, key=lambda row: int(row["step"]))
