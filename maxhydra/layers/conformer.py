"""Conformer encoder of audio (Gulati et al., 2020; Zhang et al., 2023: USM), which sees no later frames.

Convolutions with stride 2 turn log-mel frames into tokens. A layer is half a feed-forward, attention to a window of
earlier tokens, a depthwise convolution and half a feed-forward. Attention logits depend on the distance of query and
key (Dai et al., 2019). I clips, F frames, M mel bands, C channels, N tokens of a clip, E width of the encoder, A
attention heads of size H, W window, X blocks of W tokens, Q queries and K keys of a block.
"""

import dataclasses
import math
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxhydra.config.schema import model as config
from maxhydra.config.schema.audio import AudioEncoder, halve
from maxhydra.layers.audio import AudioSpec, AudioTower, ClipTower, convolve_by_2
from maxhydra.layers.clipped_linear import build_mlp, build_projection
from maxhydra.layers.context import Context
from maxhydra.layers.embedding import sinusoids
from maxhydra.layers.encoder import EncoderSpec, Wrap, build_norm, encoder_values, run_layers
from maxhydra.layers.mlp import apply_activation
from maxhydra.layers.norm import LayerNorm, PlainNorm
from maxhydra.layers.params import ParamBuilder
from maxhydra.layers.short_convolution import ShortConvolution

# Factor on both feed-forwards of a layer.
HALF = 0.5
# Logit of a key that a query does not see.
HIDDEN_LOGIT = -1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConformerSpec(EncoderSpec):
    """Sizes and options of encoder and projector, resolved from the config."""

    num_bands: int
    conv_dims: tuple[int, ...]
    kernel_size: int
    window: int
    softcap: float
    hidden_dim: int

    @classmethod
    def of(cls, model: config.Model) -> "ConformerSpec":
        section = model.audio.conformer
        return cls(
            **encoder_values(model.audio, model),
            num_bands=model.audio.num_bands,
            conv_dims=tuple(section.conv_dims),
            kernel_size=section.kernel_size,
            window=section.window,
            softcap=section.softcap,
            hidden_dim=section.hidden_dim,
        )


class NormedConvolution(nnx.Module):
    """relu(norm(conv(x))) with stride 2 over frames and bands."""

    def __init__(self, spec: ConformerSpec, channels: tuple[int, int], make: ParamBuilder):
        inputs = (channels[0], 3, 3)
        std = spec.init_scale * math.prod(inputs) ** -0.5
        self.kernel = make.matrix(inputs, channels[1:], (None, None, None, "embed"), std=std)
        self.norm = LayerNorm(channels[1], eps=spec.norm_eps, dtypes=spec.dtypes, make=make, has_bias=False)

    def __call__(self, x_IFMC: jax.Array) -> jax.Array:
        convolved = convolve_by_2(x_IFMC, self.kernel[...])
        return apply_activation(config.Activation.relu, self.norm(convolved))


class HalfStepMlp(nnx.Module):
    """x + norm(mlp(norm(x))) / 2."""

    def __init__(self, spec: ConformerSpec, make: ParamBuilder):
        self.norm, self.out_norm = build_norm(spec, make), build_norm(spec, make)
        self.mlp = build_mlp(spec.mlp, make.below("mlp"), is_clipped=spec.is_clipped)

    def __call__(self, x_INE: jax.Array, ctx: Context) -> jax.Array:
        return x_INE + HALF * self.out_norm(self.mlp(self.norm(x_INE), ctx).out_BTD)


class WindowAttention(nnx.Module):
    """Attention of each token to itself and the W - 1 before it, with learned scales of the query's features."""

    def __init__(self, spec: ConformerSpec, make: ParamBuilder):
        self.spec = spec
        E, A = spec.emb_dim, spec.num_heads
        H, axes = E // A, ("embed", "heads", "head_dim")
        inner = partial(build_projection, make, has_bias=False, is_clipped=spec.is_clipped)
        self.query = inner("query", (E,), (A, H), axes, scale=spec.init_scale)
        self.key = inner("key", (E,), (A, H), axes, scale=spec.init_scale)
        self.value = inner("value", (E,), (A, H), axes, scale=spec.init_scale)
        self.out = inner("out", (A, H), (E,), ("heads", "head_dim", "embed"), scale=spec.mlp.out_scale)
        self.distance = make.projection("distance", (E,), (A, H), axes, scale=spec.init_scale)
        self.query_scale = make.zeros((H,), ("norm",))

    def __call__(self, x_INE: jax.Array, ctx: Context) -> jax.Array:
        W, (I, N, _) = self.spec.window, x_INE.shape
        x_padded = jnp.pad(x_INE, ((0, 0), (0, -N % W), (0, 0)))
        q, k, v = (self._blocks(projection(x_padded, ctx), ctx) for projection in (self.query, self.key, self.value))
        # The scale of a query is 1 / sqrt(H) at a parameter of 0, whose softplus is ln(2).
        scale_H = jax.nn.softplus(self.query_scale[...].astype(jnp.float32)) / math.log(2)
        q = q * scale_H * q.shape[-1] ** -0.5
        k = k * (math.log(1 + math.e) / math.log(2))
        logits = jnp.einsum("IXQAH,IXKAH->IXAQK", q, _with_block_before(k)) + self._distance_logits(q, ctx)
        logits = self.spec.softcap * jnp.tanh(logits / self.spec.softcap)
        weights = jax.nn.softmax(jnp.where(self._is_visible(q.shape[1])[:, None], logits, HIDDEN_LOGIT), axis=-1)
        attended = jnp.einsum("IXAQK,IXKAH->IXQAH", weights, _with_block_before(v))
        attended_INAH = attended.reshape(I, -1, *attended.shape[-2:])[:, :N].astype(x_INE.dtype)
        return self.out(attended_INAH, ctx)

    def _blocks(self, heads_INAH: jax.Array, ctx: Context) -> jax.Array:
        """[I, X, W, A, H] heads in float32."""
        heads_INAH = ctx.constrain(heads_INAH, "act_batch", None, "act_heads", None)
        I, N, A, H = heads_INAH.shape
        return heads_INAH.astype(jnp.float32).reshape(I, N // self.spec.window, self.spec.window, A, H)

    def _distance_logits(self, q: jax.Array, ctx: Context) -> jax.Array:
        """[I, X, A, Q, K] logits of queries and the projected sinusoids of the distances to keys."""
        W = self.spec.window
        positions_1WE = sinusoids(jnp.arange(W)[None], self.spec.emb_dim).astype(self.spec.dtypes.compute)
        by_distance = jnp.einsum("IXQAH,WAH->IXAQW", q, self.distance(positions_1WE, ctx)[0].astype(jnp.float32))
        return by_distance[..., np.arange(W)[:, None], np.clip(_distances(W), 0, W - 1)]

    def _is_visible(self, blocks: int) -> np.ndarray:
        """[X, Q, K] keys that each query sees; the first block has none before it."""
        W = self.spec.window
        distances_QK = _distances(W)
        is_near_QK = (distances_QK >= 0) & (distances_QK < W)
        is_key_XK = (np.arange(blocks)[:, None] > 0) | (np.arange(2 * W) >= W)
        return is_near_QK & is_key_XK[:, None]


def _distances(window: int) -> np.ndarray:
    """[Q, K] distances of the queries of a block to the keys of the block before it, then of the same block."""
    return np.arange(window)[:, None] + window - np.arange(2 * window)


def _with_block_before(x: jax.Array) -> jax.Array:
    """[I, X, 2 W, A, H] each block behind the one before it."""
    before = jnp.pad(x, ((0, 0), (1, 0), *[(0, 0)] * 3))[:, :-1]
    return jnp.concatenate([before, x], axis=2)


class ConvolutionBlock(nnx.Module):
    """x + out(activation(norm(filter(glu(up(norm(x))))))), where the filter is depthwise and causal."""

    def __init__(self, spec: ConformerSpec, make: ParamBuilder):
        self.spec, E = spec, spec.emb_dim
        inner = partial(build_projection, make, has_bias=False, is_clipped=spec.is_clipped)
        self.norm, self.filter_norm = build_norm(spec, make), build_norm(spec, make)
        self.up = inner("up", (E,), (2 * E,), ("embed", "mlp"), scale=spec.init_scale)
        self.filter = ShortConvolution((E,), ("embed",), taps=spec.kernel_size, make=make, is_activated=False)
        self.out = inner("out", (E,), (E,), ("mlp", "embed"), scale=spec.mlp.out_scale)

    def __call__(self, x_INE: jax.Array, ctx: Context) -> jax.Array:
        values, gates = jnp.split(self.up(self.norm(x_INE), ctx), 2, axis=-1)
        gated_INE = values * apply_activation(config.Activation.sigmoid, gates)
        filtered_INE, _ = self.filter(gated_INE, None, None, ctx.place)
        return x_INE + self.out(apply_activation(self.spec.mlp.activation, self.filter_norm(filtered_INE)), ctx)


class ConformerLayer(nnx.Module):
    """norm(half(convolution(attend(half(x))))), where attend(x) = x + norm(attention(norm(x)))."""

    def __init__(self, spec: ConformerSpec, make: ParamBuilder):
        self.spec = spec
        norm = partial(build_norm, spec, make)
        self.first, self.last = (HalfStepMlp(spec, make.below(name)) for name in ("first", "last"))
        self.attention_norm, self.attention_out_norm, self.norm = norm(), norm(), norm()
        self.attention = WindowAttention(spec, make.below("attention"))
        self.convolution = ConvolutionBlock(spec, make.below("convolution"))

    def __call__(self, x_INE: jax.Array, positions: None, ctx: Context) -> jax.Array:
        x_INE = self.first(x_INE, ctx)
        x_INE = x_INE + self.attention_out_norm(self.attention(self.attention_norm(x_INE), ctx))
        return self.norm(self.last(self.convolution(x_INE, ctx), ctx))


class ConformerProjector(nnx.Module):
    """out(norm(hidden(x))): vectors of the residual stream."""

    def __init__(self, spec: ConformerSpec, make: ParamBuilder):
        E, F, scale = spec.emb_dim, spec.hidden_dim, spec.init_scale
        self.hidden = make.projection("hidden", (E,), (F,), ("embed", "mlp"), scale=scale, has_bias=True)
        self.norm = PlainNorm(eps=spec.norm_eps, dtypes=spec.dtypes)
        self.out = make.projection("out", (F,), (spec.out_dim,), ("mlp", "embed"), scale=scale)

    def __call__(self, x_INE: jax.Array, ctx: Context) -> jax.Array:
        return self.out(self.norm(self.hidden(x_INE, ctx)), ctx)


class ConformerTower(ClipTower):
    """projector(layers(tokens(convolutions(frames))))."""

    spec: ConformerSpec

    def __init__(self, spec: ConformerSpec, make: ParamBuilder):
        self.spec = spec
        dims = (1, *spec.conv_dims)
        pairs = enumerate(pairwise(dims))
        self.convolutions = nnx.Dict({str(i): NormedConvolution(spec, pair, make) for i, pair in pairs})
        inputs = (halve(spec.num_bands, len(spec.conv_dims)), dims[-1])
        self.tokens = make.projection("tokens", inputs, (spec.emb_dim,), (None, None, "embed"), scale=spec.init_scale)
        self.layers = ConformerLayer(spec, make.stacked(spec.num_layers).below("audio"))
        self.projector = ConformerProjector(spec, make.below("projector"))

    @jax.named_scope("audio")
    def __call__(self, frames: jax.Array, lengths_I: jax.Array, ctx: Context, wrap: Wrap) -> jax.Array:
        ctx = ctx.for_encoder(len(frames))
        x, ends = frames.astype(self.spec.dtypes.compute)[..., None], lengths_I
        for index in range(len(self.spec.conv_dims)):
            is_real_IF = jnp.arange(x.shape[1]) < ends[:, None]
            x, ends = self.convolutions[str(index)](jnp.where(is_real_IF[:, :, None, None], x, 0)), halve(ends, 1)
        x_INE = run_layers(self.layers, self.tokens(x, ctx), None, ctx, wrap)
        return self.projector(x_INE, ctx)

    def num_tokens(self, lengths: jax.Array) -> jax.Array:
        count: jax.Array = halve(lengths, len(self.spec.conv_dims))
        return count


def audio_spec(model: config.Model) -> AudioSpec | ConformerSpec | None:
    """The audio encoder of a model; None for models that take no audio."""
    is_conformer = model.audio.num_layers is not None and model.audio.encoder is AudioEncoder.conformer
    return ConformerSpec.of(model) if is_conformer else AudioSpec.of(model)


def build_audio_tower(spec: AudioSpec | ConformerSpec | None, make: ParamBuilder) -> ClipTower | None:
    """The audio encoder of a model; None for models that take no audio."""
    if isinstance(spec, ConformerSpec):
        return ConformerTower(spec, make)
    return None if spec is None else AudioTower(spec, make)
