"""Rollouts of a run: prompts, completions and rewards, in rollouts/KIND-NNNNN.jsonl, KIND being `train` or `eval`.

A line is one completion: a strict JSON object with the fields of `INDEX` except offset and length, and any others.
Lines are in the order of steps. A complete file gets an index with the same name, an array of `INDEX` records: a query
reads the indices, then only the lines that it returns. Old files are deleted once the others hold enough completions.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxhydra.record.atomic_io import to_json
from maxhydra.record.rollouts import Page, Query, file_number, files

Record = Mapping[str, Any]
# Completions of a complete file, at most.
FILE_ROWS = 20_000
INDEX = np.dtype(
    [
        ("step", "i8"),
        ("prompt_number", "i8"),
        ("sample", "i4"),
        ("reward", "f8"),
        ("tokens", "i4"),
        ("offset", "i8"),
        ("length", "i4"),
    ]
)


class RolloutWriter:
    """Appends the rollouts of one kind.

    The first append of a session drops what earlier sessions wrote at that step and later, because the session repeats
    it: no rollout is missing, and none is there twice.
    """

    def __init__(self, folder: Path | str, kind: str, *, keep: int):
        self._folder, self._kind, self._keep = Path(folder), kind, keep
        self._file_rows = max(1, min(FILE_ROWS, keep // 10))
        self._path: Path | None = None
        self._rows: list[tuple[Any, ...]] = []

    def append(self, step: int, records: Sequence[Record]) -> None:
        """Append completions of a step with one write call."""
        if not records:
            return
        if self._path is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._path = self._open(step)
        size = self._path.stat().st_size if self._path.exists() else 0
        lines = [_line({"step": step, **record}) for record in records]
        try:
            with open(self._path, "ab") as file:
                file.write(b"".join(lines))
        except OSError:
            if self._path.exists():
                os.truncate(self._path, size)
            raise
        for record, line in zip(records, lines, strict=True):
            self._rows.append(_index_row({"step": step, **record}, size, len(line)))
            size += len(line)
        if len(self._rows) >= self._file_rows:
            self._complete(self._path)

    def _open(self, step: int) -> Path:
        """The file to append to, without the rows of `step` and later."""
        for path in reversed(files(self._folder, self._kind)):
            index = read_index(path)
            remaining = index[: np.searchsorted(index["step"], step)]
            if not len(remaining):
                path.unlink()
                _index_path(path).unlink(missing_ok=True)
                continue
            if len(remaining) >= self._file_rows and len(remaining) == len(index) and _index_path(path).exists():
                return self._next(path)
            _index_path(path).unlink(missing_ok=True)
            os.truncate(path, int(remaining["offset"][-1]) + int(remaining["length"][-1]))
            self._rows = remaining.tolist()
            return path
        return self._next(None)

    def _next(self, path: Path | None) -> Path:
        number = 0 if path is None else file_number(path) + 1
        return self._folder / f"{self._kind}-{number:05d}.jsonl"

    def _complete(self, path: Path) -> None:
        """Write the index of a file, start the next one, and delete files that are not needed any more."""
        target = _index_path(path)
        temporary = target.with_suffix(".tmp")
        with open(temporary, "wb") as file:
            np.save(file, np.array(self._rows, INDEX))
        temporary.replace(target)
        self._path, self._rows = self._next(path), []
        counts = {other: len(read_index(other)) for other in files(self._folder, self._kind)}
        total = sum(counts.values())
        for oldest, count in counts.items():
            if total - count < self._keep:
                break
            _index_path(oldest).unlink(missing_ok=True)
            oldest.unlink()
            total -= count


def search(folder: Path | str, query: Query) -> Page:
    """The completions that match; empty without rollouts."""
    paths = files(Path(folder), query.kind)
    indices = [read_index(path) for path in paths]
    if not indices:
        return Page([], 0)
    rows, file_of = np.concatenate(indices), np.repeat(np.arange(len(indices)), [len(index) for index in indices])
    chosen = np.flatnonzero(_matches(rows, query))
    chosen = chosen[_order(rows[chosen], query.order)]
    if not query.text:
        on_page = chosen[query.start : query.start + query.limit]
        return Page(list(_read((paths[file_of[row]], rows[row]) for row in on_page)), len(chosen))
    needle, found, end = query.text.casefold(), [], query.start + query.limit
    may_match = _rows_with_bytes(paths, indices, needle)
    matching = ((paths[file_of[row]], rows[row]) for row in chosen if may_match is None or may_match[row])
    for record in _read(matching):
        if needle in f"{record.get('prompt', '')}\n{record.get('completion', '')}".casefold():
            found.append(record)
            if len(found) == end:
                return Page(found[query.start :], None)
    return Page(found[query.start :], len(found))


def _rows_with_bytes(paths: Sequence[Path], indices: Sequence[np.ndarray], needle: str) -> np.ndarray | None:
    """Rows whose line contains the text anywhere, found without parsing; None for text that JSON may escape."""
    if not needle.isascii() or json.dumps(needle) != f'"{needle}"':
        return None
    found = [np.zeros(len(index), bool) for index in indices]
    for path, index, mask in zip(paths, indices, found, strict=True):
        content = path.read_bytes().lower() if path.exists() else b""
        position = content.find(needle.encode())
        while position >= 0:
            row = int(np.searchsorted(index["offset"], position, side="right")) - 1
            end = content.find(b"\n", position)
            if row >= 0:
                mask[row] = True
            position = -1 if end < 0 else content.find(needle.encode(), end)
    return np.concatenate(found)


def read_index(path: Path) -> np.ndarray:
    """The index of a file: stored, or made from its lines. Damaged and incomplete lines are left out."""
    try:
        index = np.load(_index_path(path), allow_pickle=False)
        if index.dtype == INDEX and len(index) and index["offset"][-1] + index["length"][-1] == path.stat().st_size:
            return index
    except (OSError, ValueError, EOFError):
        pass
    rows, offset = [], 0
    try:
        content = path.read_bytes()
    except FileNotFoundError:  # deleted since it was listed
        content = b""
    for line in content.split(b"\n")[:-1]:
        if (record := _parse(line)) is not None:
            rows.append(_index_row(record, offset, len(line) + 1))
        offset += len(line) + 1
    return np.array(rows, INDEX)


def _matches(rows: np.ndarray, query: Query) -> np.ndarray:
    bounds = {
        "step": (query.first_step, query.last_step),
        "reward": (query.min_reward, query.max_reward),
        "prompt_number": (query.prompt_number, query.prompt_number),
    }
    matches = np.ones(len(rows), bool)
    for name, (low, high) in bounds.items():
        if low is not None:
            matches &= rows[name] >= low
        if high is not None:
            matches &= rows[name] <= high
    return matches


def _order(rows: np.ndarray, order: str) -> np.ndarray:
    """Indices that sort the rows; of equal rewards the newest first."""
    if order == "oldest":
        return np.arange(len(rows))
    # The newest step first, and within a step the order in which completions were sampled.
    newest = np.argsort(-rows["step"], kind="stable")
    if order == "newest":
        return newest
    rewards = rows["reward"][newest]
    return newest[np.argsort(rewards if order == "worst" else -rewards, kind="stable")]


def _read(rows: Iterator[tuple[Path, np.void]]) -> Iterator[dict[str, Any]]:
    """Lines of files; those that a resumed session has dropped meanwhile are skipped."""
    path, file = None, None
    try:
        for target, row in rows:
            if target != path:
                if file is not None:
                    file.close()
                try:
                    path, file = target, open(target, "rb")  # noqa: SIM115
                except FileNotFoundError:
                    path, file = None, None
                    continue
            assert file is not None
            file.seek(int(row["offset"]))
            if (record := _parse(file.read(int(row["length"])))) is not None:
                yield record
    finally:
        if file is not None:
            file.close()


def _line(record: Record) -> bytes:
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError):  # NaN, infinities, array scalars
        text = to_json(record)
    return f"{text}\n".encode(errors="replace")


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        _index_row(record, 0, 0)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None
    return dict(record)


def _index_row(record: Record, offset: int, length: int) -> tuple[Any, ...]:
    return (
        int(record["step"]),
        int(record["prompt_number"]),
        int(record["sample"]),
        float(record["reward"]),
        int(record["tokens"]),
        offset,
        length,
    )


def _index_path(path: Path) -> Path:
    return path.with_suffix(".npy")
