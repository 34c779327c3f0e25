"""What is known when the kernels are compiled."""

import dataclasses
from typing import NamedTuple

from maxhydra.kernels.attention.spec import Request


class Tile(NamedTuple):
    """What a program holds at a time: the moving side of a step, and how many steps are in flight."""

    size: int
    stages: int


class Tiles(NamedTuple):
    """The tiles of the two kernels."""

    forward: Tile
    backward: Tile


@dataclasses.dataclass(frozen=True)
class How:
    """What is known when the kernels are compiled."""

    request: Request
    tiles: Tiles
    programs: int
    """The most at a time: the GPU's processors."""
