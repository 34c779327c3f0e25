"""Schema of kernel backends: which implementation is used for each operation of a model."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Schema, schema, section
from maxhydra.config.errors import Problem
from maxhydra.config.schema.gated_delta import DeltaBackend
from maxhydra.config.schema.tiles import Sizes, Tiles


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
