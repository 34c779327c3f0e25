"""TensorBoard event files in <run>/tensorboard."""

from collections.abc import Mapping

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.run import Tracker as TrackerConfig
from maxhydra.record.atomic_io import to_json
from maxhydra.train.trackers import TrackedSession, Tracker

# A killed run can lose this many seconds of its curves here; metrics.jsonl loses nothing.
FLUSH_SECONDS = 10


class _TensorBoard:
    def __init__(self, session: TrackedSession):
        from tensorboardX import SummaryWriter  # noqa: PLC0415

        self._writer = SummaryWriter(
            logdir=str(session.run.path / "tensorboard"),
            # Hides the events of steps that are repeated after a resume.
            purge_step=session.resumed_from + 1,
            flush_secs=FLUSH_SECONDS,
            # File names contain the time in seconds; two sessions within one second would overwrite each other.
            filename_suffix=f".{len(session.run.read()['sessions'])}",
        )
        code = to_json(session.config_dict, indent=2).replace("\n", "\n    ")
        self._writer.add_text("config", f"    {code}", session.resumed_from)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def open_tracker(tracker: TrackerConfig, session: TrackedSession) -> Tracker:
    try:
        return _TensorBoard(session)
    except ImportError as missing:
        reason, hint = f"tensorboard is not installed ({missing})", "pip install 'maxhydra[tensorboard]'"
        raise ConfigError(Problem("tracker.backends", reason, value=tracker.backends, hint=hint)) from None
