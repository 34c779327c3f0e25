"""The trials as a text table."""

from collections.abc import Sequence

from maxhydra.tune.trial import MEASURED, Trial
from maxhydra.tune.tuner import describe

HEADER = ("tokens/s", "step ms", "GiB", "steps", "compile s", "settings")


def table(trials: Sequence[Trial]) -> str:
    """The fastest first, failed trials last."""
    ranked = sorted(trials, key=lambda trial: trial.seconds_per_token)
    rows = [HEADER, *(_row(trial) for trial in ranked)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([*(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)), row[-1]])
        for row in rows
    )


def _row(trial: Trial) -> tuple[str, ...]:
    if trial.status != MEASURED:
        return (trial.status, "", "", str(trial.steps), "", describe(trial.candidate))
    line = trial.line
    return (
        f"{line['tokens_per_second']:,}",
        f"{line['step_ms']:g}",
        "" if trial.memory_gib is None else f"{trial.memory_gib:g}",
        str(trial.steps),
        f"{line['compile_s']:g}",
        describe(trial.candidate),
    )
