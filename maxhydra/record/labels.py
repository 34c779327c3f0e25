"""labels.json: tags and a note that people give a run after it started.

A file of its own: the process of a live run rewrites run.json from what it remembers, and would undo them.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from maxhydra.record.atomic_io import replace_file, to_json

LABELS, FACTS = "labels.json", "run.json"


def change_labels(folder: Path, *, add: Iterable[str], remove: Iterable[str], note: str | None) -> None:
    """Add tags, take tags away (also those of the config), and replace the note unless it is None."""
    with _alone(folder):
        labels = read_labels(folder)
        tags = {**labels.get("tags", {}), **dict.fromkeys(add, True), **dict.fromkeys(remove, False)}
        kept = labels.get("note") if note is None else note
        replace_file(folder / LABELS, to_json({"tags": tags, "note": kept}, indent=2) + "\n")
        # Who watches run.json for changes need not watch this file too.
        os.utime(folder / FACTS)


def read_labels(folder: Path) -> dict[str, Any]:
    """What the file says; nothing where there is none."""
    try:
        found = json.loads((folder / LABELS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if not isinstance(found, dict) or not isinstance(found.get("tags"), dict):
        raise ValueError(f"{LABELS} is not a mapping with tags")
    return found


def labelled(facts: dict[str, Any], labels: dict[str, Any]) -> dict[str, Any]:
    """The facts of run.json with the labels over them."""
    changes: dict[str, bool] = labels.get("tags", {})
    own = [tag for tag in facts.get("tags") or [] if changes.get(tag, True)]
    added = [tag for tag, is_on in changes.items() if is_on and tag not in own]
    note = labels.get("note")
    return {**facts, "tags": [*own, *added], "notes": facts.get("notes") if note is None else note}


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two people who label at once take turns. The folder is its own lock; some file systems have none."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
