"""Rollouts of a run: prompts, completions and rewards, in rollouts/KIND-NNNNN.jsonl, KIND being `train` or `eval`.

A line is one completion: a strict JSON object with the fields of `INDEX` except offset and length, and any others.
Lines are in the order of steps. A complete file gets an index with the same name, an array of `INDEX` records: a query
reads the indices, then only the lines that it returns. Old files are deleted once the others hold enough completions.
"""

import bisect
import functools
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
    chosen = chosen[_order(rows["step"][chosen], rows["reward"][chosen], query.order)]
    if not query.text:
        on_page = chosen[query.start : query.start + query.limit]
        return Page(list(_read((paths[file_of[row]], rows[row]) for row in on_page)), len(chosen))
    needle, found, end = query.text.casefold(), [], query.start + query.limit
    candidates = _rows_with_bytes(paths, indices, chosen, needle)
    for record in _read((paths[file_of[row]], rows[row]) for row in candidates):
        if needle in f"{record.get('prompt', '')}\n{record.get('completion', '')}".casefold():
            found.append(record)
            if len(found) == end:
                return Page(found[query.start :], None)
    return Page(found[query.start :], len(found))


def _rows_with_bytes(
    paths: Sequence[Path], indices: Sequence[np.ndarray], chosen: np.ndarray, needle: str
) -> Iterator[int]:
    """Those of the chosen rows whose line may contain the text, found without parsing; all for text that JSON escapes.

    A file is read when its first row is needed: the first page of a common text needs few files.
    """
    if not needle.isascii() or json.dumps(needle) != f'"{needle}"':
        yield from chosen
        return
    starts = np.cumsum([0, *(len(index) for index in indices)])
    found, is_scanned = np.zeros(starts[-1], bool), np.zeros(len(paths), bool)
    # One buffer for all files: the page faults of new ones take longer than the search.
    buffer = bytearray(max(int(index["offset"][-1] + index["length"][-1]) if len(index) else 0 for index in indices))
    for first in range(0, len(chosen), FILE_ROWS):
        part = chosen[first : first + FILE_ROWS]
        files_of_part = np.unique(np.searchsorted(starts, part, side="right") - 1)
        for number in files_of_part[~is_scanned[files_of_part]]:
            found[starts[number] : starts[number + 1]] = _lines_with(paths[number], indices[number], needle, buffer)
            is_scanned[number] = True
        yield from part[found[part]]


def _lines_with(path: Path, index: np.ndarray, needle: str, buffer: bytearray) -> np.ndarray:
    """Whether each line of a file may contain the ASCII text in any case.

    Bit 5 is set in all bytes, which maps capital letters to small ones ten times as fast as bytes.lower; other bytes
    that become equal only add lines that do not contain the text.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            size = file.readinto(buffer) or 0
    except FileNotFoundError:  # deleted since it was listed
        size = 0
    for text, length in ((buffer, size), (pattern := bytearray(needle.encode()), len(needle))):
        folded = np.frombuffer(text, np.uint8, length)
        folded |= 0x20
    ends, found = (index["offset"] + index["length"]).tolist(), np.zeros(len(index), bool)
    position = buffer.find(pattern, 0, size)
    while position >= 0:
        row = bisect.bisect_right(ends, position)
        if row == len(ends):
            break
        found[row] = True
        position = buffer.find(pattern, ends[row], size)
    return found


def read_index(path: Path) -> np.ndarray:
    """The index of a file: stored, or made from its lines. Damaged and incomplete lines are left out."""
    try:
        status = path.stat()
        index = _stored_index(path, status.st_size)
        return _make_index(path, status.st_size, status.st_mtime_ns) if index is None else index
    except FileNotFoundError:  # deleted since it was listed
        return np.array([], INDEX)


def _stored_index(path: Path, size: int) -> np.ndarray | None:
    """The stored index of a file of this size; None without one, or if it is that of another content."""
    try:
        index: np.ndarray = np.load(_index_path(path), allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    is_valid = index.dtype == INDEX and len(index) and index["offset"][-1] + index["length"][-1] == size
    return index if is_valid else None


@functools.lru_cache(maxsize=8)
def _make_index(path: Path, size: int, modified: int) -> np.ndarray:
    """The index of a file without one, which is the newest: its queries parse it once per change."""
    rows, offset = [], 0
    for line in path.read_bytes().split(b"\n")[:-1]:
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


def _order(steps: np.ndarray, rewards: np.ndarray, order: str) -> np.ndarray:
    """Indices that sort rows, which are in the order of steps; of equal rewards the newest first."""
    rows = np.arange(len(steps))
    if order == "oldest" or not len(steps):
        return rows
    # The newest step first, and within a step the order in which completions were sampled.
    first = np.flatnonzero(np.diff(steps, prepend=steps[0] - 1))
    sizes = np.diff(first, append=len(steps))
    newest = rows + np.repeat(first[::-1] - np.cumsum([0, *sizes[:0:-1]]), sizes[::-1])
    if order == "newest":
        return newest
    rewards = rewards[newest]
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
