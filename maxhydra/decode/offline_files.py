"""Input and output files of offline decoding, both JSON Lines.

Inputs are checked before any weights are loaded. Outputs are appended such that a kill at any moment neither loses nor
repeats a completion.
"""

import codecs
import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from maxhydra.config import ConfigError, Problem
from maxhydra.config.fields import fields
from maxhydra.config.schema.decode import Sampling
from maxhydra.data.formats.payload import decode_json
from maxhydra.decode.sampling_params import SettingError, with_overrides
from maxhydra.record.atomic_io import to_json

PROMPT_KEYS = ("prompt", "messages")
# Keys of a record that determine its completions.
REQUEST_KEYS = ("prompt", "messages", "sampling")
# Keys that an output line adds; a record that has one of them too would be ambiguous.
OUTPUT_KEYS = ("index", "sample", "text", "prompt_tokens", "tokens", "finish", "error", "logprobs", "settings")
# Value of `finish` for prompts that the engine rejected.
REJECTED = "refused"
MAX_PROBLEMS = 5


@dataclasses.dataclass(frozen=True)
class Record:
    """One record of the input file."""

    index: int
    line: int
    prompt: str | list[Any]
    """Text, or messages."""
    sampling: Sampling
    overrides: Mapping[str, Any]
    """Sampling parameters that the record itself sets."""
    extra: Mapping[str, Any]
    """The id and any other keys, which are copied to the output."""

    @property
    def request(self) -> dict[str, Any]:
        """The keys that determine the completion, which are repeated in the output."""
        prompt = {"prompt" if isinstance(self.prompt, str) else "messages": self.prompt}
        return {**prompt, "sampling": self.overrides} if self.overrides else prompt


def read_records(path: Path, sampling: Sampling) -> Iterator[Record]:
    """Yield the records of a file in order; ConfigError at an invalid one."""
    index = 0
    with path.open("rb") as file:
        for line, content in enumerate(file, start=1):
            if content.strip():
                try:
                    yield _parse_record(content, index, line, sampling)
                except (ValueError, RecursionError) as error:
                    raise ConfigError(Problem("task.input", f"line {line}: {error}", value=str(path))) from None
                index += 1


def check_records(path: Path, sampling: Sampling) -> int:
    """Return the number of records in a file; ConfigError lists up to MAX_PROBLEMS invalid ones."""
    if not path.is_file():
        reason = "does not exist or is not a file"
        raise ConfigError(Problem("task.input", reason, value=str(path), accepted="a JSON Lines file"))
    problems, index, ids = [], 0, set()
    with path.open("rb") as file:
        for line, content in enumerate(file, start=1):
            if not content.strip():
                continue
            try:
                record = _parse_record(content, index, line, sampling)
                if "id" in record.extra and record.extra["id"] in ids:
                    raise ValueError(f"id {record.extra['id']!r} occurs twice in the file")
                ids.add(record.extra.get("id"))
            except (ValueError, RecursionError) as error:
                problems.append(Problem("task.input", f"line {line}: {error}", value=str(path)))
            index += 1
            if len(problems) == MAX_PROBLEMS:
                break
    if problems:
        raise ConfigError(problems)
    if not index:
        raise ConfigError(Problem("task.input", "contains no records", value=str(path)))
    return index


def _parse_record(content: bytes, index: int, line: int, sampling: Sampling) -> Record:
    values = decode_json(content.removeprefix(codecs.BOM_UTF8) if line == 1 else content)
    # Raises for lone surrogates, which JSON can contain and UTF-8 cannot encode.
    to_json(values).encode()
    prompt = _parse_prompt(values)
    overrides = values.get("sampling") or {}
    if not isinstance(overrides, dict):
        raise ValueError("sampling is not a JSON object")
    extra = {key: value for key, value in values.items() if key not in REQUEST_KEYS}
    if not isinstance(extra.get("id", ""), (str, int)):
        raise ValueError("id is neither a string nor an integer")
    for key in extra:
        if key in OUTPUT_KEYS:
            raise ValueError(f"has the key {key}, which is reserved for the output; rename it")
        if key in fields(Sampling):
            raise ValueError(f'has the key {key}; put sampling parameters of a record into "sampling": {{...}}')
    try:
        return Record(index, line, prompt, with_overrides(sampling, overrides), overrides, extra)
    except SettingError as error:
        raise ValueError(f"sampling.{error}") from None


def _parse_prompt(values: Mapping[str, Any]) -> str | list[Any]:
    """Return the text or the messages of a record, which must have exactly one of the two."""
    given = [name for name in PROMPT_KEYS if values.get(name) is not None]
    if len(given) != 1:
        raise ValueError(
            f"has {' and '.join(given) or 'neither prompt nor messages'}; set exactly one of prompt and messages"
        )
    prompt: str | list[Any] = values[given[0]]
    if not isinstance(prompt, str if given[0] == "prompt" else list):
        raise ValueError(f"{given[0]} is not {'a string' if given[0] == 'prompt' else 'a list'}")
    if not prompt:
        raise ValueError(f"{given[0]} is empty")
    if given[0] == "messages" and not all(isinstance(message, dict) for message in prompt):
        raise ValueError("messages contains an item that is not a JSON object")
    return prompt


class OutputFile:
    """Completions on disk; inside `with`, it is locked against other processes.

    `settings` is a hash of everything except the record that a completion depends on: completions with different
    settings are not mixed in one file.
    """

    def __init__(self, path: Path, *, settings: str):
        self._path, self._settings = path, settings
        self._samples: dict[int, tuple[str, set[int]]] = {}
        """Record index -> digest of its request, and its completed samples."""
        self.count = 0
        """Completions in the file; a counter, since it is read after every completion."""
        self.num_rejected = 0
        """Lines that only give the reason for a rejection."""

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+b")
        except OSError as error:
            raise self._error(f"cannot be written: {error.strerror}") from None
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise self._error("is being written by another process", hint="wait until it has finished") from None
        except OSError:
            # The file system has no locks: continue without one.
            pass
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def missing_samples(self, record: Record, samples: int) -> list[int]:
        """Return the samples of a record that are not in the file."""
        digest, completed = self._samples.get(record.index, (_digest(record.request), set()))
        if digest != _digest(record.request):
            reason = f"has a completion of record {record.index} for a different prompt or sampling than line"
            raise self._error(f"{reason} {record.line} of task.input")
        return [sample for sample in range(samples) if sample not in completed]

    def count_missing(self, records: Iterable[Record], samples: int) -> int:
        """Return how many samples are not in the file; ConfigError if it belongs to other records."""
        missing = [len(self.missing_samples(record, samples)) for record in records]
        if (last := max(self._samples, default=0)) >= len(missing):
            raise self._error(f"has a completion of record {last}, but task.input ends with record {len(missing) - 1}")
        return sum(missing)

    def add(self, completions: Iterable[tuple[Record, int, Mapping[str, Any]]]) -> None:
        """Append completions (record, sample, values); they are on disk when this returns."""
        lines = []
        for record, sample, values in completions:
            position = {"index": record.index, "sample": sample}
            lines.append(to_json({**position, **record.extra, **record.request, **values, "settings": self._settings}))
            self._count(record.index, record.request, sample, values["finish"])
        self._file.write("".join(f"{line}\n" for line in lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self) -> None:
        """Read existing completions, and truncate an incomplete last line that a kill left."""
        self._file.seek(0)
        size = 0
        for line, content in enumerate(self._file, start=1):
            if not content.endswith(b"\n"):
                break
            try:
                values = json.loads(content)
                settings = values["settings"]
                request = {name: values[name] for name in REQUEST_KEYS if name in values}
                self._count(values["index"], request, values["sample"], values["finish"])
            except (ValueError, KeyError, TypeError) as error:
                raise self._error(f"line {line} is not an output of task=decode: {error!r}") from None
            if settings != self._settings:
                raise self._error(f"line {line} was generated by a different model or with other settings")
            size += len(content)
        self._file.truncate(size)

    def _count(self, index: int, request: Mapping[str, Any], sample: int, finish: str) -> None:
        samples = self._samples.setdefault(index, (_digest(request), set()))[1]
        if sample not in samples:
            samples.add(sample)
            self.count += 1
            self.num_rejected += finish == REJECTED

    def _error(self, reason: str, *, hint: str = "choose another file, or move this one away") -> ConfigError:
        return ConfigError(Problem("task.output", reason, value=str(self._path), hint=hint))


def fingerprint(settings: Mapping[str, Any]) -> str:
    """Return a short hash of settings, the same in every process."""
    return _digest(settings)[:12]


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.blake2b(to_json(value).encode(), digest_size=16).hexdigest()
