"""What one layer saves for its backward pass, read from a trace of the real layer.

A layer of each kind is traced once per remat policy (`jax.eval_shape`: nothing is allocated or compiled), and the
residuals of its VJP are the arrays that a step keeps. To tell which dimension is split by which mesh axis, the trace
uses sizes with a large prime factor each: batch, length, and the sizes that tensor parallelism divides (heads and
hidden sizes). A dimension that contains the prime scales with that size.
"""

import dataclasses
from functools import cache
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh

from maxhydra.config.schema import model as config
from maxhydra.config.schema.hardware import AXES, RULES
from maxhydra.config.schema.kernels import TritonBackend
from maxhydra.config.schema.quantization import Quantization
from maxhydra.kernels.dispatch import unlogged_choices
from maxhydra.layers import Context, MatmulSpec, ParamBuilder, resolve_rules
from maxhydra.layers.kv_cache import KeysValues
from maxhydra.layers.mla import Selection
from maxhydra.model.block import BlockSpec, Remat
from maxhydra.model.decoder import DecoderSpec
from maxhydra.model.fused_block import block_class
from maxhydra.sharding import Sharder
from maxhydra.sharding.mesh import AXIS_TYPES

# The batch is also a multiple of 64, as kernels require of their rows.
BATCH, TOKENS, WIDTH = 64 * 1009, 127, 1013
FLOAT32 = 4
S = TypeVar("S")


@dataclasses.dataclass(frozen=True)
class SavedArray:
    """An array kept for the backward pass: count x item bytes x batch x length^n x widths^m."""

    item_bytes: int
    count: float
    """Elements per sequence and token."""
    lengths: int
    """Dimensions that scale with the sequence length: 2 for attention logits."""
    is_split: bool
    """Whether mesh.tensor divides its width; it divides the length of all others, the residual stream."""

    def bytes(self, *, rows: float, length: int) -> float:
        """Bytes of `rows` sequences of this length on all devices of a tensor-parallel group."""
        return self.item_bytes * self.count * rows * float(length) ** self.lengths


@dataclasses.dataclass(frozen=True)
class LayerTrace:
    """Residuals of one layer kind under one remat policy, with a fused attention kernel."""

    saved: tuple[SavedArray, ...]

    def bytes(self, *, rows: float, length: int, splits: int, streams: int) -> float:
        """Bytes on one device, whose group splits widths and the length of the residual stream this many ways.

        Attention logits are left out: a fused kernel does not write them.
        """
        arrays = [array for array in self.saved if array.lengths < 2]
        wide = sum(array.bytes(rows=rows, length=length) for array in arrays if array.is_split)
        return (
            wide / splits
            + sum(array.bytes(rows=rows, length=length) for array in arrays if not array.is_split) / streams
        )


@cache
def trace_layer(model: "HashedModel", kind: str, remat: Remat, *, platform: str) -> LayerTrace:
    """Trace one layer kind under a remat policy; the kernels of a platform save other residuals than XLA."""
    wide = _widened(model.model)
    spec = DecoderSpec.of(wide, None, resolve_rules(model.quantization))
    block_spec = BlockSpec.of(wide, kind)
    graphdef, weights = _abstract_block(block_spec, spec.matmul_spec)
    rows, length, compute = BATCH, TOKENS, spec.dtypes.compute
    ctx = _context(wide, block_spec, compute, platform)

    def layer(weights: Any, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        return nnx.merge(graphdef, weights)(x_BTD, ctx).x_BTD

    run = remat.wrap(layer, in_loop=True)

    def residuals(weights: Any, x_BTD: jax.Array, ctx: Context) -> Any:
        return jax.vjp(lambda weights, x_BTD: run(weights, x_BTD, ctx), weights, x_BTD)[1]

    x_BTD = jax.ShapeDtypeStruct((rows, length, wide.stream_dim), compute)
    with unlogged_choices():
        leaves = jax.tree.leaves(jax.eval_shape(residuals, weights, x_BTD, ctx))
    arrays = [leaf for leaf in leaves if leaf.size and leaf.size % BATCH == 0 and leaf.dtype != jnp.int32]
    saved = [_saved_array(leaf) for leaf in arrays]
    return LayerTrace(tuple(saved + _kernel_outputs(block_spec, remat, compute.itemsize)))


def _kernel_outputs(spec: BlockSpec, remat: Remat, item_bytes: int) -> list[SavedArray]:
    """What a fused attention kernel saves in addition: its normalizer, and its output where XLA's is recomputed."""
    mixer: Any = spec.mixer
    heads = getattr(mixer, "num_heads", 0) // WIDTH
    is_minimal = remat.policy is config.RematPolicy.minimal
    if not heads or not (is_minimal or remat.policy is config.RematPolicy.none or "context" in remat.save):
        return []
    width = getattr(mixer, "value_dim", None) or mixer.head_dim
    output = [SavedArray(item_bytes, heads * width, 1, is_split=True)] if is_minimal else []
    return [*output, SavedArray(FLOAT32, heads, 1, is_split=True)]


def _abstract_block(spec: BlockSpec, matmul_spec: MatmulSpec) -> tuple[Any, Any]:
    """Graph definition and weight shapes of a block, with matrices in the compute dtype as the decoder passes them."""

    def build() -> Any:
        make = ParamBuilder(None, dtype=matmul_spec.compute, layers=None, matmul_spec=matmul_spec)
        return block_class(spec, matmul_spec)(spec, make.below(spec.name))

    return nnx.split(nnx.eval_shape(build))


def _context(model: config.Model, spec: BlockSpec, compute: np.dtype, platform: str) -> Context:
    """Shapes of a training context."""
    tokens: Any = jax.ShapeDtypeStruct((BATCH, TOKENS), jnp.int32)
    shared: dict[str, Any] = {}
    if source := getattr(spec.mixer, "shares", None):
        mixer: Any = BlockSpec.of(model, source).mixer
        heads: Any = jax.ShapeDtypeStruct((*tokens.shape, mixer.num_kv_heads, mixer.head_dim), compute)
        shared[source] = KeysValues(heads, heads, None)
    if source := getattr(spec.mixer, "indexer_of", None):
        shared[source] = Selection()
    per_layer: Any = None
    if spec.per_layer is not None:
        per_layer = jax.ShapeDtypeStruct((*tokens.shape, spec.per_layer.dim), compute)
    return Context(
        positions=tokens,
        segments=tokens,
        sharder=Sharder(_one_device(platform), RULES),
        cache=None,
        dropout_key=None,
        layer_input=per_layer,
        tokens=tokens if model.reads_tokens else None,
        shared=shared,
    )


def _one_device(platform: str) -> AbstractMesh:
    device = AbstractDevice(device_kind=platform, num_cores=None, platform=platform)
    return AbstractMesh((1,) * len(AXES), AXES, axis_types=AXIS_TYPES, abstract_device=device)


def _saved_array(leaf: jax.ShapeDtypeStruct) -> SavedArray:
    size, lengths = leaf.size // BATCH, 0
    while size % TOKENS == 0:
        size, lengths = size // TOKENS, lengths + 1
    is_split = size % WIDTH == 0
    while size % WIDTH == 0:
        size //= WIDTH
    # A recurrent layer pads the length to whole chunks, so that its states do not contain the prime.
    return SavedArray(leaf.dtype.itemsize, size if lengths else size / TOKENS, max(lengths, 1), is_split)


def _widened(model: config.Model) -> config.Model:
    """The model with every size that mesh.tensor divides multiplied by the prime."""

    def scale(section: S, *names: str) -> S:
        values = {name: getattr(section, name) for name in names}
        return dataclasses.replace(section, **{name: size * WIDTH for name, size in values.items() if size})  # type: ignore[type-var]

    def scale_kind(kind: config.Kind) -> config.Kind:
        moe = dataclasses.replace(scale(kind.moe, "dim"), shared=scale(kind.moe.shared, "dim"))
        return dataclasses.replace(
            kind,
            attention=scale(kind.attention, "num_heads", "num_kv_heads"),
            delta=scale(kind.delta, "num_key_heads", "num_value_heads"),
            mlp=scale(kind.mlp, "dim"),
            moe=moe,
        )

    kinds = {name: scale_kind(kind) for name, kind in model.kinds.items()}
    # Kernels that save what their XLA form saves, or that are accounted for in LayerTrace.
    kernels = dataclasses.replace(
        model.kernels,
        attention=config.AttentionBackend.xla,
        grouped_matmul=config.GroupedMatmulBackend.xla,
        qkv_rope=TritonBackend.reference,
    )
    return dataclasses.replace(scale(model, "num_heads", "num_kv_heads", "mlp_dim"), kinds=kinds, kernels=kernels)


@dataclasses.dataclass(frozen=True, eq=False)
class HashedModel:
    """A model config as a cache key: compared by identity."""

    model: config.Model
    quantization: Quantization | None = None
