"""Sizes by which kernels cut their work, in place of those that were measured."""

from collections.abc import Iterator

from maxhydra.config.declare import Schema, option, schema, section
from maxhydra.config.errors import Problem

# By name below a section.
Sizes = tuple[tuple[str, int], ...]
# Numbers of things, and not sizes of arrays, which Triton has as powers of two alone.
COUNTS = ("stages", "at_once", "band")


class Tile(Schema):
    """Sizes of one kernel, or sections of several."""

    @property
    def sizes(self) -> Sizes:
        """Those that are set, such as forward.rows."""
        found: list[tuple[str, int]] = []
        for name, value in vars(self).items():
            if isinstance(value, Tile):
                found += [(f"{name}.{below}", size) for below, size in value.sizes]
            elif value is not None:
                found.append((name, value))
        return tuple(found)

    def check(self) -> Iterator[Problem]:
        for name, size in vars(self).items():
            if isinstance(size, int) and name not in COUNTS and size & (size - 1):
                near = 1 << (size.bit_length() - 1)
                yield Problem(name, "is not a power of two", value=size, accepted=f"such as {near} or {2 * near}")


@schema
class AttentionBlock(Tile):
    """What a program of one of attention's kernels does at a time."""

    queries: int | None = option(None, ge=16, le=512)
    """Of a block. null, here and below: as measured, cut down to what divides the arrays."""
    keys: int | None = option(None, ge=16, le=512)
    """Of a block."""
    warps: int | None = option(None, ge=1, le=32)
    """Of a program."""
    stages: int | None = option(None, ge=1, le=16)
    """Loads that are on their way at a time."""


@schema
class AttentionTile(Tile):
    """The kernels of attention: forward, and the gradients by queries and by keys and values."""

    forward: AttentionBlock = section(AttentionBlock)
    for_queries: AttentionBlock = section(AttentionBlock)
    for_keys: AttentionBlock = section(AttentionBlock)


@schema
class StepTile(Tile):
    """What a step of attention on Hopper takes."""

    size: int | None = option(None, ge=64, le=128)
    """Keys of a step."""
    stages: int | None = option(None, ge=1, le=16)
    """Steps whose loads are on their way at a time."""


@schema
class HopperAttentionTile(Tile):
    """Attention on Hopper forward; backward, registers leave no choice."""

    forward: StepTile = section(StepTile)


@schema
class ProductTile(Tile):
    """What a program of a grouped product makes."""

    rows: int | None = option(None, ge=16, le=512)
    """Of what is made."""
    columns: int | None = option(None, ge=16, le=512)
    """Of what is made."""
    summed: int | None = option(None, ge=16, le=512)
    """Terms of a sum at a time."""
    warps: int | None = option(None, ge=1, le=32)
    """Of a program."""
    stages: int | None = option(None, ge=1, le=16)
    """Loads that are on their way at a time."""
    band: int | None = option(None, ge=1)
    """Tiles of rows that pass over the columns together."""


@schema
class GroupedMatmulTile(Tile):
    """The kernels of grouped products: those with rows, and sums over rows, which are the gradient of the matrices."""

    products: ProductTile = section(ProductTile)
    sums: ProductTile = section(ProductTile)


@schema
class RowsTile(Tile):
    """What a program of a norm takes."""

    rows: int | None = option(None, ge=1, le=512)
    """One after the other."""
    warps: int | None = option(None, ge=1, le=32)
    """Of a program."""


@schema
class RmsNormTile(Tile):
    """The kernels of a norm."""

    forward: RowsTile = section(RowsTile)
    backward: RowsTile = section(RowsTile)


@schema
class QkvRopeTile(Tile):
    """What a program takes of one head."""

    tokens: int | None = option(None, ge=1, le=1024)
    """At a time."""
    warps: int | None = option(None, ge=1, le=32)
    """Of a program."""


@schema
class LinearCrossEntropyTile(Tile):
    """What a program, which has a row of logits, does at a time."""

    logits: int | None = option(None, ge=64, le=65536)
    """Of a piece."""
    at_once: int | None = option(None, ge=1, le=64)
    """Pieces that are on their way together."""
    warps: int | None = option(None, ge=1, le=32)
    """Of a program."""


@schema
class TritonTiles(Schema):
    """Sizes of the kernels in Triton, by operation; each needs model.kernels.<operation>=triton."""

    attention: AttentionTile = section(AttentionTile)
    grouped_matmul: GroupedMatmulTile = section(GroupedMatmulTile)
    rms_norm: RmsNormTile = section(RmsNormTile)
    qkv_rope: QkvRopeTile = section(QkvRopeTile)
    linear_cross_entropy: LinearCrossEntropyTile = section(LinearCrossEntropyTile)


@schema
class MosaicTiles(Schema):
    """Sizes of the kernels in Mosaic, by operation; each needs model.kernels.<operation>=mosaic."""

    attention: HopperAttentionTile = section(HopperAttentionTile)


@schema
class Tiles(Schema):
    """By backend."""

    mosaic: MosaicTiles = section(MosaicTiles)
    triton: TritonTiles = section(TritonTiles)
