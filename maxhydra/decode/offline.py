"""Answers a file of prompts: many at a time, each answer on disk as soon as it is there, and none twice."""

import dataclasses
import queue
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.tasks.decode import DecodeTask
from maxhydra.decode.client import PromptClient
from maxhydra.decode.offline_files import REFUSED, AnswerFile, Record, read_records
from maxhydra.decode.progress import Progress, open_progress
from maxhydra.decode.prompts import PromptError
from maxhydra.decode.request import Completion, Delta, Handle, RefusedError, TokenLogprob

# Sequences asked for beyond those that the engine decodes at a time, so that it never waits for this thread.
AHEAD = 2
REFRESH_SECONDS = 0.5


class BatchFailedError(Exception):
    """The engine failed; what was answered before is in the file."""


@dataclasses.dataclass(frozen=True)
class BatchStats:
    """What became of a file's prompts."""

    answered: int
    refused: int
    """Those of earlier commands too."""
    tokens: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A sample of a record under way."""

    record: Record
    sample: int
    prompt_tokens: int
    deltas: list[Delta] = dataclasses.field(default_factory=list)


class Batch:
    """The run through one file. One thread submits and writes; the engine's thread only leaves news in a queue."""

    def __init__(self, asker: PromptClient, answers: AnswerFile, *, records: int):
        self._asker, self._answers = asker, answers
        self._total = records * asker.task.samples
        self._news: queue.SimpleQueue[tuple[_Asked, Delta]] = queue.SimpleQueue()
        self._under_way: dict[tuple[int, int], Handle] = {}
        self._tokens = 0

    def run(self) -> BatchStats:
        """Answer all that is left."""
        task = self._asker.task
        began, before = time.monotonic(), self._answers.count
        left = self._left(task)
        window = AHEAD * task.engine.max_batch
        with open_progress(task.progress, total=self._total, start=before, verb="answered") as progress:
            try:
                while self._fill(left, window) or self._under_way:
                    self._write(self._finished(progress))
                    progress.update(self._answers.count, self._tokens)
            finally:
                for handle in self._under_way.values():
                    handle.cancel()
        answered = self._answers.count - before
        return BatchStats(answered, self._answers.refused, self._tokens, time.monotonic() - began)

    def _left(self, task: DecodeTask) -> Iterator[tuple[Record, int]]:
        assert task.input is not None
        for record in read_records(Path(task.input).expanduser(), task.sampling):
            for sample in self._answers.left(record, task.samples):
                yield record, sample

    def _fill(self, left: Iterator[tuple[Record, int]], window: int) -> bool:
        """Ask until the window is full; whether anything was asked or refused."""
        moved = False
        while len(self._under_way) < window and (item := next(left, None)) is not None:
            self._submit(*item)
            moved = True
        return moved

    def _submit(self, record: Record, sample: int) -> None:
        asker = self._asker
        try:
            is_text = isinstance(record.prompt, str)
            ids = asker.encode(record.prompt) if is_text else asker.encode_messages(record.prompt)  # type: ignore[arg-type]
            request = asker.requests(ids, record.sampling, number=record.index)[sample]
            handle = asker.engine.submit(request)
        except (PromptError, RefusedError) as error:
            # One prompt that is too long must not cost the night: it is answered by the reason.
            self._answers.add([(record, sample, {"text": "", "tokens": 0, "finish": REFUSED, "error": str(error)})])
            return
        except ConfigError as error:
            problem = error.problems[0]
            raise ConfigError(dataclasses.replace(problem, source=f"{asker.task.input}:{record.line}")) from None
        asked = _Asked(record, sample, len(ids))
        self._under_way[record.index, sample] = handle
        handle.listen(partial(self._note, asked))

    def _note(self, asked: _Asked, delta: Delta) -> None:
        """In the engine's thread."""
        self._news.put((asked, delta))

    def _finished(self, progress: Progress) -> list[_Asked]:
        """Wait for the next sequence to end, and take all that have."""
        ended: list[_Asked] = []
        while self._under_way and not (ended and self._news.empty()):
            try:
                asked, delta = self._news.get(timeout=REFRESH_SECONDS)
            except queue.Empty:
                progress.update(self._answers.count, self._tokens)
                continue
            asked.deltas.append(delta)
            self._tokens += len(delta.tokens)
            if delta.finish in ("error", "cancelled"):
                self._write(ended)
                raise BatchFailedError(delta.error or "the engine was closed")
            if delta.finish is not None:
                del self._under_way[asked.record.index, asked.sample]
                ended.append(asked)
        return ended

    def _write(self, ended: list[_Asked]) -> None:
        if ended:
            self._answers.add([(asked.record, asked.sample, self._answer(asked)) for asked in ended])

    def _answer(self, asked: _Asked) -> Mapping[str, Any]:
        whole = Completion.of(asked.deltas)
        answer = {
            "text": whole.text,
            "prompt_tokens": asked.prompt_tokens,
            "tokens": len(whole.tokens),
            "finish": whole.finish,
        }
        if self._asker.task.logprobs is not None:
            answer["logprobs"] = [self._logprob(token) for token in whole.logprobs]
        return answer

    def _logprob(self, drawn: TokenLogprob) -> dict[str, Any]:
        text = self._asker.prompts.token_text
        others = [{"token": id, "text": text(id), "logprob": value} for id, value in drawn.alternatives]
        return {"token": drawn.token, "text": text(drawn.token), "logprob": drawn.logprob, "alternatives": others}


def require_apart(task: DecodeTask) -> None:
    """Answers added to the file of prompts would be read as prompts."""
    assert task.input is not None and task.output is not None
    if Path(task.input).expanduser().resolve() == Path(task.output).expanduser().resolve():
        raise ConfigError(Problem("task.output", "is task.input", value=task.output, accepted="another file"))
