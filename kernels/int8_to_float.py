"""Codes of eight bits as floats, by a few instructions of an NVIDIA GPU."""

from typing import Any

import jax
from jax.experimental.pallas import triton as plt

# Four codes to floats a, b, c, d. The processors turn 16 integers a cycle into floats, too few for the speed of memory;
# so a code plus 128 becomes the last byte of 2^23 as a float, from which 2^23 + 128 is taken.
WIDEN = """{
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
  USE
}"""
# As they are; as bfloat16, their upper halves, since a code has eight bits and so has a bfloat16; or times a number and
# added to another, in one instruction that the compiler would make two of.
AS_FLOAT32 = "mov.b32 $0, a; mov.b32 $1, b; mov.b32 $2, c; mov.b32 $3, d;", "=f,=f,=f,=f,r"
AS_BFLOAT16 = "prmt.b32 $0, a, b, 0x7632; prmt.b32 $1, c, d, 0x7632;", "=r,=r,r"
TIMES_ADDED = (
    "fma.rn.f32 $0, a, $5, $9; fma.rn.f32 $1, b, $6, $10; fma.rn.f32 $2, c, $7, $11; fma.rn.f32 $3, d, $8, $12;",
    "=f,=f,=f,=f,r,f,f,f,f,f,f,f,f",
)


def assembled(use: tuple[str, str], dtype: Any, codes: jax.Array, *others: jax.Array) -> jax.Array:
    """What instructions make of codes, four at a time."""
    instructions, constraints = use
    (made,) = plt.elementwise_inline_asm(
        WIDEN.replace("CODES", f"${constraints.count('=')}").replace("USE", instructions),
        args=[codes, *others],
        constraints=constraints,
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, dtype)],
    )
    return made
