"""Schema of the image encoder and its projector."""

import math
from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Schema, option, schema, section
from maxhydra.config.errors import Problem
from maxhydra.config.schema.feed_forward import Activation

MAX_IMAGE = 2**14
MAX_TILES = 256


class EncoderNorm(Enum):
    layer = "layer"
    rms = "rms"


class Pooling(Enum):
    average = "average"
    concatenate = "concatenate"


@schema
class Projector(Schema):
    """The map from patches of an image to its tokens: pooling of square blocks, RMSNorm, hidden layers, projection."""

    pooling: Pooling = Pooling.average
    """How a block of patches becomes one token: their mean, or their concatenation (pixel shuffle)."""
    tokens: int = option(196, ge=1, le=MAX_IMAGE)
    """Tokens of an image or a tile, a square number; patches form as many square blocks."""
    scaled: bool = False
    """Whether pooled patches are multiplied by the root of vision.emb_dim."""
    standardized: bool = False
    """Whether a vector is subtracted from pooled patches and the result multiplied by another; both are loaded with the
    weights and not trained."""
    norm: bool = True
    """Whether RMSNorm is applied to the pooled patches."""
    norm_scale: bool = True
    """Whether that RMSNorm has a learned scale."""
    bias: bool = False
    """Whether the hidden layers and the last projection have a bias."""
    hidden_dims: list[int] = option([], ge=1, le=MAX_WIDTH)
    """Sizes of hidden layers between pooling and the last projection, each with an activation; []: none."""
    activation: Activation = Activation.gelu
    """Activation of the hidden layers."""


@schema
class Tiles(Schema):
    """Images as square tiles of image_size, then the whole image as one more; small images are one tile."""

    max_tiles: int | None = option(None, ge=1, le=MAX_TILES)
    """Most tiles of an image, without that of the whole image; null: images are resized to one square."""
    column_id: int | None = option(None, ge=0)
    """Token between two tiles of a row; null: none."""
    row_id: int | None = option(None, ge=0)
    """Token after each row of tiles; null: none."""
    whole_id: int | None = option(None, ge=0)
    """Token before the tile of the whole image; null: none."""

    @property
    def squares(self) -> int:
        """Most squares of image_size that an image has."""
        return 1 if self.max_tiles in (None, 1) else self.max_tiles + 1


@schema
class EncoderLayers(Schema):
    """Layers of the image encoder: x + attention(norm(x)), then x + mlp(norm(x))."""

    norm: EncoderNorm = EncoderNorm.layer
    """LayerNorm, or RMSNorm without a bias."""
    sandwich: bool = False
    """Whether the outputs of attention and feed-forward are normalized too, before they are added."""
    qkv_norm: bool = False
    """Whether RMSNorm is applied to each head of queries, keys and values, the last without a scale. Attention logits
    are then not divided by the root of the head size."""
    gated: bool = False
    """Whether the feed-forward has a gate (Shazeer, 2020)."""
    bias: bool = True
    """Whether the projections of attention and feed-forward have a bias."""
    clipped: bool = False
    """Whether inputs and outputs of these projections are clipped to bounds that are loaded with the weights and not
    trained; requires bias=false."""

    def check(self) -> Iterator[Problem]:
        if self.clipped and self.bias:
            yield Problem("bias", "is not supported with clipped", value=True, accepted="false")


class Timestamps(Enum):
    seconds = "seconds"
    minutes = "minutes"
    none = "none"


@schema
class Videos(Schema):
    """Frames of a video: sampled in time, and resized together. Defaults are those of Qwen3-VL."""

    fps: float | None = option(2.0, gt=0, le=1000)
    """Sampled frames per second of video; null: max_frames, or all frames of a shorter video, which requires
    vision.fill_patches."""
    min_frames: int = option(4, ge=1, le=4096)
    """Minimum of sampled frames; shorter videos have all of theirs."""
    max_frames: int = option(768, ge=1, le=4096)
    """Maximum of sampled frames."""
    min_patches: int = option(512, ge=1, le=2**24)
    """Smaller videos are scaled up to about this many patches of all sampled frames together."""
    max_patches: int = option(3072, ge=1, le=2**24)
    """Larger videos are scaled down to this many patches of all sampled frames together."""
    per_frame: bool = False
    """Whether min_patches and max_patches are those of one frame, not of all together. The sampled frames are then the
    first of equal shares of the video; otherwise its first and last frame are among them. With vision.fill_patches,
    which requires it, every frame has the largest size within max_patches."""
    timestamps: Timestamps = Timestamps.seconds
    """Text before each step of a video: seconds (`<0.3 seconds>`), minutes (`00:03`), or none. Without it, the tokens
    around an image are around the whole video."""
    positions_per_second: int | None = option(None, ge=1, le=1000)
    """Positions of RoPE's time axis per second of video, by fps: the steps of a video then share their rows and
    columns. Requires fps and timestamps=none. null: each step has the positions of an image."""
    use_audio_in_video: bool = False
    """Whether a video is read with its audio track, whose tokens are between its steps by their time. Requires
    positions_per_second, the positions of a second of audio, and model.audio with begin_id and end_id."""

    def check(self) -> Iterator[Problem]:
        if (low := self.min_frames) > self.max_frames:
            reason = f"is less than min_frames={low}"
            yield Problem("max_frames", reason, value=self.max_frames, accepted=f"{low} or more")
        if self.positions_per_second is not None and self.timestamps is not Timestamps.none:
            reason = f"separates the steps of a video, which positions_per_second={self.positions_per_second} places"
            yield Problem("timestamps", reason, value=self.timestamps.value, accepted="none")
        if self.positions_per_second is not None and self.fps is None:
            reason = f"is needed with positions_per_second={self.positions_per_second}"
            yield Problem("fps", reason, value=None, accepted="a number above 0")
        if self.use_audio_in_video and self.positions_per_second is None:
            reason = "is needed with use_audio_in_video, which places audio between the steps of a video by time"
            yield Problem("positions_per_second", reason, value=None, accepted="a whole number from 1")


@schema
class Vision(Schema):
    """Images in the prompt: a vision transformer (Dosovitskiy et al., 2021) whose outputs replace token embeddings."""

    num_layers: int | None = option(None, ge=1, le=MAX_LAYERS)
    """Layers of the image encoder; null: the model takes no images."""
    image_size: int = option(224, ge=1, le=MAX_IMAGE)
    """Height and width of images, or of their tiles, in pixels."""
    patch_size: int = option(16, ge=1, le=MAX_IMAGE)
    """Height and width of a patch in pixels; divides image_size."""
    max_patches: int | None = option(None, ge=1, le=2**20)
    """Maximum patches of an image: images keep their aspect ratio, are scaled down to at most this many patches, and
    have as many tokens as blocks of patches. image_size is then the size of the learned positions, which are
    interpolated, and projector.tokens its tokens. null: all images are squares of image_size."""
    min_patches: int = option(1, ge=1, le=2**20)
    """max_patches: smaller images are scaled up to about this many patches."""
    fill_patches: bool = False
    """max_patches: whether all images are scaled to the largest size of at most max_patches; min_patches has then no
    effect."""
    axis_positions: int | None = option(None, ge=1, le=2**20)
    """max_patches: learned positions of rows, and as many of columns, whose sum is added to a patch. null: one for
    each patch of a square of image_size, interpolated."""
    frames: int = option(1, ge=1, le=64)
    """max_patches: frames of a patch; an image is repeated for all of them."""
    emb_dim: int = option(768, ge=1, le=MAX_WIDTH)
    """Width of the encoder."""
    mlp_dim: int = option(3072, ge=1, le=MAX_WIDTH)
    """Hidden size of the encoder's feed-forward."""
    num_heads: int = option(12, ge=1, le=MAX_HEADS)
    """Attention heads of the encoder; divides vision.emb_dim."""
    activation: Activation = Activation.gelu_tanh
    """Activation of the encoder's feed-forward."""
    norm_eps: float = option(1e-6, gt=0)
    """Added to the variance or the mean square in the norms of encoder and projector."""
    patch_bias: bool = True
    """Whether the projection of patches has a bias."""
    class_token: bool = False
    """Whether a learned class token follows the patches (Dosovitskiy et al., 2021); it has no token in the decoder."""
    rope_theta: float | None = option(None, gt=0)
    """Base of the frequencies of RoPE over column and row of a patch, in addition to learned positions; null: none."""
    pre_norm: bool = False
    """Whether a norm precedes the layers of the encoder."""
    final_norm: bool = True
    """Whether a norm follows the layers of the encoder."""
    layers: EncoderLayers = section(EncoderLayers)
    projector: Projector = section(Projector)
    tiles: Tiles = section(Tiles)
    bidirectional: bool = False
    """Whether the tokens of an image attend to each other in both directions."""
    causal_without_window: bool = False
    """bidirectional: whether layers without a window stay causal."""
    deepstack: list[int] = option([], ge=0, le=MAX_LAYERS)
    """max_patches: encoder layers, from 0, whose outputs are also projected and added to the residual stream of image
    tokens, those of the first after the first layer of the decoder and so on (DeepStack, Meng et al., 2024). As many
    layers must be in model.prefix."""
    placeholder_id: int | None = option(None, ge=0)
    """Placeholder of one image token; needed if num_layers is set."""
    video_id: int | None = option(None, ge=0)
    """max_patches: placeholder of one token of a video; null: no videos."""
    videos: Videos = section(Videos)
    begin_id: int | None = option(None, ge=0)
    """Token before the tokens of an image; null: none."""
    end_id: int | None = option(None, ge=0)
    """Token after the tokens of an image; null: none."""
    separator: str = ""
    """Text before and after the tokens of each image, such as line breaks."""

    @property
    def token_ids(self) -> dict[str, int | None]:
        """Path of each token of images -> its id."""
        tiles = {f"tiles.{name}": getattr(self.tiles, name) for name in ("column_id", "row_id", "whole_id")}
        names = ("placeholder_id", "video_id", "begin_id", "end_id")
        return {name: getattr(self, name) for name in names} | tiles

    @property
    def patch_rows(self) -> int:
        """Rows and columns of patches."""
        return self.image_size // self.patch_size

    @property
    def block_size(self) -> int:
        """Rows and columns of the patches of a token."""
        return self.patch_rows // self.token_rows

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Shape of an image as models take it: pixels, or patches.

        A patch is its row and column, from 1 and 0 for padding, then its pixels: channel, frame, row, column.
        """
        if self.max_patches is None:
            return self.image_size, self.image_size, 3
        return self.max_patches, 2 + 3 * self.frames * self.patch_size**2

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Placeholders of one image or video token."""
        return tuple(token for token in (self.placeholder_id, self.video_id) if token is not None)

    @property
    def step_positions(self) -> int | None:
        """Positions of RoPE's time axis from a step of a video to the next; None: a step has those of an image."""
        rate, fps = self.videos.positions_per_second, self.videos.fps
        return None if self.video_id is None or rate is None or fps is None else round(rate * self.frames / fps)

    @property
    def token_rows(self) -> int:
        """Rows and columns of the tokens of an image."""
        return math.isqrt(self.projector.tokens)

    def check(self) -> Iterator[Problem]:
        if self.num_layers is None:
            return
        if self.placeholder_id is None:
            reason = "is needed by models with an image encoder"
            yield Problem("placeholder_id", reason, value=None, accepted="the id of a token")
        if self.image_size % self.patch_size:
            reason = f"does not divide image_size={self.image_size}"
            yield Problem("patch_size", reason, value=self.patch_size, accepted=_divisors(self.image_size))
        if self.emb_dim % self.num_heads:
            reason = f"does not divide vision.emb_dim={self.emb_dim}"
            yield Problem("num_heads", reason, value=self.num_heads, accepted=_divisors(self.emb_dim))
        elif self.rope_theta is not None and self.emb_dim // self.num_heads % 4:
            reason = (
                f"gives heads of {self.emb_dim // self.num_heads}, which RoPE over two coordinates cannot divide by 4"
            )
            accepted = f"heads of a multiple of 4 in vision.emb_dim={self.emb_dim}, or rope_theta=null"
            yield Problem("num_heads", reason, value=self.num_heads, accepted=accepted)
        rows = self.patch_rows
        squares = [number**2 for number in range(1, rows + 1) if rows % number == 0]
        if self.projector.tokens not in squares:
            reason = f"does not divide the {rows} x {rows} patches of an image into equal squares"
            accepted = ", ".join(map(str, squares))
            yield Problem("projector.tokens", reason, value=self.projector.tokens, accepted=accepted)
            return
        yield from self._check_patches()

    def _check_patches(self) -> Iterator[Problem]:
        """Options of images with different sizes."""
        if self.max_patches is None:
            return
        for name, is_used in {"class_token": self.class_token, "tiles.max_tiles": self.tiles.max_tiles}.items():
            if is_used:
                accepted = "null" if name.startswith("tiles") else "false"
                yield Problem(name, "is not supported with max_patches", value=is_used, accepted=accepted)
        if self.max_patches < (least := max(self.min_patches, self.block_size**2)):
            reason = f"is less than the {least} patches of the smallest image"
            yield Problem("max_patches", reason, value=self.max_patches, accepted=f"{least} or more")
        longest = self.max_patches // self.block_size
        if self.axis_positions is not None and self.axis_positions < longest:
            reason = f"is less than the {longest} patches of the longest side of an image"
            yield Problem("axis_positions", reason, value=self.axis_positions, accepted=f"{longest} or more")
        assert self.num_layers is not None
        if sorted(set(self.deepstack)) != self.deepstack or max(self.deepstack, default=0) >= self.num_layers:
            accepted = f"increasing numbers from 0 to {self.num_layers - 1}"
            yield Problem("deepstack", "is not a list of encoder layers", value=self.deepstack, accepted=accepted)
        if self.video_id is not None:
            yield from self._check_videos()

    def _check_videos(self) -> Iterator[Problem]:
        videos = self.videos
        if self.fill_patches:
            if not videos.per_frame:
                yield Problem("videos.per_frame", "is not supported with fill_patches", value=False, accepted="true")
        elif videos.fps is None:
            yield Problem("videos.fps", "is needed without fill_patches", value=None, accepted="a number above 0")
        elif (low := videos.min_patches) > videos.max_patches:
            reason = f"is less than videos.min_patches={low}"
            yield Problem("videos.max_patches", reason, value=videos.max_patches, accepted=f"{low} or more")
        if (rate := videos.positions_per_second) is None:
            return
        if videos.fps is not None and not (rate * self.frames / videos.fps).is_integer():
            reason = f"does not divide positions_per_second={rate} times frames={self.frames}"
            yield Problem("videos.fps", reason, value=videos.fps, accepted=_divisors(rate * self.frames))


def _divisors(number: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)
