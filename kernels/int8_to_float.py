"""Converts int8 codes to floats with a few PTX instructions of an NVIDIA GPU."""

from typing import Any

import jax
from jax.experimental.pallas import triton as plt

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
