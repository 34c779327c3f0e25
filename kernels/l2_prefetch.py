"""A weight on its way from memory before the kernel that reads it begins.

A kernel of many small programs leaves memory idle while it ends and the next begins. Its programs can ask for what is
read then, and need not wait for it: the next kernel finds it in the cache. In Pallas for Triton, by an instruction that
NVIDIA's GPUs have from Hopper on.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxhydra.kernels.placement import capability

# Bytes of a weight that the cache holds until it is read, and what an instruction asks for a multiple of.
MOST, UNIT = 1 << 24, 16
THREADS_OF_WARP = 32
# $1: the weight, $2: the piece of it, or less than zero for none. The result is of no use but to be wanted.
INSTRUCTIONS = """{{
  .reg .pred is_asked;
  .reg .u64 place;
  setp.ge.s32 is_asked, $2, 0;
  mad.wide.s32 place, $2, {size}, $1;
  @is_asked cp.async.bulk.prefetch.L2.global [place], {size};
  mov.u32 $0, 0;
}}"""


class Ahead(NamedTuple):
    """Equal pieces of a weight, one for each program of a kernel, whose first thread asks for it.

    Measured on an H200, us: attention of 64 rows of 200 tokens 10.7 instead of 10.6, the product with 2,048 x 2,048
    numbers behind it 4.2 instead of 4.9. A kernel of few programs loses more than is gained: the sum of parts 3.3 to
    4.5 instead of 2.5 for 8 to 12 MB, and the product behind it is no faster.
    """

    size: int
    """Bytes of a piece."""
    threads: int
    """Of a program."""

    @classmethod
    def of(cls, weight_NK: jax.Array, *, programs: int, warps: int) -> "Ahead | None":
        """None where the GPUs here cannot, or where it would be of no use."""
        found, whole = capability(), weight_NK.size * weight_NK.dtype.itemsize
        if found is None or float(found) < 9 or whole > MOST:
            return None
        return cls(whole // programs // UNIT * UNIT, warps * THREADS_OF_WARP)

    @property
    def spec(self) -> pl.BlockSpec:
        """Of the weight, of which nothing is read."""
        return pl.BlockSpec((None, self.threads), lambda *_: (0, 0))

    def ask(self, weight_ref: Any, program: jax.Array, beside_ref: Any, *, after: jax.Array) -> None:
        """`after`: a number, not less than zero, that comes of all that the program reads, so that this waits for that.
        `beside`: something to be written to, as long as the threads, which is left as it is."""
        is_asked = (jnp.arange(self.threads) == 0) & ~(jnp.broadcast_to(after, (self.threads,)) < 0)
        (zero,) = plt.elementwise_inline_asm(
            INSTRUCTIONS.format(size=self.size),
            args=[weight_ref, jnp.where(is_asked, program, -1)],
            constraints="=r,l,r",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct((self.threads,), jnp.int32)],
        )
        plt.store(beside_ref, jnp.zeros((self.threads,), beside_ref.dtype), mask=zero != 0)
