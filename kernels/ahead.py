"""Weights on their way from memory before the kernel that reads them begins.

Memory rests while a small kernel begins, adds up and ends. It can ask for what the next one will read, and need not wait
for it to come: that finds it in the cache. In Pallas for Triton, by an instruction that NVIDIA's GPUs have from Hopper
on.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxhydra.kernels.place import capability

# Bytes that are asked for at most: those of a small weight, and of a large one as many as come meanwhile.
WHOLE, BEGUN = 1 << 24, 1 << 23
# The least that a GPU asks for.
UNIT = 16
THREADS_OF_WARP = 32
# $1: the weight, $2: the piece, or less than zero for none. The result is of no use but to be wanted.
INSTRUCTIONS = """{{
  .reg .pred is_asked;
  .reg .u64 place;
  setp.ge.s32 is_asked, $2, 0;
  mad.wide.s32 place, $2, {stride}, $1;
  @is_asked cp.async.bulk.prefetch.L2.global [place], {size};
  mov.u32 $0, 0;
}}"""


def can_ask() -> bool:
    """Whether the GPUs here have the instruction."""
    found = capability()
    return found is not None and float(found) >= 9


class Ahead(NamedTuple):
    """The beginning of every row of a weight, which the programs of a kernel ask for together."""

    rows: int
    stride: int
    """Bytes of a row."""
    size: int
    """Bytes of its beginning."""
    lanes: int
    """Threads of a program that ask, each for a row."""
    threads: int

    @classmethod
    def of(cls, weight_NK: jax.Array, *, programs: int, warps: int) -> "Ahead":
        (N, K), threads = weight_NK.shape, warps * THREADS_OF_WARP
        stride = K * weight_NK.dtype.itemsize
        size = stride if N * stride <= WHOLE else min(stride, BEGUN // N)
        return cls(N, stride, size // UNIT * UNIT, min(pl.cdiv(N, programs), threads), threads)

    @property
    def spec(self) -> pl.BlockSpec:
        """Of the weight, of which nothing is read."""
        return pl.BlockSpec((None, self.threads), lambda *_: (0, 0))

    def ask(self, weight_ref: Any, program: jax.Array, beside_ref: Any) -> None:
        """`beside`: something to be written to, as long as the threads, which is left as it is."""
        lane = jnp.arange(self.threads)
        row = program * self.lanes + lane
        row = jnp.where((lane < self.lanes) & (row < self.rows), row, -1)
        (zero,) = plt.elementwise_inline_asm(
            INSTRUCTIONS.format(stride=self.stride, size=self.size),
            args=[weight_ref, row],
            constraints="=r,l,r",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct((self.threads,), jnp.int32)],
        )
        plt.store(beside_ref, jnp.zeros((self.threads,), beside_ref.dtype), mask=zero != 0)
