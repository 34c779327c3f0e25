"""A run on disk: its config, metrics, checkpoints, sample, rollouts and weights."""

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.schema.config import Config
from maxhydra.config.serialize import from_yaml, read_run_facts
from maxhydra.record import RunDirectory, read_metrics, series
from maxhydra.record.checkpoint_tiers import local_steps
from maxhydra.record.rollout_store import search
from maxhydra.record.rollouts import FOLDER, TRAIN, Query
from maxhydra.runs import Registry

if TYPE_CHECKING:
    import pandas

    from maxhydra.library.loaded_model import LoadedModel


class Series(NamedTuple):
    """The values of a metric and the steps at which they were logged."""

    steps: np.ndarray
    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class StoredRun:
    """A run folder; everything is read when it is used, so a running run shows its current state."""

    path: Path

    @property
    def facts(self) -> dict[str, Any]:
        """The content of run.json: status, command, machine, sessions and more."""
        return dict(read_run_facts(self.path))

    @property
    def status(self) -> str:
        return str(self.facts["status"])

    @functools.cached_property
    def config(self) -> Config:
        """The validated config of the last session."""
        file = self._directory.config_path
        return from_yaml(file.read_text(encoding="utf-8"), str(file))

    @property
    def metrics(self) -> dict[str, Series]:
        """All metrics by name."""
        rows = read_metrics(self._directory.metrics_path)
        names = dict.fromkeys(name for row in rows for name in row if name != "step")
        return {name: Series(*map(np.asarray, series(rows, name))) for name in names}

    def frame(self) -> "pandas.DataFrame":
        """All metrics as a pandas DataFrame with a row per step and a column per metric."""
        try:
            import pandas  # noqa: PLC0415
        except ImportError:
            raise ConfigError(
                Problem("pandas", "is not installed", hint="pip install pandas, or use metrics")
            ) from None
        columns = {name: pandas.Series(metric.values, index=metric.steps) for name, metric in self.metrics.items()}
        return pandas.DataFrame(columns).rename_axis("step")

    @property
    def checkpoints(self) -> list[int]:
        """The steps of complete checkpoints, in order."""
        return sorted(local_steps(self._directory.checkpoints))

    @property
    def sample(self) -> str | None:
        """The text that was sampled at the end of the run (train.sample)."""
        return self.facts.get("sample")

    def rollouts(self, kind: str = TRAIN, *, limit: int = 20) -> list[dict[str, Any]]:
        """The newest completions of task=grpo with their rewards; `kind` is train or eval."""
        return search(self.path / FOLDER, Query(kind=kind, limit=limit)).records

    def load_model(self, step: int | None = None) -> "LoadedModel":
        """Load the model with the weights of a checkpoint, by default the last one, on the devices of this process."""
        steps = self.checkpoints
        if not steps or (step is not None and step not in steps):
            reason, accepted = (
                f"has no checkpoint{'' if step is None else f' of step {step}'}",
                ", ".join(map(str, steps)),
            )
            raise ConfigError(Problem(str(self.path), reason, accepted=accepted or "a run with checkpoints"))
        # jax is imported here.
        from maxhydra.library.loaded_model import load_model  # noqa: PLC0415

        return load_model(self.config, self._directory.checkpoints / str(steps[-1] if step is None else step))

    @property
    def params(self) -> Any:
        """The weights of the last checkpoint, as a tree of arrays."""
        return self.load_model().params

    @property
    def _directory(self) -> RunDirectory:
        return RunDirectory(self.path, writes=False)


def load_run(name: str | Path, *, outputs: str | Path = "outputs") -> StoredRun:
    """Return a run by its folder, or by its name below `outputs`, as `maxhydra runs show NAME` finds it."""
    if RunDirectory(name, writes=False).exists():
        return StoredRun(Path(name).absolute())
    registry = Registry(outputs)
    try:
        return StoredRun(registry.directory(registry.find(str(name))).path.absolute())
    finally:
        registry.close()
