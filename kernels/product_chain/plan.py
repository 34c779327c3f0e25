"""Which program has what of the chain. Letters as in the package."""

import dataclasses
from typing import NamedTuple

# Rows of a product of the matrix unit, and inputs of a block of 128 bytes.
ROWS, BLOCK = 64, 64
# Programs, which must all run at the same time: an H100 or H200 has 132 processors.
PROGRAMS = 128
# Programs that read the same rows at the same time, which the second level cache then hands out once.
CLUSTER = 2
# Outputs of a slot of weights at most.
MOST_OUTPUTS = 128


class Share(NamedTuple):
    """What a program has of a product."""

    outputs: int
    blocks: int
    """Of inputs."""
    in_slot: int
    """Blocks that come at a time."""

    @property
    def slots(self) -> int:
        return self.blocks // self.in_slot

    @property
    def fits(self) -> bool:
        """Outputs come in copies of a multiple of 8, and the matrix unit takes a multiple of 8 at a time."""
        copies = 4 // self.in_slot
        is_whole = self.outputs % (8 * copies) == 0 and self.blocks % self.in_slot == 0
        return is_whole and 0 < self.outputs * self.in_slot <= MOST_OUTPUTS and self.blocks > self.in_slot


@dataclasses.dataclass(frozen=True)
class Plan:
    A: int
    D: int
    F: int
    Q: int | None = None
    """None: the next layer has no heads to be made here."""
    programs: int = PROGRAMS
    cluster: int = CLUSTER

    @property
    def parts(self) -> int:
        """Programs that share the inputs of `down`: more of them read fewer rows each, and write more sums."""
        return min(4, self.programs // self.cluster)

    @property
    def norms(self) -> int:
        return 1 if self.Q is None else 2

    @property
    def out(self) -> Share:
        return Share(self.D // self.programs, self.A // BLOCK, in_slot=4)

    @property
    def hidden(self) -> Share:
        """Gate and up."""
        return Share(2 * self.F // self.programs, self.D // BLOCK, in_slot=1)

    @property
    def down(self) -> Share:
        return Share(self.D * self.parts // self.programs, self.F // BLOCK // self.parts, in_slot=2)

    @property
    def heads(self) -> Share | None:
        return None if self.Q is None else Share(self.Q // self.programs, self.D // BLOCK, in_slot=4)

    @property
    def slot(self) -> int:
        """Outputs of a slot of weights."""
        return max(share.outputs * share.in_slot for share in self.shares)

    @property
    def shares(self) -> list[Share]:
        return [share for share in (self.out, self.hidden, self.down, self.heads) if share is not None]

    @property
    def fits(self) -> bool:
        sizes = [(self.D, 8), (self.F, 8), (self.Q or 0, 8), (self.A, 0), (self.D, 0)]
        is_whole = all(size % (BLOCK if each == 0 else each * self.programs) == 0 for size, each in sizes)
        return is_whole and self.F % (BLOCK * self.parts) == 0 and all(share.fits for share in self.shares)
