"""reasoning-gym tasks: procedurally generated problems with verifiers; data.name is the task.

A record has the question as a user message, `prompt`; an `answer`; and `entry`, all metadata of the problem, with which
the reward kind=reasoning_gym scores. Problem i is generated with seed SEED + i, so the held-out problems differ from
the training problems, although a small task may generate the same one twice.
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.config.errors import did_you_mean
from maxhydra.config.schema.data import Corpus, Data
from maxhydra.data.records import BadRecord, Record, need
from maxhydra.data.rows import RowSpec
from maxhydra.data.sources import RecordSource, hold_out

SEED = 1234
# Number of problems, which is unlimited in principle, unless data.problems is set.
PROBLEMS = 100_000


@dataclasses.dataclass(frozen=True)
class Problems:
    """Problems of a task, by index."""

    name: str
    count: int

    def __len__(self) -> int:
        return self.count

    @cached_property
    def _dataset(self) -> Any:
        gym = need("reasoning_gym", "data.source=reasoning_gym", extra="rl")
        return gym.create_dataset(self.name, size=self.count, seed=SEED)

    def read(self, indices: Sequence[int]) -> list[Record | BadRecord]:
        return [_record(self._dataset[int(index)]) for index in indices]

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
        raise ConfigError(Problem("data.name", "is not a task of reasoning-gym", value=corpus.name, hint=hint))
    return hold_out(Problems(corpus.name, corpus.problems or PROBLEMS), corpus.eval_fraction)
