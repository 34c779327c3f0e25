"""Which program has what of the chain. Letters as in the package."""

import dataclasses

# Rows of a product of the matrix unit, and inputs of a block of 128 bytes.
ROWS, BLOCK = 64, 64
# Programs, which must all run at the same time: an H100 or H200 has 132 processors.
PROGRAMS = 128
# Inputs of `out` that come at a time.
PIECE = 256
# Outputs of a program and inputs of `out` up to which shared memory holds all that is on its way.
MOST_OUT, MOST_HIDDEN, MOST_INPUTS = 16, 64, 2048


@dataclasses.dataclass(frozen=True)
class Plan:
    A: int
    D: int
    F: int
    programs: int = PROGRAMS

    @property
    def of_out(self) -> int:
        """Outputs of a program."""
        return self.D // self.programs

    @property
    def of_hidden(self) -> int:
        return self.F // self.programs

    @property
    def of_down(self) -> int:
        return self.of_out * self.parts

    @property
    def parts(self) -> int:
        """Programs that share the inputs of `down`: more of them read fewer rows each, and write more sums."""
        return min(4, self.programs, 2 * self.of_hidden // self.of_out)

    @property
    def down_blocks(self) -> int:
        """Blocks of inputs of `down` that a program has."""
        return self.F // BLOCK // self.parts

    @property
    def fits(self) -> bool:
        if self.of_out == 0 or self.of_hidden == 0:
            return False
        is_whole = self.A % PIECE == self.D % (8 * self.programs) == self.F % (BLOCK * self.programs) == 0
        is_whole = is_whole and self.of_out % 16 == self.of_down % 16 == self.F % (BLOCK * self.parts) == 0
        return is_whole and self.of_out <= MOST_OUT and self.of_hidden <= MOST_HIDDEN and self.A <= MOST_INPUTS
