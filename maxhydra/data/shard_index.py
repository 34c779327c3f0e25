"""index.json of a folder of shards: what they hold, how they were made, and which of them are done."""

import fcntl
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from maxhydra import __version__
from maxhydra.config import ConfigError, Problem
from maxhydra.config.errors import show
from maxhydra.config.migrations import migrate_config
from maxhydra.config.schema.data import Data
from maxhydra.data.shards import Shards, Written
from maxhydra.data.tokenizers import tokenizer
from maxhydra.record.atomic_io import replace_file, to_json

NAME, LOCK = "index.json", ".lock"
NOTHING: Mapping[str, Any] = {}

# Settings of `data` that tokens depend on, besides those of the tokenizer.
SETTINGS = (
    *("source", "path", "eval_path", "format", "name", "config", "split", "eval_split", "eval_name", "data_dir"),
    *("record_type", "columns", "formatting", "on_error", "max_characters"),
)

# Records of the source that are kept a digest of.
SAMPLE = 16

# Packages that decide what is in the files.
PACKAGES = ("array-record", "numpy", "tokenizers", "sentencepiece", "tiktoken")


class ShardIndex:
    """Rewritten after each shard; a shard that is not in it yet is made again."""

    def __init__(self, folder: Path, facts: dict[str, Any], done: dict[str, Any]):
        self._folder, self._facts = folder, facts
        self.done = done

    def add(self, name: str, written: Written) -> None:
        """Note a finished shard."""
        self.done[name] = {
            "records": written.records,
            "tokens": written.tokens,
            "skipped": len(written.faults),
            "bytes": written.bytes,
        }
        self._write()

    @property
    def totals(self) -> dict[str, int]:
        """Over the shards that are done."""
        counted = ("records", "tokens", "skipped", "bytes")
        return {name: sum(shard[name] for shard in self.done.values()) for name in counted}

    def _write(self) -> None:
        shards = dict(sorted(self.done.items()))
        complete = len(shards) == self._facts["settings"]["task.shards"]
        text = to_json({"complete": complete, **self.totals, **self._facts, "shards": shards}, indent=1)
        replace_file(self._folder / NAME, text + "\n")


@contextmanager
def open_index(
    folder: Path, data: Data, shards: Shards, count: int, more: Mapping[str, Any] = NOTHING
) -> Iterator[ShardIndex]:
    """The index of a folder, new or begun before with the same settings, for this process alone.

    `more` are settings besides those of the data that the shards depend on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(Problem("task.output", "another process writes there", value=folder)) from None
        facts = _facts(data, shards, {**more, "task.shards": count})
        found = folder / NAME
        before = _read(found)
        if before:
            _check_same(before, json.loads(to_json(facts)), folder)
        elif strangers := sorted(path.name for path in folder.glob("*.array_record")):
            reason = f"holds {strangers[0]} already, and no {NAME}"
            raise ConfigError(Problem("task.output", reason, value=folder, hint="name an empty folder"))
        for path in folder.glob(".tokens-*.partial"):
            path.unlink()
        done = {name: shard for name, shard in before.get("shards", {}).items() if _is_whole(folder / name, shard)}
        yield ShardIndex(folder, facts, done)


def _read(index: Path) -> dict[str, Any]:
    """What was written before; nothing in a new folder."""
    try:
        before = json.loads(index.read_text(encoding="utf-8")) if index.exists() else {}
        if not before or {"settings", "fingerprints", "shards"} <= before.keys():
            return dict(before)
        reason = f"has an {NAME} that task=tokenize did not write"
    except (ValueError, AttributeError, TypeError) as error:
        reason = f"has an {NAME} that cannot be read: {error}"
    hint = "name another folder, or remove this one to begin anew"
    raise ConfigError(Problem("task.output", reason, value=index.parent, hint=hint))


def _is_whole(path: Path, shard: dict[str, Any]) -> bool:
    return path.exists() and path.stat().st_size == shard["bytes"]


def _facts(data: Data, shards: Shards, more: Mapping[str, Any]) -> dict[str, Any]:
    words = tokenizer(data)
    settings = {f"data.{name}": show(getattr(data, name)) for name in SETTINGS}
    settings |= {f"data.tokenizer.{name}": show(value) for name, value in vars(data.tokenizer).items()}
    described = [shards.records, *map(repr, shards.sample(SAMPLE))]
    return {
        "settings": {**settings, **more},
        "fingerprints": {"the tokenizer's files": _digest_files(data), "the source's records": _digest(described)},
        "vocabulary": {"size": words.vocab_size, "bos": words.bos, "eos": words.eos, "dtype": shards.dtype.name},
        "versions": {"maxhydra": __version__, **{name: version for name in PACKAGES if (version := _version(name))}},
    }


def _check_same(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """What is there must be what would be written now. Versions may differ: they are those of the first session."""
    changes = [
        f"{name} was {was} and is {now['settings'].get(name)}"
        for name, was in migrate_config(before["settings"]).items()
        if now["settings"].get(name) != was
    ]
    for name, was in before["fingerprints"].items():
        changes += [f"{name} have changed"] if now["fingerprints"].get(name) != was else []
    if changes:
        reason = f"was begun with other settings: {'; '.join(changes)}"
        hint = "name another folder, or remove this one to begin anew"
        raise ConfigError(Problem("task.output", reason, value=folder, hint=hint))


def _digest_files(data: Data) -> str:
    """A digest of the files of the tokenizer; of its name where that is no file."""
    parts = []
    for named in filter(None, (data.tokenizer.path, data.tokenizer.chat_template)):
        path = Path(named).expanduser()
        files = sorted(found for found in path.rglob("*") if found.is_file()) if path.is_dir() else [path]
        parts += [hashlib.sha256(found.read_bytes()).hexdigest() if found.exists() else named for found in files]
    return _digest(parts)


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode(errors="surrogatepass")).hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
