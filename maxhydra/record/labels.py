"""labels.json: tags and a note that are added to a run after it started.

They are in a separate file, because a running process rewrites run.json from memory and would undo the changes.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from maxhydra.record.atomic_io import read_json, replace_file, to_json
from maxhydra.record.facts import FACTS
from maxhydra.record.redact import redact_text

LABELS = "labels.json"


def change_labels(folder: Path, *, add: Iterable[str], remove: Iterable[str], note: str | None) -> None:
    """Add and remove tags (also those set by the config), and replace the note unless it is None."""
    with _label_lock(folder):
        labels = read_labels(folder)
        added = [redact_text(tag) for tag in add]
        tags = {**labels.get("tags", {}), **dict.fromkeys(added, True), **dict.fromkeys(remove, False)}
        new_note = labels.get("note") if note is None else redact_text(note)
        replace_file(folder / LABELS, to_json({"tags": tags, "note": new_note}, indent=2) + "\n")
        # Update the mtime of run.json, so that watchers of run.json notice the change.
        os.utime(folder / FACTS)


def read_labels(folder: Path) -> dict[str, Any]:
    """Contents of labels.json; empty if it does not exist."""
    try:
        labels = read_json(folder / LABELS)
    except FileNotFoundError:
        return {}
    is_valid = isinstance(labels, dict) and isinstance(labels.get("tags"), dict)
    if not is_valid or not isinstance(labels.get("note"), str | None):
        raise ValueError(f"{LABELS} is not a mapping with tags and a note")
    return dict(labels)


def apply_labels(facts: dict[str, Any], labels: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of run.json with tags and note replaced by the labels."""
    changes: dict[str, bool] = labels.get("tags", {})
    original = [tag for tag in facts.get("tags") or [] if changes.get(tag, True)]
    added = [tag for tag, is_on in changes.items() if is_on and tag not in original]
    note = labels.get("note")
    return {**facts, "tags": [*original, *added], "notes": facts.get("notes") if note is None else note}


@contextlib.contextmanager
def _label_lock(folder: Path) -> Iterator[None]:
    """Serialize concurrent label changes by locking the folder. Ignored on file systems without locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
