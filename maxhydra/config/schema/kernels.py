"""Schema of kernels: the backend of each operation, and tile sizes that override the measured defaults."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Schema, option, schema, section
from maxhydra.config.errors import Problem
from maxhydra.config.schema.attention import DeltaBackend

# Sizes by dotted name, such as forward.rows.
Sizes = tuple[tuple[str, int], ...]
# Counts, which need not be powers of two as Triton requires of block sizes.
COUNTS = ("stages", "unroll", "band")


class Tile(Schema):
    """Tile sizes of one kernel, or sections of several kernels."""

    @property
    def sizes(self) -> Sizes:
        """The sizes that are set, by dotted name."""
        found: list[tuple[str, int]] = []
        for name, value in vars(self).items():
            if isinstance(value, Tile):
                found += [(f"{name}.{child}", size) for child, size in value.sizes]
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
    """Block sizes of one attention kernel."""

    queries: int | None = option(None, ge=16, le=512)
    """Queries per block. null, here and below: the measured default, reduced until it divides the array."""
    keys: int | None = option(None, ge=16, le=512)
    """Keys per block."""
    warps: int | None = option(None, ge=1, le=32)
    """Warps per program."""
    stages: int | None = option(None, ge=1, le=16)
    """Pipeline stages (loads in flight)."""


@schema
class AttentionTile(Tile):
    """Attention kernels: forward, and the backward kernels for queries and for keys and values."""

    forward: AttentionBlock = section(AttentionBlock)
    for_queries: AttentionBlock = section(AttentionBlock)
    for_keys: AttentionBlock = section(AttentionBlock)


@schema
class StepTile(Tile):
    """Pipeline step of the Hopper attention kernel."""

    size: int | None = option(None, ge=64, le=128)
    """Keys per step."""
    stages: int | None = option(None, ge=1, le=16)
    """Pipeline stages (steps whose loads are in flight)."""


@schema
class HopperAttentionTile(Tile):
    """Forward Hopper attention; the backward kernel has fixed sizes, because registers allow no others."""

    forward: StepTile = section(StepTile)


@schema
class MatmulTile(Tile):
    """Tile of a grouped matmul kernel."""

    rows: int | None = option(None, ge=16, le=512)
    """Rows of the output tile."""
    columns: int | None = option(None, ge=16, le=512)
    """Columns of the output tile."""
    contracted: int | None = option(None, ge=16, le=512)
    """Tile size along the contracted dimension."""
    warps: int | None = option(None, ge=1, le=32)
    """Warps per program."""
    stages: int | None = option(None, ge=1, le=16)
    """Pipeline stages (loads in flight)."""
    band: int | None = option(None, ge=1)
    """Row tiles that are scheduled together over all columns, for L2 reuse."""


@schema
class GroupedMatmulTile(Tile):
    """Grouped matmul kernels: forward, also used for the input gradient, and the weight gradient."""

    forward: MatmulTile = section(MatmulTile)
    weight_grad: MatmulTile = section(MatmulTile)


@schema
class RowsTile(Tile):
    """Tile of a norm kernel."""

    rows: int | None = option(None, ge=1, le=512)
    """Rows per program, processed one after the other."""
    warps: int | None = option(None, ge=1, le=32)
    """Warps per program."""


@schema
class RmsNormTile(Tile):
    """RMSNorm kernels."""

    forward: RowsTile = section(RowsTile)
    backward: RowsTile = section(RowsTile)


@schema
class QkvRopeTile(Tile):
    """Tile of the QKV and RoPE kernel, for one head."""

    tokens: int | None = option(None, ge=1, le=1024)
    """Tokens per program."""
    warps: int | None = option(None, ge=1, le=32)
    """Warps per program."""


@schema
class LinearCrossEntropyTile(Tile):
    """Tile of the cross-entropy kernel; a program processes one row of logits."""

    logits: int | None = option(None, ge=64, le=65536)
    """Logits per block."""
    unroll: int | None = option(None, ge=1, le=64)
    """Blocks that are loaded concurrently."""
    warps: int | None = option(None, ge=1, le=32)
    """Warps per program."""


@schema
class TritonTiles(Schema):
    """Tile sizes of Triton kernels by operation; each needs model.kernels.<operation>=triton."""

    attention: AttentionTile = section(AttentionTile)
    grouped_matmul: GroupedMatmulTile = section(GroupedMatmulTile)
    rms_norm: RmsNormTile = section(RmsNormTile)
    qkv_rope: QkvRopeTile = section(QkvRopeTile)
    linear_cross_entropy: LinearCrossEntropyTile = section(LinearCrossEntropyTile)


@schema
class MosaicTiles(Schema):
    """Tile sizes of Mosaic kernels by operation; each needs model.kernels.<operation>=mosaic."""

    attention: HopperAttentionTile = section(HopperAttentionTile)


@schema
class Tiles(Schema):
    """Tile sizes by backend."""

    mosaic: MosaicTiles = section(MosaicTiles)
    triton: TritonTiles = section(TritonTiles)


class AttentionBackend(Enum):
    auto = "auto"
    reference = "reference"
    xla = "xla"
    cudnn = "cudnn"
    mosaic = "mosaic"
    triton = "triton"
    splash = "splash"


class GroupedMatmulBackend(Enum):
    auto = "auto"
    reference = "reference"
    xla = "xla"
    mosaic = "mosaic"
    triton = "triton"
    megablox = "megablox"


class TritonBackend(Enum):
    """Backends of operations that have a single GPU kernel."""

    auto = "auto"
    reference = "reference"
    xla = "xla"
    triton = "triton"


class Projection(Enum):
    plain = "plain"
    outputs_first = "outputs_first"
    joined = "joined"


class FusedLinearBackend(Enum):
    auto = "auto"
    none = "none"


@schema
class ModelKernels(Schema):
    """Backend of each operation. A backend that is set here and does not support the model or device is an error."""

    attention: AttentionBackend = AttentionBackend.auto
    """auto chooses the fastest backend that supports the model and device."""
    grouped_matmul: GroupedMatmulBackend = GroupedMatmulBackend.auto
    """Matmuls of tokens with the weights of their experts; auto as for attention."""
    rms_norm: TritonBackend = TritonBackend.auto
    """Norms before attention and feed-forward, with the residual gradient fused in; auto as for attention."""
    qkv_rope: TritonBackend = TritonBackend.auto
    """Splitting the fused QKV projection and applying RoPE, in training; auto as for attention."""
    linear_cross_entropy: TritonBackend = TritonBackend.auto
    """LM head fused with the cross-entropy loss, in training; auto as for attention."""
    delta: DeltaBackend = DeltaBackend.auto
    """Gated DeltaNet: chunked in XLA or as a kernel for TPUs (pallas_tpu) or GPUs (triton), or reference, token by
    token; auto as for attention."""
    fused_linear: FusedLinearBackend = FusedLinearBackend.auto
    """Decoding on one GPU: fuse norm, gate and residual add into the adjacent matmul (auto), or run them separately
    (none)."""
    projection: Projection = Projection.plain
    """Weight layout of linear layers. outputs_first is for small batches on a CPU, joined for a GPU; decoding sets them
    there."""
    tiles: Tiles = section(Tiles)

    def sizes(self, operation: str) -> Sizes:
        """Return the tile sizes set for the chosen backend of an operation."""
        backend = getattr(self, operation).value
        tiles = vars(self.tiles).get(backend)
        tile = None if tiles is None else vars(tiles).get(operation)
        return () if tile is None else tile.sizes

    def check(self) -> Iterator[Problem]:
        for backend, tiles in vars(self.tiles).items():
            for operation, tile in vars(tiles).items():
                named = getattr(self, operation).value
                if tile.sizes and named != backend:
                    reason = f"sets tile sizes of a kernel that model.kernels.{operation}={named} may not use"
                    hint = f"set model.kernels.{operation}={backend}"
                    yield Problem(f"tiles.{backend}.{operation}", reason, value=dict(tile.sizes), hint=hint)
