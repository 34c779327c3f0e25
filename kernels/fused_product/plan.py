"""Which program has what of a feed-forward in one kernel.

Shapes: M rows, D residual stream, F hidden.
"""

import dataclasses

from maxhydra.kernels.place import capability, processors

# Rows of a product of the matrix unit.
ROWS = 64
# Groups of programs, and programs of each, which must all run at the same time: an H100 or H200 has 132 processors.
GROUPS, MEMBERS = 8, 16
# Inputs of a block, and bytes of shared memory for blocks on their way and for outputs.
INPUTS, ROOM = 64, 226 * 1024
MOST_OUTPUTS, MOST_SLOTS, LEAST_SLOTS = 256, 8, 3


@dataclasses.dataclass(frozen=True)
class Plan:
    M: int
    D: int
    F: int
    groups: int = GROUPS
    """Each makes a part of the hidden numbers and multiplies it with `down`, so that only its own members wait for each
    other."""
    members: int = MEMBERS
    inputs: int = INPUTS
    """Of a block."""
    most_slots: int = MOST_SLOTS
    out_parts: int = 4
    then_parts: int = 4
    waits: int = 1
    """Times that a program waits for a part of its group, its own first."""
    cluster: int = 1
    is_turned: bool = True

    @property
    def programs(self) -> int:
        return self.groups * self.members

    @property
    def hidden(self) -> int:
        """Hidden numbers of a program, each of a gate and a value."""
        return self.F // self.programs

    @property
    def outputs(self) -> int:
        """Of `down`, of a program."""
        return self.D // self.members

    @property
    def height(self) -> int:
        """Weights of an input at most."""
        return max(2 * self.hidden, self.outputs)

    @property
    def slots(self) -> int:
        """Blocks of weights and rows on their way at a time: what fits."""
        room = ROOM - max(2 * ROWS * self.hidden, 4 * ROWS * self.outputs)
        return min(self.most_slots, room // (2 * (self.height + ROWS) * self.inputs))

    @property
    def fits(self) -> bool:
        is_whole = self.F % (8 * self.programs) == self.D % (16 * self.members) == self.M % 8 == 0
        is_whole = is_whole and self.D % self.inputs == self.F % (self.groups * self.inputs) == 0
        return is_whole and 8 <= self.M <= ROWS and self.height <= MOST_OUTPUTS and self.slots >= LEAST_SLOTS


def can_serve(plan: Plan, dtype: str) -> bool:
    """Whether the kernel takes these sizes on the devices there are."""
    is_there = capability() == "9.0" and processors() >= plan.programs
    return is_there and plan.fits and dtype == "bfloat16"
