"""Tasks of reasoning-gym: problems made by a program, each with a verifier; data.name is the task.

A record has the question as a user's turn, `prompt`; an `answer`; and as `entry` all that the task knows of the
problem, by which kind=reasoning_gym of a reward scores. Problem i is made from the seed SEED + i, so that the held-out
ones are others than those trained on, though a small task may make the same one twice.
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.config.errors import did_you_mean
from maxhydra.config.schema.corpus import Corpus
from maxhydra.config.schema.data import Data
from maxhydra.data.optional_packages import need
from maxhydra.data.records import BadRecord, Record
from maxhydra.data.rows import RowSpec
from maxhydra.data.sources import RecordSource, hold_out

SEED = 1234
# Problems of a task, which could make any number of them, unless data.problems says otherwise.
PROBLEMS = 100_000


@dataclasses.dataclass(frozen=True)
class Problems:
    """The problems of a task by index."""

    name: str
    count: int

    def __len__(self) -> int:
        return self.count

    @cached_property
    def _made(self) -> Any:
        gym = need("reasoning_gym", "data.source=reasoning_gym", extra="rl")
        return gym.create_dataset(self.name, size=self.count, seed=SEED)

    def read(self, indices: Sequence[int]) -> list[Record | BadRecord]:
        return [_record(self._made[int(index)]) for index in indices]

    def location(self, index: int) -> str:
        return f"problem {index} of {self.name}"

    @property
    def groups(self) -> list[int] | None:
        return None


def _record(entry: dict[str, Any]) -> Record:
    prompt = [{"role": "user", "content": entry["question"]}]
    return {"prompt": prompt, "answer": entry["answer"], "entry": entry}


def open_source(corpus: Corpus, data: Data, spec: RowSpec) -> RecordSource:
    assert corpus.name is not None
    known = need("reasoning_gym.factory", "data.source=reasoning_gym", extra="rl").DATASETS
    if corpus.name not in known:
        hint = did_you_mean(corpus.name, known) or "reasoning_gym.factory.DATASETS lists them"
        raise ConfigError(Problem("data.name", "is no task of reasoning-gym", value=corpus.name, hint=hint))
    return hold_out(Problems(corpus.name, corpus.problems or PROBLEMS), corpus.eval_fraction)
