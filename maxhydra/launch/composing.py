"""From a proposal to the order that a worker is handed: composed and checked where Hydra is."""

from pathlib import Path

from maxhydra.config.compose.composer import Composer
from maxhydra.launch.base import Proposal, Shared
from maxhydra.launch.job_spec import JobSpec


class Ordering:
    """Composes the jobs of a sweep; they share most of what is read for that."""

    def __init__(self, shared: Shared):
        self._shared = shared
        self._composer = Composer(shared.config_dir)

    def order(self, proposal: Proposal) -> JobSpec:
        """ConfigError where the job's config is wrong."""
        overrides = self._shared.overrides(proposal)
        composed = self._composer.examine(overrides, with_hydra=False).composed()
        folder = self._shared.config_dir
        # The worker stands elsewhere.
        absolute = None if folder is None else str(Path(folder).expanduser().absolute())
        return JobSpec(composed.config, composed.choices, overrides, absolute)
