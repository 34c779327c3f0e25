"""Files of prompts and of answers, JSON Lines both: checked before anything is loaded, written so that a kill at any
moment loses no answer and repeats none."""

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
from maxhydra.decode.sampling_params import SettingError, adjusted
from maxhydra.record.atomic_io import to_json

ASKED = ("prompt", "messages")
DECIDING = ("prompt", "messages", "sampling")
# What an answer says of its own; a record that has such a key too could not be told apart.
ANSWERED = ("index", "sample", "text", "prompt_tokens", "tokens", "finish", "error", "logprobs", "settings")
# How an answer ends that was not to be had.
REFUSED = "refused"
SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Record:
    """One line of the input: its number among the records, the prompt, its settings, and what else it says."""

    index: int
    line: int
    prompt: str | list[Any]
    """Text, or messages."""
    sampling: Sampling
    own: Mapping[str, Any]
    """Those of the settings that the record itself gives."""
    rest: Mapping[str, Any]
    """The id and any other keys, which are copied to the answer."""

    @property
    def asked(self) -> dict[str, Any]:
        """What decides the answer, and stands in it again."""
        prompt = {"prompt" if isinstance(self.prompt, str) else "messages": self.prompt}
        return {**prompt, "sampling": self.own} if self.own else prompt


def read_records(path: Path, sampling: Sampling) -> Iterator[Record]:
    """The records of a file, in order; ConfigError at one that cannot be used."""
    index = 0
    with path.open("rb") as file:
        for line, content in enumerate(file, start=1):
            if content.strip():
                try:
                    yield _record(content, index, line, sampling)
                except (ValueError, RecursionError) as error:
                    raise ConfigError(Problem("task.input", f"line {line}: {error}", value=str(path))) from None
                index += 1


def check_records(path: Path, sampling: Sampling) -> int:
    """How many records a file has; all that is wrong with it at once, or the first of it."""
    if not path.is_file():
        raise ConfigError(Problem("task.input", "is no file", value=str(path), accepted="a JSON Lines file"))
    problems, index, ids = [], 0, set()
    with path.open("rb") as file:
        for line, content in enumerate(file, start=1):
            if not content.strip():
                continue
            try:
                record = _record(content, index, line, sampling)
                if "id" in record.rest and record.rest["id"] in ids:
                    raise ValueError(f"id {record.rest['id']!r} stands twice in the file")
                ids.add(record.rest.get("id"))
            except (ValueError, RecursionError) as error:
                problems.append(Problem("task.input", f"line {line}: {error}", value=str(path)))
            index += 1
            if len(problems) == SHOWN:
                break
    if problems:
        raise ConfigError(problems)
    if not index:
        raise ConfigError(Problem("task.input", "holds no record", value=str(path)))
    return index


def _record(content: bytes, index: int, line: int, sampling: Sampling) -> Record:
    values = json.loads(content.decode("utf-8-sig" if line == 1 else "utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"is no object but {type(values).__name__}")
    # Half a character, which JSON can write and UTF-8 cannot.
    to_json(values).encode()
    given = [name for name in ASKED if values.get(name) is not None]
    if len(given) != 1:
        raise ValueError(f"has {' and '.join(given) or 'neither prompt nor messages'}; one of prompt and messages")
    prompt = values[given[0]]
    if not isinstance(prompt, str if given[0] == "prompt" else list):
        raise ValueError(f"{given[0]} is {'no text' if given[0] == 'prompt' else 'no list'}")
    if not prompt:
        raise ValueError(f"{given[0]} is empty")
    if given[0] == "messages" and not all(isinstance(message, dict) for message in prompt):
        raise ValueError("messages holds something that is no object")
    changes = values.get("sampling") or {}
    if not isinstance(changes, dict):
        raise ValueError("sampling is no object")
    rest = {key: value for key, value in values.items() if key not in DECIDING}
    if not isinstance(rest.get("id", ""), (str, int)):
        raise ValueError("id is neither text nor an integer")
    for key in rest:
        if key in ANSWERED:
            raise ValueError(f"has the key {key}, which the answer has too; give it another name")
        if key in fields(Sampling):
            raise ValueError(f'has the key {key}; settings of a record go into "sampling": {{...}}')
    try:
        return Record(index, line, prompt, adjusted(sampling, changes), changes, rest)
    except SettingError as error:
        raise ValueError(f"sampling.{error}") from None


class AnswerFile:
    """The answers so far, and room for more; within `with` no other process can add to it.

    `settings` stands for everything that an answer depends on besides its record: answers under other settings are not
    mixed into one file.
    """

    def __init__(self, path: Path, *, settings: str):
        self._path, self._settings = path, settings
        self._answered: dict[int, tuple[str, set[int]]] = {}
        self.count = 0
        """Answers in the file; asked for at every one of them, so not to be added up each time."""
        self.refused = 0
        """Those that only say why there is none."""

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+b")
        except OSError as error:
            raise self._wrong(f"cannot be written: {error.strerror}") from None
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise self._wrong("is being written by another process", hint="wait for it") from None
        except OSError:
            # A file system without locks: go on unprotected, as any program there does.
            pass
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def left(self, record: Record, samples: int) -> list[int]:
        """The samples of a record that are still to be answered."""
        digest, answered = self._answered.get(record.index, (_digest(record.asked), set()))
        if digest != _digest(record.asked):
            reason = f"answers another prompt or sampling for record {record.index} than line {record.line}"
            raise self._wrong(f"{reason} of task.input asks")
        return [sample for sample in range(samples) if sample not in answered]

    def missing(self, records: Iterable[Record], samples: int) -> int:
        """How many samples of all the records are still to be answered; ConfigError if the answers are to others."""
        missing = [len(self.left(record, samples)) for record in records]
        if (last := max(self._answered, default=0)) >= len(missing):
            raise self._wrong(f"answers record {last}, and task.input ends with record {len(missing) - 1}")
        return sum(missing)

    def add(self, answers: Iterable[tuple[Record, int, Mapping[str, Any]]]) -> None:
        """Add answers (record, sample, what was answered): on disk when this returns."""
        lines = []
        for record, sample, answered in answers:
            own = {"index": record.index, "sample": sample}
            lines.append(to_json({**own, **record.rest, **record.asked, **answered, "settings": self._settings}))
            self._note(record.index, record.asked, sample, answered["finish"])
        self._file.write("".join(f"{line}\n" for line in lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self) -> None:
        """Learn what is answered, and cut off a line that a kill left unfinished."""
        self._file.seek(0)
        whole = 0
        for line, content in enumerate(self._file, start=1):
            if not content.endswith(b"\n"):
                break
            try:
                answer = json.loads(content)
                settings = answer["settings"]
                asked = {name: answer[name] for name in DECIDING if name in answer}
                self._note(answer["index"], asked, answer["sample"], answer["finish"])
            except (ValueError, KeyError, TypeError) as error:
                raise self._wrong(f"line {line} is no answer of task=decode: {error!r}") from None
            if settings != self._settings:
                raise self._wrong(f"line {line} was answered by another model or with other settings")
            whole += len(content)
        self._file.truncate(whole)

    def _note(self, index: int, asked: Mapping[str, Any], sample: int, finish: str) -> None:
        samples = self._answered.setdefault(index, (_digest(asked), set()))[1]
        if sample not in samples:
            samples.add(sample)
            self.count += 1
            self.refused += finish == REFUSED

    def _wrong(self, reason: str, *, hint: str = "choose another file, or move this one away") -> ConfigError:
        return ConfigError(Problem("task.output", reason, value=str(self._path), hint=hint))


def fingerprint(settings: Mapping[str, Any]) -> str:
    """A short name for settings, the same in every process."""
    return _digest(settings)[:12]


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.blake2b(to_json(value).encode(), digest_size=16).hexdigest()
