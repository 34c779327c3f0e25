"""The schedule of pipeline parallelism: which microbatch and which layers a stage runs at each tick.

The layers of the repeated pattern are cut into stages x repeats chunks; chunk c runs on stage c % stages. A group of
`stages` microbatches passes all chunks before the next group starts (Narayanan et al., 2021, interleaved schedule), so
that the output of the last stage reaches the first one exactly when it is needed and is never stored in between.
Every tick, each stage runs one chunk on one microbatch; it is idle during the stages - 1 ticks of the pipeline's fill
and drain.
"""

import dataclasses
import math
from typing import Any, NamedTuple

from maxhydra.config import ConfigError, Problem


class Work(NamedTuple):
    """What a stage does at a tick. Fields are ints or integer arrays, like the arguments they come from."""

    group: Any
    """Index of the group of microbatches."""
    owner: Any
    """Microbatch within the group, which is the stage that holds its rows outside the pipeline."""
    repeat: Any
    """Index of the chunk among those of the stage."""


@dataclasses.dataclass(frozen=True)
class PipelineSchedule:
    """Stages, chunks per stage and microbatches of one forward pass."""

    stages: int
    repeats: int
    microbatches: int

    @property
    def groups(self) -> int:
        """Groups of `stages` microbatches."""
        return self.microbatches // self.stages

    @property
    def ticks(self) -> int:
        """Steps of the loop: one per microbatch and repeat, and stages - 1 until the last stage has started."""
        return self.microbatches * self.repeats + self.stages - 1

    @property
    def bubble_fraction(self) -> float:
        """Fraction of the ticks during which a stage is idle."""
        return (self.stages - 1) / self.ticks

    def work(self, tick: Any, stage: Any) -> Work:
        """The work of a stage at a tick; at an idle tick, values out of range."""
        group, index = divmod(tick - stage, self.stages * self.repeats)
        return Work(group, index % self.stages, index // self.stages)

    def tick(self, work: Work, stage: Any) -> Any:
        """The tick at which a stage does this work."""
        return (work.group * self.repeats + work.repeat) * self.stages + work.owner + stage

    def chunk_moves(self) -> list[list[tuple[int, int]]]:
        """Permutations that bring each chunk from the stage that stores it to the stage that runs it.

        Chunks are stored in order: stage s holds chunks s * repeats to (s + 1) * repeats - 1. Returns `repeats` lists
        of (chunk index on its storing stage, repeat on its running stage), one entry per storing stage. In each list
        every stage sends one chunk and receives one.
        """
        moves: list[list[tuple[int, int]]] = [[] for _ in range(self.repeats)]
        cycle = math.lcm(self.repeats, self.stages)
        for chunk in range(self.stages * self.repeats):
            # Chunks of one storing stage share chunk // cycle, and those of one running stage that share it differ in
            # chunk % repeats by multiples of the greatest common divisor, so the sums differ for both.
            moves[(chunk % self.repeats + chunk // cycle) % self.repeats].append(
                (chunk % self.repeats, chunk // self.stages)
            )
        return moves

    def destination(self, storing_stage: int, chunk_index: int) -> int:
        """The stage that runs a chunk, given where it is stored."""
        return (storing_stage * self.repeats + chunk_index) % self.stages


def plan_schedule(
    *, stages: int, repeats: int, microbatches: int | None, rows: int, row_shards: int
) -> PipelineSchedule:
    """The schedule of a forward pass over `rows` sequences, each microbatch of which is cut into `row_shards` shards.

    Raises ConfigError if the rows do not form the microbatches.
    """
    unit = stages * row_shards
    if rows % unit:
        reason = f"makes {rows} sequences, which do not form microbatches for {stages} stages"
        raise ConfigError(
            Problem("train.per_device_batch_size", reason, value=rows, accepted=f"a multiple of {unit} sequences")
        )
    accepted = [stages * n for n in range(1, rows // unit + 1) if (rows // unit) % n == 0]
    if microbatches is None:
        microbatches = 2 * stages if 2 * stages in accepted else stages
    if microbatches not in accepted:
        reason = f"does not cut {rows} sequences for {stages} stages and {row_shards} shards of a microbatch"
        shown = ", ".join(map(str, accepted))
        raise ConfigError(Problem("mesh.pipeline.microbatches", reason, value=microbatches, accepted=shown))
    return PipelineSchedule(stages, repeats, microbatches)
