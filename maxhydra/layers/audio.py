"""Audio encoder and projector: log-mel frames to embeddings of audio tokens.

Frames are cut into chunks. Three convolutions with stride 2 turn a chunk into tokens, whose sinusoidal positions start
again in each chunk; the layers are those of a Whisper encoder (Radford et al., 2022) and attend within windows of
chunks. Every clip is encoded as if it were alone. I clips, J chunks of a clip, F frames of a chunk, M mel bands, C
channels, K tokens of a chunk, N tokens of a clip, W windows of all clips, P tokens of a window, E width of the encoder,
B batch, T tokens, D residual stream.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from maxhydra.config.schema import model as config
from maxhydra.config.schema.audio import NUM_CONVOLUTIONS, halve
from maxhydra.layers.context import Context
from maxhydra.layers.embedding import replace_placeholders, sinusoids
from maxhydra.layers.encoder import EncoderLayer, EncoderSpec, Wrap, encoder_values, run_layers
from maxhydra.layers.mlp import apply_activation
from maxhydra.layers.norm import LayerNorm
from maxhydra.layers.params import ParamBuilder

# Height and width of the convolutions' kernels.
KERNEL = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class AudioSpec(EncoderSpec):
    """Sizes and options of encoder and projector, resolved from the config."""

    num_bands: int
    chunk_frames: int
    window_chunks: int
    conv_dim: int

    @classmethod
    def of(cls, model: config.Model) -> "AudioSpec | None":
        """None for models that take no audio."""
        section = model.audio
        if section.num_layers is None:
            return None
        return cls(
            **encoder_values(section, model),
            num_bands=section.num_bands,
            chunk_frames=section.chunk_frames,
            window_chunks=section.window_chunks,
            conv_dim=section.conv_dim,
        )

    @property
    def chunk_tokens(self) -> int:
        return halve(self.chunk_frames, NUM_CONVOLUTIONS)


class Convolution(nnx.Module):
    """activation(conv(x)) with stride 2 over bands and frames."""

    def __init__(self, spec: AudioSpec, channels: int, make: ParamBuilder):
        self.spec = spec
        inputs, axes = (channels, KERNEL, KERNEL), (None, None, None, "embed")
        std = spec.init_scale * math.prod(inputs) ** -0.5
        self.kernel = make.matrix(inputs, (spec.conv_dim,), axes, std=std)
        self.bias = make.zeros((spec.conv_dim,), ("embed",))

    def __call__(self, x_JMFC: jax.Array) -> jax.Array:
        out_JMFC = convolve_by_2(x_JMFC, self.kernel[...])
        return apply_activation(config.Activation.gelu, out_JMFC + self.bias[...].astype(out_JMFC.dtype))


def convolve_by_2(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolution of [batch, rows, columns, channels] with stride 2, kernel [channels, 3, 3, outputs] and padding 1."""
    return jax.lax.conv_general_dilated(
        x,
        kernel.astype(x.dtype),
        window_strides=(2, 2),
        padding=((1, 1), (1, 1)),
        dimension_numbers=("NHWC", "IHWO", "NHWC"),
    )


class AudioProjector(nnx.Module):
    """out(activation(hidden(x))): vectors of the residual stream."""

    def __init__(self, spec: AudioSpec, make: ParamBuilder):
        self.spec = spec
        E, scale = spec.emb_dim, spec.init_scale
        self.hidden = make.projection("hidden", (E,), (E,), ("embed", "mlp"), scale=scale, has_bias=True)
        self.out = make.projection("out", (E,), (spec.out_dim,), ("mlp", "embed"), scale=scale, has_bias=True)

    def __call__(self, x_INE: jax.Array, ctx: Context) -> jax.Array:
        return self.out(apply_activation(self.spec.mlp.activation, self.hidden(x_INE, ctx)), ctx)


class ClipTower(nnx.Module):
    """An encoder of clips, whose outputs replace the embeddings of placeholders."""

    spec: EncoderSpec

    def embed(self, x_BTD: jax.Array, tokens_BT: jax.Array, ctx: Context, wrap: Wrap) -> tuple[jax.Array, Context]:
        """Token embeddings with those of placeholders replaced, in order, by the tokens of the row's clips.

        Also returns the context of the decoder's layers. `wrap`: rematerialization of a layer.
        """
        assert ctx.audio is not None
        frames, lengths = ctx.audio
        B, count, *shape = frames.shape
        features_IND = self(frames.reshape(B * count, *shape), lengths.reshape(-1), ctx, wrap)
        N = features_IND.shape[1]
        is_token_BN = (jnp.arange(N) < self.num_tokens(lengths)[:, :, None]).reshape(B, -1)
        features_BND = jnp.where(is_token_BN[:, :, None], features_IND.reshape(B, count * N, -1), jnp.nan)
        # Tokens of all clips in order, without the padding after each clip.
        order_BN = jnp.argsort(~is_token_BN, axis=1, stable=True)
        features_BND = jnp.take_along_axis(features_BND, order_BN[:, :, None], axis=1)
        x_BTD = replace_placeholders(x_BTD, features_BND, tokens_BT == self.spec.placeholder_id)
        return x_BTD, dataclasses.replace(ctx, audio=None)

    def __call__(self, frames: jax.Array, lengths_I: jax.Array, ctx: Context, wrap: Wrap) -> jax.Array:
        """[I, N, D] tokens of clips [I, frames, bands], of which `lengths_I` frames are real; padding follows."""
        raise NotImplementedError

    def num_tokens(self, lengths: jax.Array) -> jax.Array:
        """Tokens of clips of these lengths, as `config.Audio.num_tokens` counts them."""
        raise NotImplementedError


class AudioTower(ClipTower):
    """projector(norm(layers(chunks(convolutions(frames)) + positions)))."""

    spec: AudioSpec

    def __init__(self, spec: AudioSpec, make: ParamBuilder):
        self.spec = spec
        E, C, bands = spec.emb_dim, spec.conv_dim, halve(spec.num_bands, NUM_CONVOLUTIONS)
        channels = (1, *[C] * (NUM_CONVOLUTIONS - 1))
        self.convolutions = nnx.Dict({str(i): Convolution(spec, count, make) for i, count in enumerate(channels)})
        self.chunks = make.projection("chunks", (C, bands), (E,), (None, None, "embed"), scale=spec.init_scale)
        self.layers = EncoderLayer(spec, make.stacked(spec.num_layers).below("audio"))
        self.norm = LayerNorm(E, eps=spec.norm_eps, dtypes=spec.dtypes, make=make)
        self.projector = AudioProjector(spec, make.below("projector"))

    @jax.named_scope("audio")
    def __call__(self, frames: jax.Array, lengths_I: jax.Array, ctx: Context, wrap: Wrap) -> jax.Array:
        spec, I, K = self.spec, len(frames), self.spec.chunk_tokens
        count = -(-frames.shape[1] // spec.chunk_frames)
        window = min(count, spec.window_chunks)
        J = -(-count // window) * window
        frames = jnp.pad(frames, ((0, 0), (0, J * spec.chunk_frames - frames.shape[1]), (0, 0)))
        x_WPE = self._embed_chunks(frames, lengths_I, ctx.for_encoder(I * J)).reshape(-1, window * K, spec.emb_dim)
        is_token_IN = jnp.arange(J * K) < self.num_tokens(lengths_I)[:, None]
        segments_WP = is_token_IN.reshape(-1, window * K).astype(jnp.int32)
        encoder_ctx = dataclasses.replace(ctx.for_encoder(len(x_WPE)), segments=segments_WP)
        x_WPE = run_layers(self.layers, x_WPE, None, encoder_ctx, wrap)
        features_WPD = self.projector(self.norm(x_WPE), encoder_ctx)
        return features_WPD.reshape(I, J * K, -1)

    def _embed_chunks(self, frames: jax.Array, lengths_I: jax.Array, ctx: Context) -> jax.Array:
        """[I * J, K, E] tokens of chunks, with their positions.

        A clip that is shorter than a chunk is convolved at its own length; the last chunk of a longer clip is padded
        with zeros to a whole one.
        """
        spec, (_, total, M) = self.spec, frames.shape
        is_real_I = jnp.arange(total) < lengths_I[:, None]
        frames = jnp.where(is_real_I[:, :, None], frames, 0).astype(spec.dtypes.compute)
        x = frames.reshape(-1, spec.chunk_frames, M).swapaxes(1, 2)[..., None]
        ends = jnp.repeat(jnp.minimum(lengths_I, spec.chunk_frames), total // spec.chunk_frames)
        for index in range(NUM_CONVOLUTIONS):
            x, ends = self.convolutions[str(index)](x), halve(ends, 1)
            x = jnp.where((jnp.arange(x.shape[2]) < ends[:, None])[:, None, :, None], x, 0)
        x_JKE = self.chunks(x.transpose(0, 2, 3, 1), ctx)
        return x_JKE + sinusoids(jnp.arange(spec.chunk_tokens)[None], spec.emb_dim).astype(x_JKE.dtype)

    def num_tokens(self, lengths: jax.Array) -> jax.Array:
        chunks, rest = lengths // self.spec.chunk_frames, lengths % self.spec.chunk_frames
        return chunks * self.spec.chunk_tokens + halve(rest, NUM_CONVOLUTIONS)
