"""What is known when the kernels are compiled."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class How:
    columns: int
    """Of a tile."""
    stages: int
    """Steps whose operands have room in shared memory."""
    band: int
    """Tiles of rows that pass over the columns together, so that both operands are found in the cache."""
    processors: int

    def fitted(self, columns: int) -> "How":
        """With tiles that divide the columns."""
        return dataclasses.replace(self, columns=math.gcd(self.columns, columns))
