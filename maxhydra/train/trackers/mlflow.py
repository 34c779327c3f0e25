"""MLflow: one MLflow run per run directory, in a local database or on a tracking server."""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.config.errors import show
from maxhydra.config.schema.run import Tracker as TrackerConfig
from maxhydra.train.trackers import Backend, Rollouts, TrackedOutcome, TrackedSession, missing_package

# Limits of MLflow: characters of a parameter, parameters and metrics in one request.
MAX_CHARACTERS, MAX_PARAMETERS = 500, 100
STATUSES = {"finished": "FINISHED", "failed": "FAILED", "preempted": "KILLED", "pruned": "KILLED"}


class _MLflow:
    def __init__(self, client: Any, run_id: str, *, is_resumed: bool):
        self._client, self._run_id, self._is_resumed = client, run_id, is_resumed
        self._last_steps: dict[str, int] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            # MLflow keeps all values of a step. Steps that a resumed session repeats have the same values.
            if step > self._last_step(name):
                self._client.log_metric(self._run_id, _metric_name(name), value, step=step)

    def log_outcome(self, outcome: TrackedOutcome) -> None:
        if outcome.sample is not None:
            self._client.log_text(self._run_id, outcome.sample, "sample.txt")
        self.log_rollouts(outcome.step, outcome.rollouts)
        self._client.set_terminated(self._run_id, STATUSES.get(outcome.status, "FAILED"))

    def log_rollouts(self, step: int, rollouts: Rollouts) -> None:
        """Replace the files of earlier steps; rows have their step."""
        for kind, rows in rollouts.items():
            columns = list(dict.fromkeys(name for row in rows for name in row))
            data = [[row.get(name) for name in columns] for row in rows]
            self._client.log_dict(self._run_id, {"columns": columns, "data": data}, f"rollouts_{kind}.json")

    def close(self) -> None:
        """Nothing is buffered; the status is set with the outcome, and stays RUNNING if the process is killed."""

    def _last_step(self, name: str) -> int:
        if name not in self._last_steps:
            known = self._client.get_metric_history(self._run_id, _metric_name(name)) if self._is_resumed else []
            self._last_steps[name] = max((metric.step for metric in known), default=-1)
        return self._last_steps[name]


def open_tracker(tracker: TrackerConfig, session: TrackedSession) -> Backend:
    """Start or continue the MLflow run whose id the run's first session recorded in run.json."""
    try:
        from mlflow.exceptions import MlflowException  # noqa: PLC0415
        from mlflow.tracking import MlflowClient  # noqa: PLC0415
    except ImportError as error:
        raise missing_package(error, "mlflow", tracker) from None
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    folder = session.config.run.folder().absolute()
    own = tracker.uri or os.environ.get("MLFLOW_TRACKING_URI")
    folder.mkdir(parents=True, exist_ok=True)
    uri, artifacts = own or f"sqlite:///{folder}/mlflow.db", None if own else f"{folder}/mlartifacts"
    known = session.facts("mlflow")
    try:
        with _quiet_alembic():
            client = MlflowClient(tracking_uri=uri)
            run_id = known.get("id")
            if run_id is None:
                run_id = _create_run(client, tracker, session, artifacts)
            else:
                client.update_run(run_id, status="RUNNING")
    except (MlflowException, OSError) as error:
        hint = "check that the tracking server runs, or set tracker.uri to a local store such as sqlite:///mlflow.db"
        reason = f"MLflow did not start: {str(error).splitlines()[0]}"
        raise ConfigError(Problem("tracker.uri", reason, value=uri, hint=hint)) from None
    session.record("mlflow", id=run_id, experiment=tracker.project)
    return _MLflow(client, run_id, is_resumed=bool(known))


def _create_run(client: Any, tracker: TrackerConfig, session: TrackedSession, artifacts: str | None) -> str:
    """Create the run, with the config as parameters; they cannot change, so later sessions do not send them."""
    experiment = client.get_experiment_by_name(tracker.project)
    if experiment is None:
        number = client.create_experiment(tracker.project, artifact_location=artifacts)
    else:
        number = experiment.experiment_id
    settings = session.config_dict
    labels = {f"tag.{tag}": "true" for tag in settings["run"]["tags"]}
    tags = {"mlflow.note.content": settings["run"]["notes"], **labels}
    run_id: str = client.create_run(number, run_name=session.run.path.name, tags=tags).info.run_id
    client.log_dict(run_id, settings, "config.yaml")
    from mlflow.entities import Param  # noqa: PLC0415

    params = [Param(key, show(value)[:MAX_CHARACTERS]) for key, value in _flatten(settings)]
    for start in range(0, len(params), MAX_PARAMETERS):
        client.log_batch(run_id, params=params[start : start + MAX_PARAMETERS])
    return run_id


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        elif not isinstance(value, Mapping):
            yield prefix + name, value


def _metric_name(name: str) -> str:
    """The name in MLflow, which has no @: eval/pass@1 is eval/pass_at_1."""
    return name.replace("@", "_at_")


@contextlib.contextmanager
def _quiet_alembic() -> Iterator[None]:
    """Keep Alembic, which creates the tables of a local database, from replacing the log handlers of the run."""
    root, handlers, level = logging.getLogger(), logging.getLogger().handlers[:], logging.getLogger().level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
