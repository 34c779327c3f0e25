"""TensorBoard event files in <run>/tensorboard."""

from collections.abc import Mapping

from maxhydra.config.schema.run import Tracker as TrackerConfig
from maxhydra.record.atomic_io import to_json
from maxhydra.train.trackers import Backend, Rollouts, TrackedOutcome, TrackedSession, missing_package

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
        self._writer.add_text("config", _code(to_json(session.config_dict, indent=2)), session.resumed_from)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_outcome(self, outcome: TrackedOutcome) -> None:
        if outcome.sample is not None:
            self._writer.add_text("sample", _code(outcome.sample), outcome.step)
        self.log_rollouts(outcome.step, outcome.rollouts)

    def log_rollouts(self, step: int, rollouts: Rollouts) -> None:
        for kind, rows in rollouts.items():
            text = "\n\n".join(_code(to_json(row, indent=2)) for row in rows)
            self._writer.add_text(f"rollouts/{kind}", text, step)

    def close(self) -> None:
        self._writer.close()


def _code(text: str) -> str:
    return "    " + text.replace("\n", "\n    ")


def open_tracker(tracker: TrackerConfig, session: TrackedSession) -> Backend:
    try:
        return _TensorBoard(session)
    except ImportError as error:
        raise missing_package(error, "tensorboard", tracker) from None
