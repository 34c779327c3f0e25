"""A few of many cases, the same in every session; MAXHYDRA_FULL=1 takes all of them.

For what other tests show of each case already, in another way.
"""

import os
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def drawn(cases: Sequence[T], count: int, *, seed: int = 0) -> list[T]:
    if os.environ.get("MAXHYDRA_FULL") == "1":
        return list(cases)
    chosen = set(random.Random(seed).sample(range(len(cases)), count))
    return [case for index, case in enumerate(cases) if index in chosen]
