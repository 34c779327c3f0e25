"""TensorBoard event files in <run>/tensorboard."""

from collections.abc import Mapping

from maxhydra.config.schema.run import Tracker as TrackerConfig
from maxhydra.record.atomic_io import to_json
from maxhydra.train.trackers import Backend, TrackedOutcome, TrackedSession, missing_package

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
        for name, text in texts(outcome).items():
            self._writer.add_text(name, text, outcome.step)

    def close(self) -> None:
        self._writer.close()


def texts(outcome: TrackedOutcome) -> dict[str, str]:
    """The sample and the rollouts of a session as Markdown."""
    rollouts = {
        f"rollouts/{kind}": "\n\n".join(_code(to_json(row, indent=2)) for row in rows)
        for kind, rows in outcome.rollouts.items()
    }
    return {**({} if outcome.sample is None else {"sample": _code(outcome.sample)}), **rollouts}


def _code(text: str) -> str:
    return "    " + text.replace("\n", "\n    ")


def open_tracker(tracker: TrackerConfig, session: TrackedSession) -> Backend:
    try:
        return _TensorBoard(session)
    except ImportError as error:
        raise missing_package(error, "tensorboard", tracker) from None
