"""Which implementation serves each operation of a model."""

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
    """Of operations that have no more than one kernel."""

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
    """Which implementation serves each operation; a backend named here that cannot serve is an error."""

    attention: AttentionBackend = AttentionBackend.auto
    """auto takes the fastest that supports the request."""
    grouped_matmul: GroupedMatmulBackend = GroupedMatmulBackend.auto
    """Products of tokens with the experts they were given to; auto as for attention."""
    rms_norm: TritonBackend = TritonBackend.auto
    """Norms before attention and feed-forward, with the gradient of the stream beside them; auto as for attention."""
    qkv_rope: TritonBackend = TritonBackend.auto
    """Query, key and value out of one product with rotary positions, in training; auto as for attention."""
    linear_cross_entropy: TritonBackend = TritonBackend.auto
    """The head and the loss of its logits in training; auto as for attention."""
    delta: DeltaBackend = DeltaBackend.auto
    """chunked, with kernels for TPUs (pallas_tpu) or GPUs (triton), or the reference, token by token; auto as for
    attention."""
    fused_linear: FusedLinearBackend = FusedLinearBackend.auto
    """To decode on one GPU: norm, gate and residual on the way of the products that they stand around, or (none) each
    for itself."""
    projection: Projection = Projection.plain
    """Products with weights. outputs_first: for few rows on a CPU, joined: on a GPU, weights laid out for it; decoding
    sets them there."""
    tiles: Tiles = section(Tiles)

    def sizes(self, operation: str) -> Sizes:
        """Those that are asked of the backend that is named for an operation."""
        backend = getattr(self, operation).value
        tiles = vars(self.tiles).get(backend)
        tile = None if tiles is None else vars(tiles).get(operation)
        return () if tile is None else tile.sizes

    def check(self) -> Iterator[Problem]:
        for backend, tiles in vars(self.tiles).items():
            for operation, tile in vars(tiles).items():
                named = getattr(self, operation).value
                if tile.sizes and named != backend:
                    reason = f"has sizes of a kernel that model.kernels.{operation}={named} need not take"
                    hint = f"set model.kernels.{operation}={backend}"
                    yield Problem(f"tiles.{backend}.{operation}", reason, value=dict(tile.sizes), hint=hint)
