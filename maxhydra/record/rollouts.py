"""Names of the files of rollouts, and queries of them; rollout_store.py writes and reads them with NumPy."""

import dataclasses
from pathlib import Path
from typing import Any

FOLDER = "rollouts"
TRAIN, EVAL = "train", "eval"
KINDS = (TRAIN, EVAL)
ORDERS = ("newest", "oldest", "best", "worst")


@dataclasses.dataclass(frozen=True)
class Query:
    """Which completions of a run, and in which order. Bounds are inclusive; None leaves a side open."""

    kind: str = TRAIN
    first_step: int | None = None
    last_step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    prompt_number: int | None = None
    text: str = ""
    """Text that prompt or completion contains, in any case."""
    order: str = "newest"
    start: int = 0
    limit: int = 20


@dataclasses.dataclass(frozen=True)
class Page:
    """Completions of a query. `total` counts all that match, or is None for a text query that stopped at its limit."""

    records: list[dict[str, Any]]
    total: int | None


def files(folder: Path, kind: str) -> list[Path]:
    """Files of one kind, oldest first."""
    return sorted(folder.glob(f"{kind}-*.jsonl"), key=file_number)


def file_number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])
