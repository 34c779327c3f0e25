"""A fixed random sample of many test cases; MAXHYDRA_FULL=1 runs all of them.

For properties that other tests cover for every case in another way.
"""

import os
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def sample_cases(cases: Sequence[T], count: int, *, seed: int = 0) -> list[T]:
    """Sample `count` cases, in their original order."""
    if os.environ.get("MAXHYDRA_FULL") == "1":
        return list(cases)
    indices = set(random.Random(seed).sample(range(len(cases)), count))
    return [case for index, case in enumerate(cases) if index in indices]
