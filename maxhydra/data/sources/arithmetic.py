"""Problems of arithmetic with whole numbers, made and not read: every one has an answer that can be checked.

A record suits every shape: `text` (23+48=71); `prompt`, a user's turn, and `answer`; `messages`, the prompt with the
answer as the assistant's turn; `chosen` and `rejected`, a right and a wrong turn of the assistant after the prompt.

Two problems with the same two numbers and the same operator, in either order, lie together: where one is held out, the
other is not trained on. Which are held out depends on digits, operators and eval_fraction alone, so that all runs on
the same problems hold out the same ones, however many they train on.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence

import numpy as np

from maxhydra.config.schema.corpus import Corpus
from maxhydra.config.schema.data import Data
from maxhydra.data.records import BadRecord, Record
from maxhydra.data.rows import RowSpec
from maxhydra.data.shuffle import ShuffleOrder
from maxhydra.data.sources import RecordSlice, RecordSource

OPERATORS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
# Of the order in which problems lie.
SEED = 1234
# How far a wrong answer is off: by one in a digit, as if a carry had been forgotten.
SLIPS = (-10, -1, 1, 10)


@dataclasses.dataclass(frozen=True)
class Problems:
    """All problems with numbers of so many digits, two orders of each pair beside each other."""

    digits: int
    operators: tuple[str, ...]

    @property
    def pairs(self) -> int:
        """Unordered pairs of numbers, times operators."""
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
        wrong = answer + SLIPS[np.random.default_rng((SEED, index)).integers(len(SLIPS))]
        question = f"{left}{symbol}{right}="
        prompt = [{"role": "user", "content": question}]
        chosen, rejected = ([{"role": "assistant", "content": str(said)}] for said in (answer, wrong))
        return {
            "text": f"{question}{answer}",
            "prompt": prompt,
            "answer": str(answer),
            "messages": [*prompt, *chosen],
            "chosen": chosen,
            "rejected": rejected,
        }


def open_source(corpus: Corpus, data: Data, spec: RowSpec) -> RecordSource:
    problems = Problems(corpus.digits, tuple(corpus.operators))
    held_out = 2 * max(1, round(problems.pairs * corpus.eval_fraction))
    end = len(problems) if corpus.problems is None else min(len(problems), held_out + corpus.problems)
    return RecordSource(train=RecordSlice(problems, held_out, end), evaluation=RecordSlice(problems, 0, held_out))
