"""Who goes next on the GPU of hopper.py."""

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
from hopper_memory import Load, Memory, Race


class Deadlock(Exception):
    """All warpgroups wait."""


class Cluster:
    """Programs that run at the same time, mostly one; `members` are their places by the names of axes."""

    def __init__(self, members: list[dict[str, int]], rng: np.random.Generator) -> None:
        self.members, self.rng = members, rng
        self.loads: list[Load] = []
        # What all of them must ask for before it comes.
        self.shared_loads: dict[Any, list[Load]] = {}
        self.scopes: dict[tuple[int, int], list[list[Memory]]] = {}

    def others(self, member: int, axes: str | tuple[str, ...]) -> list[int]:
        """The member and those that differ from it in these axes alone."""
        axes = (axes,) if isinstance(axes, str) else axes
        own = [(name, i) for name, i in self.members[member].items() if name not in axes]
        return [number for number, place in enumerate(self.members) if all(place[name] == i for name, i in own)]

    def scope(self, key: tuple[int, int], made: Callable[[int], list[Memory]]) -> list[list[Memory]]:
        """Shared memory and barriers of each member."""
        if key not in self.scopes:
            self.scopes[key] = [made(member) for member in range(len(self.members))]
            for same in zip(*self.scopes[key], strict=True):
                for memory in same:
                    memory.everywhere = same
        return self.scopes[key]


def run_together(clusters: list[Cluster], steps: dict[Any, Generator[Any, None, Any]]) -> None:
    """One step of a warpgroup or one copy after the other, until all have come to their end."""
    rng, groups = clusters[0].rng, list(steps)
    waits: dict[Any, Any] = dict.fromkeys(groups)
    # How likely a copy ends while somebody can go on, and how likely that is who went last: by chance, since some
    # mistakes show when copies are late, others when one warpgroup is far ahead.
    haste, persistence = rng.random(2)
    last: list[Any] = []
    while steps:
        able = [group for group in steps if waits[group] is None or waits[group].has_passed(group.number)]
        loads = [cluster.loads for cluster in clusters if cluster.loads]
        if not able and not loads:
            raise Deadlock(", ".join(group.where for group in steps))
        if loads and (not able or rng.random() < haste):
            some = loads[rng.integers(len(loads))]
            some.pop(rng.integers(len(some))).finish()
            continue
        again = [group for group in last if group in able and rng.random() < persistence]
        group = (again or able)[rng.integers(len(again or able))]
        last = [group]
        if waits[group] is not None:
            waits[group].pass_by(group.number)
        try:
            waits[group] = next(steps[group])
        except StopIteration:
            del steps[group]
        except Race as race:
            race.add_note(group.where)
            raise
    if any(cluster.loads or cluster.shared_loads for cluster in clusters):
        raise Race("a program ends before what it has asked for")
    if any(group.products or group.stores for group in groups):
        raise Race("a program ends before what it has begun")
