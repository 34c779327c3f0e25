"""The experts of a few tokens for GPUs, in Pallas for Triton: only the experts that are hit are read, and only once.

Two kernels stream the weights: gate and up together, or up alone, and down. A program multiplies some columns of one
expert's matrix, or with few of those a split of their terms, by the rows of that expert. In between, XLA adds up the
splits and applies bias, activation and the rows' factors: the programs of down would repeat that for every block of
columns.

Shapes: M tokens, K experts per token, R = M * K rows sorted by expert, G groups of rows, one per expert that is hit, E
experts, D residual stream, F hidden, P splits, N columns of a matmul, H matrices that read the tokens.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxhydra.kernels.grouped_matmul.expert_weights import (
    BLOCK,
    ELEMENTS,
    FIELDS,
    Matrices,
    Packing,
    field_values,
    load_scales,
)
from maxhydra.kernels.ptx import AS_BFLOAT16, convert_int8
from maxhydra.kernels.tiles import power_of_two_divisor

# Number of tokens up to which reading the weights takes longer than the arithmetic.
MOST_TOKENS = 64
# Programs of a kernel that keep the memory of an H200 busy: two per multiprocessor.
PROGRAMS = 264
# Bytes of shared memory for the stages of a program, so that a multiprocessor has room for two.
MEMORY = 112 << 10
LEAST_SIZE = 64
# Rows of a tensor core instruction.
SMALL = 16
MOST_STAGES = 4

Activation = Callable[[jax.Array | None, jax.Array], jax.Array]
"""Hidden values in float32, from those of gate, if there is one, and up."""


class Experts(NamedTuple):
    gate: Matrices | None
    """None: down(activation(up(x)))."""
    up: Matrices
    down: Matrices
    """Its bias is not added."""

    @property
    def into(self) -> tuple[Matrices, ...]:
        """Those that read the tokens."""
        return (self.up,) if self.gate is None else (self.gate, self.up)


class Groups(NamedTuple):
    """The rows of each expert that is hit."""

    table_G3: jax.Array
    """Expert, its first row, and the number of its rows; zero rows in unused entries."""
    pairs_R: jax.Array | None
    """Pair of a token and one of its experts that each row belongs to; None: row r is pair r."""
    rows_MK: jax.Array
    """Row of each token's experts; R for ids out of range."""

    @property
    def tokens_R(self) -> "jax.Array | int":
        """Token of each row, or the rows of each token in turn."""
        each = self.rows_MK.shape[1]
        return each if self.pairs_R is None else self.pairs_R // each

    def by_row(self, values_MK: jax.Array) -> jax.Array:
        values_R = values_MK.reshape(-1)
        return values_R if self.pairs_R is None else values_R[self.pairs_R]


class Tile(NamedTuple):
    rows: int
    """Rows multiplied at a time."""
    columns: int
    terms: int
    """Terms of the sum per step."""
    splits: int
    """Programs that share the terms of a column."""
    warps: int
    stages: int


class Tiles(NamedTuple):
    into: Tile
    """Gate and up, or up."""
    out: Tile


def choose_tiles(
    tokens: int, pairs: int, groups: int, D: int, F: int, *, itemsize: float = 2, matrices: int = 2
) -> Tiles:
    """`pairs`: of a token and one of its experts; `itemsize`: bytes of a weight; `matrices`: those that read the
    tokens."""
    # With twice the rows of a mean group, few experts are read a second time, from the cache.
    is_small = tokens <= SMALL or 2 * pairs <= SMALL * groups
    choose = partial(_choose_tile, SMALL if is_small else 2 * SMALL, groups, itemsize=itemsize)
    return Tiles(choose(D, F, matrices=matrices), choose(F, D, matrices=1))


def _choose_tile(rows: int, groups: int, terms: int, columns: int, *, matrices: int, itemsize: float) -> Tile:
    """With as few splits as keep the GPU busy, if the terms can be split so, and the stages that fit in memory."""
    width, step = min(128, power_of_two_divisor(columns)), min(64, power_of_two_divisor(terms))
    steps, programs = terms // step, groups * (columns // width)
    splits = [n for n in range(1, 17) if steps % n == 0]
    enough = [n for n in splits if programs * n >= PROGRAMS]
    stages = int(MEMORY // (step * (matrices * width * itemsize + rows * 2)))
    return Tile(rows, width, step, min(enough, default=splits[-1]), warps=4, stages=min(MOST_STAGES, stages))


def is_supported(tokens: int, experts: Experts, dtype: str) -> bool:
    """Whether the kernels support these sizes on the current devices."""
    D, F = experts.up.size
    fits = math.gcd(D, F) % LEAST_SIZE == 0 and experts.up.values.size < 2**31
    dtypes = (jnp.bfloat16, jnp.int8, jnp.uint16)
    is_stored = all(matrices.values.dtype in dtypes for matrices in (*experts.into, experts.down))
    # One kernel reads gate and up.
    is_stored = is_stored and len({matrices.values.dtype for matrices in experts.into}) == 1
    return jax.default_backend() == "gpu" and tokens <= MOST_TOKENS and fits and is_stored and dtype == "bfloat16"


def group_rows(ids_MK: jax.Array, experts: int) -> Groups:
    """Rows in stable order by expert. Sorted by counting: of so few rows every pair can be compared."""
    (M, K), R = ids_MK.shape, ids_MK.size
    if M == 1:
        # The experts of a token differ, and any order serves. Rows of ids out of range have some expert.
        is_valid_K, row_K = (ids_MK[0] >= 0) & (ids_MK[0] < experts), jnp.arange(K, dtype=jnp.int32)
        table_K3 = jnp.stack([jnp.where(is_valid_K, ids_MK[0], 0), row_K, jnp.ones_like(row_K)], axis=1)
        return Groups(table_K3.astype(jnp.int32), None, jnp.where(is_valid_K, row_K, R)[None])
    ids_R, row_R = ids_MK.reshape(-1), jnp.arange(R, dtype=jnp.int32)
    ids_R = jnp.where((ids_R >= 0) & (ids_R < experts), ids_R, experts)
    is_before_RR = (ids_R < ids_R[:, None]) | ((ids_R == ids_R[:, None]) & (row_R < row_R[:, None]))
    rows_R = jnp.sum(is_before_RR, axis=1, dtype=jnp.int32)
    pairs_R = jnp.zeros(R, jnp.int32).at[rows_R].set(row_R, unique_indices=True)
    expert_E = jnp.arange(experts, dtype=jnp.int32)
    first_E = jnp.sum(ids_R < expert_E[:, None], axis=1, dtype=jnp.int32)
    count_E = jnp.sum(ids_R == expert_E[:, None], axis=1, dtype=jnp.int32)
    table = jnp.stack([expert_E, first_E, count_E], axis=1)
    if experts > R:
        # The groups are fewer than the experts: leave out those that no row hits.
        group_E = jnp.sum((count_E > 0) & (expert_E < expert_E[:, None]), axis=1, dtype=jnp.int32)
        table = jnp.zeros((R, 3), jnp.int32).at[jnp.where(count_E > 0, group_E, R)].set(table, mode="drop")
    return Groups(table, pairs_R, jnp.where(ids_R < experts, rows_R, R).reshape(M, K))


def apply_experts(
    x_MD: jax.Array,
    ids_MK: jax.Array,
    weights_MK: jax.Array,
    experts: Experts,
    activation: Activation,
    *,
    interpret: bool = False,
    tiles: Tiles | None = None,
) -> jax.Array:
    """[M, D] in float32: the sum over each token's experts of down(activation(gate(x), up(x))) by weight."""
    (M, D), R, F = x_MD.shape, ids_MK.size, experts.up.size[1]
    groups = group_rows(ids_MK, experts.up.values.shape[0])
    itemsize, matrices = experts.up.bytes_per_weight, len(experts.into)
    into, out = tiles or choose_tiles(M, R, groups.table_G3.shape[0], D, F, itemsize=itemsize, matrices=matrices)
    stream = partial(multiply_rows, table_G3=groups.table_G3, R=R, interpret=interpret)
    values_HRF = jnp.sum(stream(x_MD, groups.tokens_R, experts.into, tile=into), axis=1)
    if experts.up.bias_EN is not None:
        expert_R = groups.by_row(ids_MK)
        values_HRF += jnp.stack([matrix.bias_EN[expert_R] for matrix in experts.into if matrix.bias_EN is not None])
    gate_RF = None if experts.gate is None else values_HRF[0]
    hidden_RF = activation(gate_RF, values_HRF[-1]) * groups.by_row(weights_MK)[:, None]
    if M == 1:
        # All rows are written, and a gather of them would be a separate kernel.
        hidden_RF = jnp.where(groups.rows_MK[0, :, None] < R, hidden_RF, 0)
    (sums_PRD,) = stream(hidden_RF.astype(x_MD.dtype), 1, (experts.down,), tile=out)
    if M == 1:
        return jnp.sum(sums_PRD, axis=(0, 1))[None]
    # Rows that no group has are not written.
    by_pair = sums_PRD.at[:, groups.rows_MK].get(mode="fill", fill_value=0)
    return jnp.sum(by_pair, axis=(0, 2))


class _Rows(NamedTuple):
    """Rows of a group that a program multiplies at a time."""

    position: jax.Array
    is_valid: jax.Array


def _block(rows: _Rows, across: jax.Array, index: jax.Array | None = None) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Indices of a block, of the rows themselves or of others, and the mask of the valid rows."""
    shape = (rows.position.size, across.size)
    down = jnp.broadcast_to((rows.position if index is None else index)[:, None], shape)
    return (down, jnp.broadcast_to(across[None, :], shape)), jnp.broadcast_to(rows.is_valid[:, None], shape)


def multiply_rows(
    x: jax.Array,
    index_R: jax.Array | int,
    matrices: tuple[Matrices, ...],
    *,
    table_G3: jax.Array,
    R: int,
    tile: Tile,
    interpret: bool,
) -> jax.Array:
    """[H, P, R, N] in float32: row index_R[r] of x, or r // index_R, times each of H matrices, in splits of the sum."""
    _, N = matrices[0].size
    scales = [matrix.scales for matrix in matrices if matrix.scales is not None]
    packings = tuple(matrix.packing for matrix in matrices)
    index, each = ([], index_R) if isinstance(index_R, int) else ([index_R], None)
    terms = matrices[0].size[0]
    kernel = partial(_kernel, terms=terms, each=each, packings=packings, tile=tile, interpret=interpret)
    return pl.pallas_call(
        kernel,
        grid=(N // tile.columns, tile.splits, table_G3.shape[0]),
        out_shape=jax.ShapeDtypeStruct((len(matrices), tile.splits, R, N), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="few_row_experts",
    )(table_G3, x, *index, *(matrix.values for matrix in matrices), *scales)


class _Program(NamedTuple):
    """The part of a matmul that a program computes."""

    expert: jax.Array
    columns: Any
    """Slice of the columns."""
    start: jax.Array
    """First term."""
    steps: int
    tile: Tile
    interpret: bool


def _kernel(
    table_ref: Any,
    x_ref: Any,
    *refs: Any,
    terms: int,
    each: int | None,
    packings: tuple[Packing | None, ...],
    tile: Tile,
    interpret: bool,
) -> None:
    """`each`: rows of each row of x, without a reference to their index; `packings`: of each matrix."""
    index_ref, *others = refs if each is None else (None, *refs)
    weight_refs, (*scale_refs, out_ref) = others[: len(packings)], others[len(packings) :]
    column, split, group = (pl.program_id(axis) for axis in range(3))
    expert, first, count = (table_ref[group, i] for i in range(3))
    steps = terms // tile.terms // tile.splits
    columns = pl.ds(column * tile.columns, tile.columns)
    program = _Program(expert, columns, split * steps * tile.terms, steps, tile, interpret)

    def multiply(block: jax.Array, carry: jax.Array) -> jax.Array:
        index = first + block * tile.rows + jnp.arange(tile.rows, dtype=jnp.int32)
        rows = _Rows(index, index < first + count)
        source = index // each if each else plt.load(index_ref.at[index], mask=rows.is_valid, other=0)

        def load_x(start: jax.Array, terms: int) -> jax.Array:
            at, mask = _block(rows, start + jnp.arange(terms, dtype=jnp.int32), source)
            return plt.load(x_ref.at[at], mask=mask, other=0.0)

        if packings[0] is None:
            outs = _multiply(load_x, weight_refs, scale_refs, program)
        else:
            parts = zip(weight_refs, scale_refs, packings, strict=True)
            weights = [_Packed(values, scales, packing) for values, scales, packing in parts if packing is not None]
            outs = _multiply_packed(load_x, weights, program)
        across = column * tile.columns + jnp.arange(tile.columns, dtype=jnp.int32)
        target, mask = _block(rows, across)
        for half, out in enumerate(outs):
            plt.store(out_ref.at[(jnp.int32(half), split, *target)], out, mask=mask)
        return carry

    jax.lax.fori_loop(0, pl.cdiv(count, tile.rows), multiply, jnp.int32(0))


LoadRows = Callable[[jax.Array, int], jax.Array]
"""The values of the rows at these terms."""


def _multiply(load_x: LoadRows, weight_refs: Any, scale_refs: Any, program: _Program) -> list[jax.Array]:
    """The rows times each matrix of bfloat16 or int8 weights."""
    expert, columns, first, steps, tile, interpret = program

    def add(step: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        start = first + step * tile.terms
        x = load_x(start, tile.terms)
        weights = [ref[expert, pl.ds(start, tile.terms), columns] for ref in weight_refs]
        return [_add_matmul(x, weight, total, interpret=interpret) for weight, total in zip(weights, sums, strict=True)]

    zeros = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    sums = jax.lax.fori_loop(0, steps, add, [zeros] * len(weight_refs))
    if not scale_refs:
        return sums
    return [total * ref[expert, columns][None, :] for total, ref in zip(sums, scale_refs, strict=True)]


def _add_matmul(x: jax.Array, weight: jax.Array, total: jax.Array, *, interpret: bool) -> jax.Array:
    if weight.dtype == jnp.int8:
        weight = weight.astype(x.dtype) if interpret else convert_int8(AS_BFLOAT16, x.dtype, weight)
    return total + jnp.dot(x, weight, preferred_element_type=jnp.float32)


class _Packed(NamedTuple):
    packed_ref: Any
    scales_ref: Any
    packing: Packing


def _multiply_packed(load_x: LoadRows, weights: list[_Packed], program: _Program) -> list[jax.Array]:
    """The rows times each matrix of packed weights."""
    tile, blocks = program.tile, program.tile.terms // BLOCK

    def add(step: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        for offset in range(blocks):
            block = program.start // BLOCK + step * blocks + offset
            x_fields = [load_x(block * BLOCK + q * ELEMENTS, ELEMENTS) for q in range(FIELDS)]
            sums = [
                _add_block(x_fields, block, weight, total, program) for weight, total in zip(weights, sums, strict=True)
            ]
        return sums

    zeros = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    sums = jax.lax.fori_loop(0, program.steps, add, [zeros] * len(weights))
    return [total * weight.packing.out_factor for total, weight in zip(sums, weights, strict=True)]


def _add_block(
    x_fields: list[jax.Array], block: jax.Array, weight: _Packed, total: jax.Array, program: _Program
) -> jax.Array:
    """Add the terms of a block."""
    packed = weight.packed_ref[program.expert, block, program.columns, :]
    scales = load_scales(weight.scales_ref, program.expert, block, program.columns, weight.packing)
    for q, x in enumerate(x_fields):
        values = field_values(packed, q, scales[q], weight.packing, interpret=program.interpret)
        dims = (((1,), (1,)), ((), ()))
        total += jax.lax.dot_general(x, values, dims, preferred_element_type=jnp.float32)
    return total
