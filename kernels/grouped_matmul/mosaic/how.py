"""What is known when the kernels are compiled."""

import dataclasses
import math
from typing import NamedTuple


class Tile(NamedTuple):
    """What a program makes, and how."""

    columns: int
    stages: int
    """Steps whose operands have room in shared memory."""
    band: int
    """Tiles of rows that pass over the columns together, so that both operands are found in the cache."""
    down: int
    """Programs of a cluster with rows of their own, which share the columns' operand."""
    across: int
    """Programs of a cluster with columns of their own, which share the rows' operand."""
    lead: int
    """Steps by which the first warpgroup is ahead, so that one multiplies while the other writes; zero: none."""

    @property
    def cluster(self) -> int:
        return self.down * self.across

    def fitted(self, down: int | None, columns: int) -> "Tile":
        """Cut to what divides: tiles of rows, if there must be no other, and columns."""
        own = math.gcd(self.columns, columns)
        return self._replace(
            columns=own,
            down=math.gcd(self.down, down or self.down),
            across=math.gcd(self.across, columns // own),
        )


class Tiles(NamedTuple):
    product: Tile
    turned: Tile
    """With the matrices' rows and columns changed."""
    summed: Tile


@dataclasses.dataclass(frozen=True)
class How:
    tiles: Tiles
    processors: int


MEASURED = Tiles(*[Tile(columns=256, stages=4, band=16, down=1, across=1, lead=0)] * 3)
