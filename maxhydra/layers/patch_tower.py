"""Image encoder for images of different sizes: padded patches with their rows and columns (Qwen3-VL, 2025).

An image, or a step of a video, is a row of patches in the order of the blocks that become one token; its patches attend
to each other. Learned positions are interpolated to its grid. Outputs of some layers are also projected, for the first
layers of the decoder (DeepStack, Meng et al., 2024). I images, P patches of an image, N tokens of an image, B batch, T
tokens, D residual stream, E width of the encoder.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from maxhydra.config.schema import model as config
from maxhydra.layers.context import Context
from maxhydra.layers.embedding import replace_placeholders
from maxhydra.layers.encoder import Wrap, run_layers
from maxhydra.layers.image_positions import ImagePlaces, VideoSteps
from maxhydra.layers.norm import LayerNorm
from maxhydra.layers.params import ParamBuilder
from maxhydra.layers.vision import Projector, VisionSpec, VisionTower

# Segments of patches in attention.
REAL, PADDING = 1, 2


def image_places(spec: VisionSpec, tokens_BT: jax.Array, images: jax.Array) -> ImagePlaces:
    """Places of the tokens of images [B, I, P, 2 + size]; with fewer rows of images, adjacent rows share them."""
    sizes_BI2 = jnp.max(images[..., :2], axis=2).astype(jnp.int32) // spec.block_size
    is_video_BT = _is_of_video(spec, tokens_BT)
    is_audio_BT = None if spec.video_audio_id is None else tokens_BT == spec.video_audio_id
    steps = None if spec.step_positions is None else VideoSteps(is_video_BT, spec.step_positions, is_audio_BT)
    sizes_BI2 = jnp.repeat(sizes_BI2, len(tokens_BT) // len(images), axis=0)
    return ImagePlaces.of(_is_of_image(spec, tokens_BT), sizes_BI2, steps)


def _is_of_image(spec: VisionSpec, tokens_BT: jax.Array) -> jax.Array:
    """Which tokens are of an image or video."""
    return (tokens_BT == spec.placeholder_id) | _is_of_video(spec, tokens_BT)


def _is_of_video(spec: VisionSpec, tokens_BT: jax.Array) -> jax.Array:
    return tokens_BT == (-1 if spec.video_id is None else spec.video_id)


class DeepstackProjector(Projector):
    """A projector that normalizes blocks of patches instead of patches."""

    def build_norm(self, make: ParamBuilder) -> LayerNorm:
        return LayerNorm(self.spec.pooled_dim, eps=self.spec.norm_eps, dtypes=self.spec.dtypes, make=make)


class PatchTower(VisionTower):
    """A VisionTower for patches [I, P, 2 + size]: row and column from 1, 0 for padding, then pixels."""

    def __init__(self, spec: VisionSpec, make: ParamBuilder):
        super().__init__(spec, make)
        numbers = map(str, range(len(spec.deepstack)))
        self.deepstack = nnx.Dict({i: DeepstackProjector(spec, make.below("deepstack").below(i)) for i in numbers})

    def embed(self, x_BTD: jax.Array, tokens_BT: jax.Array, ctx: Context, wrap: Wrap) -> tuple[jax.Array, Context]:
        assert ctx.images is not None
        spec = self.spec
        B, count, P, size = ctx.images.shape
        features = self.features(ctx.images.reshape(B * count, P, size), ctx.for_encoder(B * count), wrap)
        shared, places = len(tokens_BT) // B, image_places(spec, tokens_BT, ctx.images)
        is_image_BT = _is_of_image(spec, tokens_BT)
        N = P // spec.block_size**2
        index_BT = places.image_BT * N + places.index_BT

        def place(x_BTD: jax.Array, features_IND: jax.Array) -> jax.Array:
            features_BND = jnp.repeat(features_IND.reshape(B, count * N, -1), shared, axis=0)
            return replace_placeholders(x_BTD, features_BND, is_image_BT, index_BT)

        own, *deepstack = features
        zeros_BTD = jnp.zeros_like(x_BTD)
        ctx = dataclasses.replace(
            ctx,
            images=None,
            **self.attention_values(is_image_BT),
            axis_positions=places.axis_positions(ctx.positions) if spec.has_axis_positions else None,
            deepstack=jnp.stack([place(zeros_BTD, each) for each in deepstack]) if deepstack else None,
        )
        return place(x_BTD, own), ctx

    @jax.named_scope("vision")
    def features(self, images: jax.Array, ctx: Context, wrap: Wrap) -> list[jax.Array]:
        """[I, N, D] tokens of the images, then those for each of the first layers of the decoder."""
        spec = self.spec
        positions_IP2 = images[..., :2].astype(jnp.int32) - 1
        is_patch_IP = positions_IP2[..., 0] >= 0
        ctx = dataclasses.replace(ctx, segments=jnp.where(is_patch_IP, REAL, PADDING))
        patches = images[..., 2:].astype(spec.dtypes.compute).reshape(*images.shape[:2], *spec.patch_shape)
        x_IPE = self.patches(patches, ctx)
        place = self._interpolate if spec.axis_positions is None else self._look_up
        x_IPE = x_IPE + place(positions_IP2).astype(x_IPE.dtype)
        x_IPE = x_IPE if self.pre_norm is None else self.pre_norm(x_IPE)
        outputs, start = [], 0
        for number, layer in enumerate(spec.deepstack):
            x_IPE = run_layers(self.layers, x_IPE, positions_IP2, ctx, wrap, layers=(start, layer + 1))
            outputs.append(self.deepstack[str(number)].project(self._pool(x_IPE), ctx))
            start = layer + 1
        x_IPE = run_layers(self.layers, x_IPE, positions_IP2, ctx, wrap, layers=(start, spec.num_layers))
        return [self.projector.project(self._pool(self.normalize(x_IPE)), ctx), *outputs]

    def _pool(self, x_IPE: jax.Array) -> jax.Array:
        """Blocks of patches, whose patches are adjacent, as one vector each."""
        if self.spec.pooling is config.Pooling.concatenate:
            return x_IPE.reshape(x_IPE.shape[0], -1, self.spec.pooled_dim)
        blocks = x_IPE.reshape(x_IPE.shape[0], -1, self.spec.block_size**2, self.spec.emb_dim)
        return jnp.mean(blocks, axis=2, dtype=jnp.float32).astype(x_IPE.dtype)

    def _look_up(self, positions_IP2: jax.Array) -> jax.Array:
        """[I, P, E] sums of the learned positions of column and row."""
        column, row = self.positions[...].astype(jnp.float32)
        at_IP2 = jnp.maximum(positions_IP2, 0)
        return column[at_IP2[..., 1]] + row[at_IP2[..., 0]]

    def _interpolate(self, positions_IP2: jax.Array) -> jax.Array:
        """[I, P, E] learned positions, interpolated bilinearly so that the corners of both grids coincide."""
        rows = self.spec.patch_rows
        last_I12 = jnp.max(positions_IP2, axis=1, keepdims=True)
        place_IP2 = jnp.maximum(positions_IP2, 0) * ((rows - 1) / jnp.maximum(last_I12, 1))
        low_IP2 = jnp.clip(jnp.floor(place_IP2).astype(jnp.int32), 0, rows - 1)
        share_IP2 = place_IP2 - low_IP2
        table, total = self.positions[...].astype(jnp.float32), 0.0
        for row in (0, 1):
            for column in (0, 1):
                offset = jnp.array([row, column])
                at_IP2 = jnp.minimum(low_IP2 + offset, rows - 1)
                weight_IP = jnp.prod(jnp.where(offset == 1, share_IP2, 1 - share_IP2), axis=-1)
                total = total + weight_IP[..., None] * table[at_IP2[..., 0] * rows + at_IP2[..., 1]]
        return jnp.asarray(total)


def build_vision_tower(spec: VisionSpec | None, make: ParamBuilder) -> VisionTower | None:
    """The image encoder of a model; None for models that take no images."""
    if spec is None:
        return None
    return VisionTower(spec, make) if spec.max_patches is None else PatchTower(spec, make)
