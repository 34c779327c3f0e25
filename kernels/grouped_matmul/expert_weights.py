"""Storage formats of the weights that few_rows.py reads: bfloat16, INT8, and INT4 and MXFP4 packed for its kernels.

Four 4-bit codes are packed in a uint16, those of a block of BLOCK terms next to each other: term 16 * q + j of a block
is field q of element j. Each field of a block is the operand of one tensor core instruction, and two elements fill a
register, which a few integer instructions and multiplications turn into two bfloat16 values: bytes with neighbouring
terms would need permutations too. Scales are multiplied into the values before the matmul. Multiplied into the sum of
each group they would be read in the layout of the sums, which Triton neither prefetches nor reads without a barrier.

E experts, K terms (inputs), N columns (outputs), B blocks, W elements of a block, G groups of terms that share a scale.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as plt

# Terms of a block: the multiple that gpt-oss' 2,880 inputs have.
BLOCK = 64
FIELDS = 4
ELEMENTS = BLOCK // FIELDS
# Groups of a block that share an exponent in MXFP4.
MXFP4_GROUPS = 2
# Bits of an E2M1 code in each field, sign first. In field 0 they are those of a bfloat16: sign, last two bits of the
# exponent, first bit of the mantissa. Fields 1 and 2 are the same after a shift, field 3 has the remaining bits.
E2M1_BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))
# These bits are the value of the code times 2^-126. A scale 2^(s - 127) times 2^126 would exceed bfloat16 from s = 129,
# so the kernel multiplies by 2^(s - 31) and its result by OUT_FACTOR. Exponents above 158 become infinity.
EXPONENT_OFFSET, MAX_EXPONENT = 96, 255
OUT_FACTOR = 2.0**30

Scales = tuple[jax.Array, ...]
"""Of each column [N], as the sum of bfloat16 numbers."""


class Matrices(NamedTuple):
    """One matrix per expert."""

    values: jax.Array
    """[E, K, N] in the dtype of the rows or int8, or packed, uint16 [E, B, N, W]."""
    scales: jax.Array | None = None
    """float32 [E, N] of int8; float32 [E, G, N] of packed INT4; of packed MXFP4 uint32 [E, B, N], the scales of the two
    groups of a block in bfloat16."""
    bias_EN: jax.Array | None = None

    @property
    def is_packed(self) -> bool:
        return self.values.dtype == jnp.uint16

    @property
    def size(self) -> tuple[int, int]:
        """Inputs and outputs."""
        _, first, second, *packed = self.values.shape
        return (first * BLOCK, second) if packed else (first, second)

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
        return Packing(self.scales.dtype == jnp.uint32, max(1, groups // blocks), max(1, blocks // groups))


class Packing(NamedTuple):
    """Static properties of packed weights."""

    is_mxfp4: bool
    rows_per_block: int
    """Rows of the scales; 1 if one has a block or several."""
    blocks_per_row: int

    @property
    def out_factor(self) -> float:
        """Factor of the matmul's result."""
        return OUT_FACTOR if self.is_mxfp4 else 1.0


def can_pack(inputs: int, groups: int) -> bool:
    """Whether codes of this many inputs and groups can be packed: groups are fractions or multiples of a block."""
    if inputs % BLOCK or inputs % groups:
        return False
    group = inputs // groups
    return group % BLOCK == 0 or group in (ELEMENTS, 2 * ELEMENTS)


def pack_int4(codes_EKN: jax.Array, scales_EGN: jax.Array) -> Matrices:
    """Pack codes in two's complement with float32 scales."""
    return Matrices(_pack(codes_EKN, lambda code, q: (code ^ 8) << (4 * q)), scales_EGN)


def pack_mxfp4(codes_EKN: jax.Array, exponents_EGN: jax.Array) -> Matrices:
    """Pack E2M1 codes with E8M0 scales."""
    E, G, N = exponents_EGN.shape
    exponents = exponents_EGN.astype(jnp.uint32).reshape(E, G // MXFP4_GROUPS, MXFP4_GROUPS, N)
    bits = jnp.minimum(exponents + EXPONENT_OFFSET, MAX_EXPONENT) << 7
    return Matrices(_pack(codes_EKN, _e2m1_field), bits[:, :, 0] | bits[:, :, 1] << 16)


def _pack(codes_EKN: jax.Array, field: Callable[[jax.Array, int], jax.Array]) -> jax.Array:
    E, K, N = codes_EKN.shape
    codes = codes_EKN.astype(jnp.uint16).reshape(E, K // BLOCK, FIELDS, ELEMENTS, N)
    fields = [field(jax.lax.index_in_dim(codes, q, 2, keepdims=False), q) for q in range(FIELDS)]
    return jnp.swapaxes(fields[0] | fields[1] | fields[2] | fields[3], 2, 3)


def _e2m1_field(code: jax.Array, q: int) -> jax.Array:
    bits = [(code >> (3 - i) & 1) << bit for i, bit in enumerate(E2M1_BITS[q])]
    return bits[0] | bits[1] | bits[2] | bits[3]


def unpack(matrices: Matrices, dtype: np.dtype) -> jax.Array:
    """[E, K, N] dequantized, multiplied in float32 and rounded once."""
    packing, scales = matrices.packing, matrices.scales
    assert packing is not None and scales is not None
    E, B, N, _ = matrices.values.shape
    if packing.is_mxfp4:
        halves = [jax.lax.bitcast_convert_type(bits, jnp.float32) for bits in (scales << 16, scales >> 16 << 16)]
        scales = jnp.stack(halves, axis=2).reshape(E, -1, N) * 2.0**-EXPONENT_OFFSET
    codes = jnp.stack([_code_values(matrices.values, q, packing) for q in range(FIELDS)], axis=2)
    scaled = codes.reshape(E, scales.shape[1], -1, N, ELEMENTS) * scales[:, :, None, :, None]
    return jnp.moveaxis(scaled.astype(dtype).reshape(E, B, FIELDS, N, ELEMENTS), 3, -1).reshape(E, B * BLOCK, N)


def _code_values(packed: jax.Array, q: int, packing: Packing) -> jax.Array:
    """The values of field q without their scales, in float32."""
    wide = packed.astype(jnp.int32)
    if not packing.is_mxfp4:
        return ((wide >> (4 * q) & 15) - 8).astype(jnp.float32)
    sign, high, low, mantissa = (wide >> bit & 1 for bit in E2M1_BITS[q])
    return e2m1_values(sign << 3 | high << 2 | low << 1 | mantissa)


def e2m1_values(codes: jax.Array) -> jax.Array:
    """The values of E2M1 codes in float32."""
    exponent, mantissa = codes >> 1 & 3, codes & 1
    doubled = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent, 1) - 1).astype(jnp.float32)
    return jnp.where(codes >> 3 == 1, -doubled, doubled) * 0.5


def load_scales(scales_ref: Any, expert: jax.Array, block: jax.Array, columns: Any, packing: Packing) -> list[Scales]:
    """In a kernel: the scales of each field of a block."""
    if packing.is_mxfp4:
        bits = scales_ref[expert, block, columns]
        groups = [jax.lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.bfloat16) for half in (bits, bits >> 16)]
        return [(groups[q * MXFP4_GROUPS // FIELDS],) for q in range(FIELDS)]
    each, scales = packing.rows_per_block, list[Scales]()
    for row in range(each):
        scale = scales_ref[expert, block * each + row if each > 1 else block // packing.blocks_per_row, columns]
        bits = jax.lax.bitcast_convert_type(scale, jnp.uint32) & jnp.uint32(0xFFFF0000)
        first = jax.lax.bitcast_convert_type(bits, jnp.float32)
        scales += [(first.astype(jnp.bfloat16), (scale - first).astype(jnp.bfloat16))] * (FIELDS // each)
    return scales


def field_values(packed: jax.Array, q: int, scales: Scales, packing: Packing, *, interpret: bool) -> jax.Array:
    """In a kernel: the values [N, W] of field q divided by `out_factor`, in bfloat16."""
    wide = [jnp.broadcast_to(scale[:, None], packed.shape) for scale in scales]
    if not interpret:
        return _convert((E2M1_ASM if packing.is_mxfp4 else INT4_ASM)[q], packed, *wide)
    factors = [scale.astype(jnp.float32) for scale in wide]
    if packing.is_mxfp4:
        # Times 2^-126, as the bits are. XLA would merge that factor with others to a subnormal number, and flush it.
        bits = jax.lax.bitcast_convert_type(factors[0], jnp.int32)
        factors = [jax.lax.bitcast_convert_type(bits - (126 << 23), jnp.float32)]
    return (_code_values(packed, q, packing) * sum(factors)).astype(jnp.bfloat16)


# Two elements, in the halves of a register, to two bfloat16 values. INT4: the code plus 8 is the end of the mantissa of
# 128 to 143, from which 136 is subtracted. The scale, rounded to 16 bits, is the sum of two bfloat16 numbers.
_INT4 = """{{
  .reg .b32 c, t, one;
  mov.b32 one, 0x3F803F80;
  shr.u32 c, $1, {shift};
  lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA;
  mov.b32 t, 0xC308C308;
  fma.rn.bf16x2 c, c, one, t;
  mov.b32 t, 0x80008000;
  fma.rn.bf16x2 t, c, $3, t;
  fma.rn.bf16x2 $0, c, $2, t;
}}"""
INT4_ASM = tuple(_INT4.format(shift=4 * q) for q in range(FIELDS))
# E2M1: the bits are moved to their places in a bfloat16.
_E2M1 = """{{
  .reg .b32 c, d, zero;
  mov.b32 zero, 0x80008000;
  {place}
  fma.rn.bf16x2 $0, c, $2, zero;
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


def _convert(instructions: str, packed: jax.Array, *scales: jax.Array) -> jax.Array:
    (values,) = plt.elementwise_inline_asm(
        instructions,
        args=[packed, *scales],
        constraints=",".join(["=r", "r", *["r"] * len(scales)]),
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(packed.shape, jnp.bfloat16)],
    )
    return values
