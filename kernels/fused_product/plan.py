"""Which program has what of a feed-forward in one kernel.

Shapes: M rows, D residual stream, F hidden.
"""

import dataclasses

from maxhydra.kernels.place import capability, processors

# Rows of a product of the matrix unit, and outputs that it takes at most.
ROWS, MOST_OUTPUTS = 64, 256
# Bytes of shared memory for what is on its way and for outputs.
ROOM = 226 * 1024
# Blocks of weights that it takes for memory not to wait.
LEAST_WEIGHTS = 4


@dataclasses.dataclass(frozen=True)
class Plan:
    """The fastest of those measured on an H200 for the sizes of Llama 3.2 1B."""

    M: int
    D: int
    F: int
    groups: int = 4
    """Of programs. Each makes a part of the hidden numbers and multiplies it with `down`, so that only its own members
    wait for each other."""
    members: int = 32
    """Of a group. All programs must run at the same time: an H100 or H200 has 132 processors."""
    cluster: int = 2
    """Members that get the same rows by one copy."""
    inputs: int = 128
    """Of a block."""
    rows: int = 3
    """Blocks of rows on their way at a time."""

    @classmethod
    def of(cls, M: int, D: int, F: int) -> "Plan":
        """With long blocks, which memory likes, unless they are too large to have several on their way."""
        plan = cls(M, D, F)
        return plan if plan.weights >= LEAST_WEIGHTS else dataclasses.replace(plan, inputs=plan.inputs // 2)

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
    def weights(self) -> int:
        """Blocks of weights on their way at a time: what fits, since they come on while the rows wait."""
        room = ROOM - 2 * ROWS * max(self.hidden, 2 * self.outputs) - 2 * self.rows * ROWS * self.inputs
        return room // (2 * self.height * self.inputs)

    @property
    def fits(self) -> bool:
        of_programs = self.F % (16 * self.programs) == self.D % (16 * self.members) == 0
        of_blocks = self.D % self.inputs == self.F % (self.groups * self.inputs) == 0
        is_counted = self.M % (8 * self.cluster) == 0 and 0 < self.M <= ROWS and self.height <= MOST_OUTPUTS
        return of_programs and of_blocks and is_counted and self.weights >= LEAST_WEIGHTS


def can_serve(plan: Plan, dtype: str) -> bool:
    """Whether the kernel takes these sizes on the devices there are."""
    return capability() == "9.0" and processors() >= plan.programs and plan.fits and dtype == "bfloat16"
