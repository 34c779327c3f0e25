"""The update of AdamW in one pass over weights, moments and gradients. BACKENDS says what serves what.

What none of the kernels serves is updated by optax (maxhydra/optim), whose arithmetic XLA makes kernels of.
"""

import dataclasses
from typing import Protocol

import jax

from maxhydra.kernels.able import Able, Asked
from maxhydra.kernels.adamw import reference, triton
from maxhydra.kernels.adamw.rule import Held, Now, Rule

__all__ = ["BACKENDS", "Backend", "Call", "Held", "Now", "Rule"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(Asked):
    """The update of a weight of so many numbers, whose gradient comes in parts of the same size."""

    size: int
    parts: int


class Run(Protocol):
    """What is held after a step, given the gradients of its parts in order."""

    def __call__(self, held: Held, grads: list[jax.Array], now: Now, rule: Rule) -> Held: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend(Able[Call]):
    """One row of the capability table."""

    run: Run
    min_size: int = 1
    max_size: int | None = None
    part_multiple: int = 1

    def needs(self, call: Call) -> tuple[tuple[bool, str], ...]:
        is_within = self.min_size <= call.size and (self.max_size is None or call.size <= self.max_size)
        return (
            (is_within, f"takes weights of {self.min_size} to {self.max_size} numbers, not {call.size}"),
            (
                call.size // call.parts % self.part_multiple == 0,
                f"takes parts in multiples of {self.part_multiple} numbers, not {call.size // call.parts}",
            ),
        )


# Fastest first.
BACKENDS: dict[str, Backend] = {
    "triton": Backend(
        run=triton.adamw,
        platforms=("gpu",),
        devices=1,
        min_size=triton.FEWEST,
        max_size=triton.LARGEST,
        part_multiple=triton.MULTIPLE,
    ),
    "reference": Backend(run=reference.adamw),
}
