"""Inline PTX of NVIDIA GPUs, for Pallas for Triton: conversion of int8 codes to floats, and L2 prefetch.

A kernel of many small programs leaves memory idle while it drains and the next one launches. Its programs can prefetch
the weight that is read next without waiting for it; the next kernel then hits the cache. The instruction exists from
Hopper on.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxhydra.kernels.placement import capability

# Converts four codes to floats a, b, c, d. A multiprocessor converts only 16 integers to float per cycle, too few to
# keep up with memory. So code + 128 becomes the last byte of the float 2^23, from which 2^23 + 128 is subtracted.
CONVERT = """{
  .reg .b32 u, a, b, c, d;
  xor.b32 u, CODES, 0x80808080;
  prmt.b32 a, u, 0x4B000000, 0x7650;
  prmt.b32 b, u, 0x4B000000, 0x7651;
  prmt.b32 c, u, 0x4B000000, 0x7652;
  prmt.b32 d, u, 0x4B000000, 0x7653;
  add.f32 a, a, 0fCB000080;
  add.f32 b, b, 0fCB000080;
  add.f32 c, c, 0fCB000080;
  add.f32 d, d, 0fCB000080;
  OUTPUT
}"""
# The outputs: the floats; their upper halves as bfloat16, which are exact since a bfloat16 has eight significant bits;
# or a fused multiply-add, which the compiler would split into two instructions.
AS_FLOAT32 = "mov.b32 $0, a; mov.b32 $1, b; mov.b32 $2, c; mov.b32 $3, d;", "=f,=f,=f,=f,r"
AS_BFLOAT16 = "prmt.b32 $0, a, b, 0x7632; prmt.b32 $1, c, d, 0x7632;", "=r,=r,r"
FMA_FLOAT32 = (
    "fma.rn.f32 $0, a, $5, $9; fma.rn.f32 $1, b, $6, $10; fma.rn.f32 $2, c, $7, $11; fma.rn.f32 $3, d, $8, $12;",
    "=f,=f,=f,=f,r,f,f,f,f,f,f,f,f",
)


def convert_int8(output: tuple[str, str], dtype: Any, codes: jax.Array, *others: jax.Array) -> jax.Array:
    """Apply one of the conversions above to the codes, four at a time."""
    instructions, constraints = output
    (result,) = plt.elementwise_inline_asm(
        CONVERT.replace("CODES", f"${constraints.count('=')}").replace("OUTPUT", instructions),
        args=[codes, *others],
        constraints=constraints,
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, dtype)],
    )
    return result


# Largest weight in bytes that stays in the cache until it is read, and the granularity of the instruction.
MAX_BYTES, GRANULARITY = 1 << 24, 16
THREADS_PER_WARP = 32
# $1: the weight, $2: the index of the slice, negative for no prefetch. The result $0 only keeps the instruction alive.
INSTRUCTIONS = """{{
  .reg .pred is_active;
  .reg .u64 address;
  setp.ge.s32 is_active, $2, 0;
  mad.wide.s32 address, $2, {size}, $1;
  @is_active cp.async.bulk.prefetch.L2.global [address], {size};
  mov.u32 $0, 0;
}}"""


class L2Prefetch(NamedTuple):
    """Splits a weight into equal slices; the first thread of each program prefetches one of them.

    Measured on an H200: attention of 64 rows of 200 tokens takes 10.7 us instead of 10.6, and the matmul with a
    2,048 x 2,048 weight after it 4.2 instead of 4.9. A kernel of few programs loses more than it gains: the split-K
    reduction takes 3.3 to 4.5 us instead of 2.5 for 8 to 12 MB, and the matmul after it does not get faster.
    """

    size: int
    """Bytes of a slice."""
    threads: int
    """Threads of a program."""

    @classmethod
    def of(cls, weight_NK: jax.Array, *, programs: int, warps: int) -> "L2Prefetch | None":
        """None if this host's GPUs lack the instruction or the weight would not stay in the cache."""
        compute_capability, num_bytes = capability(), weight_NK.size * weight_NK.dtype.itemsize
        if compute_capability is None or float(compute_capability) < 9 or num_bytes > MAX_BYTES:
            return None
        return cls(num_bytes // programs // GRANULARITY * GRANULARITY, warps * THREADS_PER_WARP)

    @property
    def spec(self) -> pl.BlockSpec:
        """Block spec of the weight; the program only needs its address."""
        return pl.BlockSpec((None, self.threads), lambda *_: (0, 0))

    def issue(self, weight_ref: Any, program: jax.Array, out_ref: Any, *, after: jax.Array) -> None:
        """Prefetch the slice of this program once `after` is known.

        `after`: a non-negative number that depends on everything the program reads, so that its own reads go first.
        `out_ref`: an output of `threads` elements. A store whose mask is never true keeps the compiler from dropping
        the instruction; the contents stay unchanged.
        """
        is_active = (jnp.arange(self.threads) == 0) & ~(jnp.broadcast_to(after, (self.threads,)) < 0)
        (zero,) = plt.elementwise_inline_asm(
            INSTRUCTIONS.format(size=self.size),
            args=[weight_ref, jnp.where(is_active, program, -1)],
            constraints="=r,l,r",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct((self.threads,), jnp.int32)],
        )
        plt.store(out_ref, jnp.zeros((self.threads,), out_ref.dtype), mask=zero != 0)
