"""What is known when the kernels are compiled."""

import dataclasses
from typing import NamedTuple


class Tile(NamedTuple):
    columns: int
    stages: int
    """Steps whose operands have room in shared memory."""
    band: int
    """Tiles of rows that pass over the columns together, so that both operands are found in the cache."""
    running: int
    """Products of a warpgroup that go on while it begins the next step, 0 or 1."""


class Tiles(NamedTuple):
    product: Tile
    turned: Tile
    """With the matrices' rows and columns changed."""
    summed: Tile


@dataclasses.dataclass(frozen=True)
class How:
    tiles: Tiles
    programs: int
    """One for each processor."""


MEASURED = Tiles(*[Tile(columns=256, stages=4, band=8, running=1)] * 3)
