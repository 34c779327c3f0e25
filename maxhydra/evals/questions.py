"""Questions of evaluation tasks: from files, or generated without a download."""

import dataclasses
import json
import random
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.data import Data
from maxhydra.config.schema.evals import EvalKind, EvalSpec, QuestionSource
from maxhydra.data.records import BadRecord
from maxhydra.data.rows import RowSpec
from maxhydra.data.sources import RecordSource, open_source
from maxhydra.data.sources.demo import TEXT

# Share of the plays at the end that data=demo holds out by default.
HELD_OUT = 0.05
SEED = 0
CHOICES, PASSAGE = 4, 1000


@dataclasses.dataclass(frozen=True)
class Question:
    """A question of any kind; a text whose likelihood is measured is a prompt without an answer."""

    prompt: str
    answer: Any = None
    """Expected answer; of a multiple-choice question, the index of the correct choice."""
    choices: tuple[str, ...] = ()
    record: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further values for the verifier."""
    cell: tuple[int, float] | None = None
    """Context length and depth of a needle."""

    @property
    def solved(self) -> str:
        """The question with its answer, as an example in the prompt of another one."""
        return f"{self.prompt}{self.choices[self.answer] if self.choices else self.answer}\n"


def read_questions(spec: EvalSpec, folder: Path, count_tokens: Callable[[str], int]) -> list[Question]:
    """Return the questions of a task, solved examples included; `folder` is that of the YAML file."""
    readers: dict[QuestionSource, Callable[[], Iterator[Question]]] = {
        QuestionSource.file: lambda: _read_file(spec, folder / (spec.path or "")),
        QuestionSource.arithmetic: lambda: _problems(spec),
        QuestionSource.reasoning_gym: lambda: _problems(spec),
        QuestionSource.cloze: _cloze,
        QuestionSource.plays: _passages,
        QuestionSource.needle: lambda: _needles(spec, count_tokens),
    }
    is_needle = spec.source is QuestionSource.needle
    return list(islice(readers[spec.source](), None if is_needle else spec.count + spec.shots))


def _read_file(spec: EvalSpec, path: Path) -> Iterator[Question]:
    if not path.is_file():
        raise ConfigError(Problem("task.tasks", "names a file of questions that does not exist", value=str(path)))
    if path.suffix == ".txt":
        yield Question(path.read_text(encoding="utf-8"))
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            yield _parse(spec.kind, json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            needed = {EvalKind.perplexity: "text", EvalKind.generation: "question and answer"}
            accepted = f"an object with {needed.get(spec.kind, 'question, choices and answer (an index)')}"
            reason = f"line {number} is not a question: {type(error).__name__}: {error}"
            raise ConfigError(Problem("task.tasks", reason, value=str(path), accepted=accepted)) from None


def _parse(kind: EvalKind, record: Any) -> Question:
    if kind is EvalKind.perplexity:
        return Question(str(record["text"]))
    if kind is EvalKind.generation:
        return Question(str(record["question"]), record["answer"], record=record)
    choices, answer = tuple(map(str, record["choices"])), int(record["answer"])
    if not 0 <= answer < len(choices):
        raise ValueError(f"answer {answer} is not the index of one of {len(choices)} choices")
    return Question(str(record["question"]), answer, choices)


def _problems(spec: EvalSpec) -> Iterator[Question]:
    """Held-out problems of a generated source, as plain text."""
    data = Data(  # type: ignore[call-arg]
        source=spec.source.value, name=spec.name, digits=spec.digits, operators=spec.operators
    )
    source = open_source(data, data, RowSpec(seq_len=1, vocab_size=2**31, seed=SEED))
    assert isinstance(source, RecordSource)
    for index in range(len(source.evaluation)):
        (record,) = source.evaluation.read([index])
        if not isinstance(record, BadRecord):
            prompt = record["prompt"][0]["content"]
            prompt = prompt if prompt.endswith("=") else f"{prompt}\nAnswer: "
            yield Question(prompt, record["answer"], record=record)


def _held_out_text() -> str:
    content = TEXT.read_bytes()
    tail = content[-round(len(content) * HELD_OUT) :].decode(errors="ignore")
    return tail[tail.index("\n") + 1 :]


def _cloze() -> Iterator[Question]:
    """Lines without their last word, which is one of four words of the text with equal length."""
    generator = random.Random(SEED)
    lines = [line.strip() for line in _held_out_text().splitlines()]
    found = [re.fullmatch(r"(.*\w.* )(\w{4,})[.,;:!?]*", line) for line in lines]
    pairs = [(match[1], match[2]) for match in found if match and match[1].count(" ") > 3]
    candidates = sorted({word.lower() for _, word in pairs})
    for prompt, word in pairs:
        others = [other for other in candidates if len(other) == len(word) and other != word.lower()]
        if len(others) >= CHOICES - 1:
            choices = [word.lower(), *generator.sample(others, CHOICES - 1)]
            generator.shuffle(choices)
            yield Question(prompt.strip(), choices.index(word.lower()), tuple(f" {choice}" for choice in choices))


def _passages() -> Iterator[Question]:
    text = _held_out_text()
    for start in range(0, len(text), PASSAGE):
        yield Question(text[start : start + PASSAGE])


def _needles(spec: EvalSpec, count_tokens: Callable[[str], int]) -> Iterator[Question]:
    """A sentence with a number in lines of the plays, which fill the context up to a length in tokens."""
    generator = random.Random(SEED)
    lines = [line for line in TEXT.read_text(encoding="utf-8").splitlines() if line.strip()]
    for length in spec.lengths:
        for depth in spec.depths:
            for _ in range(spec.count):
                number = str(generator.randrange(1000, 10000))
                needle, question = f"The secret number is {number}.", "\nThe secret number is "
                first = generator.randrange(len(lines))
                hay = _fill(lines[first:] + lines[:first], length - count_tokens(needle + question) - 2, count_tokens)
                position = round(depth * len(hay))
                prompt = "\n".join([*hay[:position], needle, *hay[position:]]) + question
                yield Question(prompt, number, cell=(length, depth))


def _fill(lines: list[str], budget: int, count_tokens: Callable[[str], int]) -> list[str]:
    """The first lines that have at most `budget` tokens."""
    taken: list[str] = []
    for line in lines:
        budget -= count_tokens(line + "\n")
        if budget < 0:
            break
        taken.append(line)
    return taken
