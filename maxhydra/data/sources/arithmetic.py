"""Generated integer arithmetic problems, each with an answer that can be verified.

A record fits every record type: `text` (23+48=71); `prompt`, a user message, and `answer`; `messages`, the prompt with
the answer as the assistant's message; `tool_messages`, in which the assistant calls a calculator before it answers one
of four problems; `chosen` and `rejected`, a right and a wrong assistant message after the prompt; `completion`, one of
the two, and `label`, whether it is right; `guess`, a wrong message that is off by any number up to 99.

The two problems with the same operands and operator, in either order, are adjacent: if one is held out, the other is
not trained on. The held-out problems depend only on digits, operators and eval_fraction, so all runs on the same
problems hold out the same ones, however many they train on.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence

import numpy as np

from maxhydra.config.schema.data import Corpus, Data
from maxhydra.data.records import BadRecord, Record
from maxhydra.data.rows import RowSpec
from maxhydra.data.shuffle import ShuffleOrder
from maxhydra.data.sources import RecordSlice, RecordSource

OPERATORS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
# Seed of the order of the problems.
SEED = 1234
# Error of a wrong answer: off by one in a digit, as if a carry had been forgotten.
ERRORS = (-10, -1, 1, 10)


@dataclasses.dataclass(frozen=True)
class Problems:
    """All problems with operands of at most `digits` digits; the two orders of a pair are adjacent."""

    digits: int
    operators: tuple[str, ...]

    @property
    def pairs(self) -> int:
        """Number of unordered operand pairs, times operators."""
        numbers = 10**self.digits
        return len(self.operators) * numbers * (numbers + 1) // 2

    def __len__(self) -> int:
        return 2 * self.pairs

    def read(self, indices: Sequence[int]) -> list[Record | BadRecord]:
        order = ShuffleOrder(self.pairs, SEED, shuffle=True)
        return [self._record(int(order.indices(0, i // 2, i // 2 + 1)[0]), i) for i in map(int, indices)]

    def location(self, index: int) -> str:
        return f"problem {index}"

    @property
    def groups(self) -> list[int] | None:
        return None

    def _record(self, pair: int, index: int) -> Record:
        pair, number = divmod(pair, len(self.operators))
        larger = (math.isqrt(8 * pair + 1) - 1) // 2
        numbers = (larger, pair - larger * (larger + 1) // 2)
        left, right = numbers if index % 2 else numbers[::-1]
        symbol = self.operators[number]
        answer = OPERATORS[symbol](left, right)
        wrong = answer + ERRORS[np.random.default_rng((SEED, index)).integers(len(ERRORS))]
        question = f"{left}{symbol}{right}="
        prompt = [{"role": "user", "content": question}]
        values = (answer, wrong, _guess(answer, index))
        chosen, rejected, guess = ([{"role": "assistant", "content": str(value)}] for value in values)
        return {
            "text": f"{question}{answer}",
            "prompt": prompt,
            "answer": str(answer),
            "messages": [*prompt, *chosen],
            "tool_messages": [*prompt, *(_tool_turns(question, answer) if index % 8 < 2 else []), *chosen],
            "chosen": chosen,
            "rejected": rejected,
            "guess": guess,
            "completion": chosen if index % 4 < 2 else rejected,
            "label": index % 4 < 2,
        }


def _guess(answer: int, index: int) -> int:
    """A wrong answer whose error is log-uniform from 1 to 99, so that a reward model learns from coarse to fine."""
    generator = np.random.default_rng((SEED, index, 1))
    error = int(100 ** generator.uniform()) * int(generator.choice((-1, 1)))
    return answer + (error if answer + error >= min(answer, 0) else -error)


def _tool_turns(question: str, answer: int) -> list[dict[str, object]]:
    """A call of the calculator and its result; see rl/tools.py."""
    function = {"name": "calculator", "arguments": {"expression": question.removesuffix("=")}}
    call = {"id": "call00000", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "name": "calculator", "content": str(answer)},
    ]


def open_source(corpus: Corpus, data: Data, spec: RowSpec) -> RecordSource:
    problems = Problems(corpus.digits, tuple(corpus.operators))
    held_out = 2 * max(1, round(problems.pairs * corpus.eval_fraction))
    end = len(problems) if corpus.problems is None else min(len(problems), held_out + corpus.problems)
    return RecordSource(train=RecordSlice(problems, held_out, end), evaluation=RecordSlice(problems, 0, held_out))
