"""Storage formats of the weights that few_rows.py reads: bfloat16, INT8, and INT4 and MXFP4 packed for its kernels.

Four 4-bit codes are packed into a 16-bit word, words of a block of BLOCK terms next to each other: term 16 * q + j of a
block is field q of word j. Each field of a block is the operand of one tensor core instruction, and two words fill a
register, which two to six integer instructions and a multiplication turn into two bfloat16 values. Bytes with
neighbouring terms would need two permutations more.

E experts, K terms (inputs), N columns (outputs), B blocks, W words of a block, G groups of terms that share a scale.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as plt

# Terms of a block: the multiple that gpt-oss' 2,880 inputs have.
BLOCK = 64
FIELDS = 4
WORDS = BLOCK // FIELDS
# Terms that share an exponent in MXFP4.
MXFP4_GROUP = 32
# Bits of an E2M1 code in each field, sign first. In field 0 they are the sign, the last two bits of the exponent and the
# first bit of the mantissa of a bfloat16; fields 1 and 2 are the same after a shift, field 3 has the remaining bits.
E2M1_BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))


class Matrices(NamedTuple):
    """One matrix per expert."""

    values: jax.Array
    """[E, K, N] in the dtype of the rows or int8, or packed words, uint16 [E, B, N, W]."""
    scales: jax.Array | None = None
    """float32 [E, N] of int8; float32 [E, G, N] of packed INT4; uint8 exponents [E, G, N] of packed MXFP4."""
    bias_EN: jax.Array | None = None

    @property
    def is_packed(self) -> bool:
        return self.values.dtype == jnp.uint16

    @property
    def size(self) -> tuple[int, int]:
        """Inputs and outputs."""
        _, first, second, *words = self.values.shape
        return (first * BLOCK, second) if words else (first, second)

    @property
    def bytes_per_weight(self) -> float:
        """Without scales."""
        return 0.5 if self.is_packed else self.values.dtype.itemsize

    @property
    def packing(self) -> "Packing | None":
        """How the weights are packed; None if they are not."""
        if not self.is_packed or self.scales is None:
            return None
        blocks, groups = self.values.shape[1], self.scales.shape[1]
        return Packing(self.scales.dtype == jnp.uint8, max(1, groups // blocks), max(1, blocks // groups))


class Packing(NamedTuple):
    """Static properties of packed weights."""

    is_mxfp4: bool
    scales_per_block: int
    """1 if a group is a block or larger."""
    blocks_per_scale: int


def can_pack(inputs: int, groups: int) -> bool:
    """Whether codes of this many inputs and groups can be packed: groups are fractions or multiples of a block."""
    if inputs % BLOCK or inputs % groups:
        return False
    group = inputs // groups
    return group % BLOCK == 0 or group in (WORDS, 2 * WORDS)


def pack(codes_EKN: jax.Array, scales_EGN: jax.Array) -> jax.Array:
    """Words of the 4-bit codes: two's complement INT4 with float32 scales, E2M1 with uint8 exponents."""
    E, K, N = codes_EKN.shape
    codes = codes_EKN.astype(jnp.uint16).reshape(E, K // BLOCK, FIELDS, WORDS, N)
    place = _e2m1_field if scales_EGN.dtype == jnp.uint8 else _int4_field
    fields = [place(jax.lax.index_in_dim(codes, q, 2, keepdims=False), q) for q in range(FIELDS)]
    return jnp.swapaxes(fields[0] | fields[1] | fields[2] | fields[3], 2, 3)


def _int4_field(code: jax.Array, q: int) -> jax.Array:
    """The code plus 8."""
    return (code ^ 8) << (4 * q)


def _e2m1_field(code: jax.Array, q: int) -> jax.Array:
    return sum((code >> (3 - i) & 1) << bit for i, bit in enumerate(E2M1_BITS[q]))


def unpack(matrices: Matrices, dtype: np.dtype) -> jax.Array:
    """[E, K, N] dequantized, multiplied in float32 and rounded once."""
    packing = matrices.packing
    assert packing is not None and matrices.scales is not None
    E, B, N, _ = matrices.values.shape
    fields = [field_values(matrices.values, q, packing, interpret=True) for q in range(FIELDS)]
    values = jnp.stack(fields, axis=2).reshape(E, matrices.scales.shape[1], -1, N, WORDS)
    scaled = values.astype(jnp.float32) * scale_values(matrices.scales)[:, :, None, :, None]
    return jnp.moveaxis(scaled.astype(dtype).reshape(E, B, FIELDS, N, WORDS), 3, -1).reshape(E, B * BLOCK, N)


def scale_values(scales: jax.Array) -> jax.Array:
    """Scales in float32. The exponent 0 is 2^-127, a subnormal number; 255, not a number, becomes infinity."""
    if scales.dtype == jnp.float32:
        return scales
    return jax.lax.bitcast_convert_type(jnp.maximum(scales.astype(jnp.int32) << 23, 1 << 22), jnp.float32)


def field_values(words: jax.Array, q: int, packing: Packing, *, interpret: bool) -> jax.Array:
    """The values of field q of the words without their scales, exact in bfloat16."""
    if not interpret:
        return _convert((E2M1_ASM if packing.is_mxfp4 else INT4_ASM)[q], words)
    wide = words.astype(jnp.int32)
    if not packing.is_mxfp4:
        return ((wide >> (4 * q) & 15) - 8).astype(jnp.bfloat16)
    sign, high, low, mantissa = (wide >> bit & 1 for bit in E2M1_BITS[q])
    exponent = 2 * high + low
    doubled = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    return (jnp.where(sign == 1, -doubled, doubled) * 0.5).astype(jnp.bfloat16)


# Two words, in the halves of a register, to two bfloat16 values. INT4: the code plus 8 is the end of the mantissa of
# 128 to 143, from which 136 is subtracted.
_INT4 = """{{
  .reg .b32 c, one, offset;
  mov.b32 one, 0x3F803F80;
  mov.b32 offset, 0xC308C308;
  shr.u32 c, $1, {shift};
  lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA;
  fma.rn.bf16x2 $0, c, one, offset;
}}"""
INT4_ASM = tuple(_INT4.format(shift=4 * q) for q in range(FIELDS))
# E2M1: the bits in their places are the value times 2^-126, also where it is subnormal, 0.5.
_E2M1 = """{{
  .reg .b32 c, d, factor, zero;
  mov.b32 factor, 0x7E807E80;
  mov.b32 zero, 0x80008000;
  {place}
  fma.rn.bf16x2 $0, c, factor, zero;
}}"""
_LAST_FIELD = """shl.b32 c, $1, 1;
  and.b32 c, c, 0x80008000;
  shr.u32 d, $1, 5;
  lop3.b32 c, d, 0x01000100, c, 0xEA;
  shr.u32 d, $1, 4;
  lop3.b32 c, d, 0x00C000C0, c, 0xEA;"""
E2M1_ASM = tuple(
    _E2M1.format(place=place)
    for place in (
        "and.b32 c, $1, 0x81C081C0;",
        "shl.b32 c, $1, 3; and.b32 c, c, 0x81C081C0;",
        "shl.b32 c, $1, 6; and.b32 c, c, 0x81C081C0;",
        _LAST_FIELD,
    )
)


def _convert(instructions: str, words: jax.Array) -> jax.Array:
    (values,) = plt.elementwise_inline_asm(
        instructions,
        args=[words],
        constraints="=r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)],
    )
    return values
