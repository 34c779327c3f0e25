"""index.json of a folder of shards: contents, the settings they were made with, and which are finished."""

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
from maxhydra.data.shards import ShardResult, Shards
from maxhydra.data.tokenizers import load_tokenizer
from maxhydra.record.atomic_io import replace_file, to_json

NAME, LOCK = "index.json", ".lock"
NO_SETTINGS: Mapping[str, Any] = {}

# Settings of `data` that the tokens depend on, in addition to those of the tokenizer.
SETTINGS = (
    *("source", "path", "eval_path", "format", "name", "config", "split", "eval_split", "eval_name", "data_dir"),
    *("record_type", "columns", "formatting", "on_error", "max_characters"),
)

# Number of source records that enter the fingerprint.
SAMPLE = 16

# Packages whose versions affect the contents of the files.
PACKAGES = ("array-record", "numpy", "tokenizers", "sentencepiece", "tiktoken")


class ShardIndex:
    """The index of a folder, rewritten after each shard; a shard that is not listed is written again."""

    def __init__(self, folder: Path, facts: dict[str, Any], done: dict[str, Any]):
        self._folder, self._facts = folder, facts
        self.done = done

    def add(self, name: str, result: ShardResult) -> None:
        """Record a finished shard."""
        self.done[name] = {
            "records": result.records,
            "tokens": result.tokens,
            "skipped": len(result.bad_records),
            "bytes": result.bytes,
        }
        self.write()

    @property
    def totals(self) -> dict[str, int]:
        """Totals over the finished shards."""
        names = ("records", "tokens", "skipped", "bytes")
        return {name: sum(shard[name] for shard in self.done.values()) for name in names}

    def write(self) -> None:
        """Replace index.json."""
        shards = dict(sorted(self.done.items()))
        complete = len(shards) == self._facts["settings"]["task.shards"]
        text = to_json({"complete": complete, **self.totals, **self._facts, "shards": shards}, indent=1)
        replace_file(self._folder / NAME, text + "\n")


@contextmanager
def open_index(
    folder: Path, data: Data, shards: Shards, count: int, more: Mapping[str, Any] = NO_SETTINGS
) -> Iterator[ShardIndex]:
    """Open the index of a folder, new or started earlier with the same settings, and lock the folder.

    `more` are further settings that the shards depend on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(Problem("task.output", "is being written by another process", value=folder)) from None
        facts = _facts(data, shards, {**more, "task.shards": count})
        before = _read(folder / NAME)
        if before:
            _check_same(before, json.loads(to_json(facts)), folder)
        elif unknown := sorted(path.name for path in folder.glob("*.array_record") if not shards.wrote(path)):
            reason = f"already holds {unknown[0]}, which this command did not write, and no {NAME}"
            raise ConfigError(Problem("task.output", reason, value=folder, hint="choose an empty folder"))
        for path in folder.glob(".tokens-*.partial"):
            path.unlink()
        done = {name: shard for name, shard in before.get("shards", {}).items() if _is_complete(folder / name, shard)}
        index = ShardIndex(folder, facts, done)
        if not before:
            # Before the first shard, so that a kill never leaves shards that no index describes.
            index.write()
        yield index


def _read(index: Path) -> dict[str, Any]:
    """Read an existing index; empty for a new folder."""
    try:
        before = json.loads(index.read_text(encoding="utf-8")) if index.exists() else {}
        if not before or {"settings", "fingerprints", "shards"} <= before.keys():
            return dict(before)
        reason = f"its {NAME} was not written by task=tokenize"
    except (ValueError, AttributeError, TypeError) as error:
        reason = f"its {NAME} cannot be read: {error}"
    hint = "choose another folder, or remove this one to start over"
    raise ConfigError(Problem("task.output", reason, value=index.parent, hint=hint))


def _is_complete(path: Path, shard: dict[str, Any]) -> bool:
    return path.exists() and path.stat().st_size == shard["bytes"]


def _facts(data: Data, shards: Shards, more: Mapping[str, Any]) -> dict[str, Any]:
    tokenizer = load_tokenizer(data)
    settings = {f"data.{name}": show(getattr(data, name)) for name in SETTINGS}
    settings |= {f"data.tokenizer.{name}": show(value) for name, value in vars(data.tokenizer).items()}
    source = [shards.records, *map(repr, shards.sample(SAMPLE))]
    return {
        "settings": {**settings, **more},
        "fingerprints": {"the tokenizer's files": _digest_files(data), "the source's records": _digest(source)},
        "vocabulary": {
            "size": tokenizer.vocab_size,
            "bos": tokenizer.bos,
            "eos": tokenizer.eos,
            "dtype": shards.dtype.name,
        },
        "versions": {"maxhydra": __version__, **{name: version for name in PACKAGES if (version := _version(name))}},
    }


def _check_same(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Raise if the folder was started with other settings. Package versions may differ; the first ones are kept."""
    changes = [
        f"{name} was {was} and is now {now['settings'].get(name)}"
        for name, was in migrate_config(before["settings"]).items()
        if now["settings"].get(name) != was
    ]
    for name, was in before["fingerprints"].items():
        changes += [f"{name} have changed"] if now["fingerprints"].get(name) != was else []
    if changes:
        reason = f"was started with different settings: {'; '.join(changes)}"
        hint = "choose another folder, or remove this one to start over"
        raise ConfigError(Problem("task.output", reason, value=folder, hint=hint))


def _digest_files(data: Data) -> str:
    """Digest of the tokenizer's files, or of its name if it is not a file."""
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
