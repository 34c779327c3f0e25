"""Schema of the image encoder and its projector."""

import math
from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Schema, option, schema, section
from maxhydra.config.errors import Problem
from maxhydra.config.schema.feed_forward import Activation

MAX_IMAGE = 2**14


class Pooling(Enum):
    average = "average"
    concatenate = "concatenate"


@schema
class Projector(Schema):
    """The map from patches of an image to its tokens: pooling of square blocks of patches, RMSNorm, projection."""

    pooling: Pooling = Pooling.average
    """How a block of patches becomes one token: their mean, or their concatenation (pixel shuffle)."""
    tokens: int = option(196, ge=1, le=MAX_IMAGE)
    """Tokens of an image, a square number; patches form as many square blocks."""


@schema
class Vision(Schema):
    """Images in the prompt: a vision transformer (Dosovitskiy et al., 2021) whose outputs replace token embeddings."""

    num_layers: int | None = option(None, ge=1, le=MAX_LAYERS)
    """Layers of the image encoder; null: the model takes no images."""
    image_size: int = option(224, ge=1, le=MAX_IMAGE)
    """Height and width of images in pixels."""
    patch_size: int = option(16, ge=1, le=MAX_IMAGE)
    """Height and width of a patch in pixels; divides image_size."""
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
    projector: Projector = section(Projector)
    bidirectional: bool = False
    """Whether the tokens of an image attend to each other in both directions."""
    placeholder_id: int | None = option(None, ge=0)
    """Placeholder of one image token; needed if num_layers is set."""
    begin_id: int | None = option(None, ge=0)
    """Token before the tokens of an image; null: none."""
    end_id: int | None = option(None, ge=0)
    """Token after the tokens of an image; null: none."""
    separator: str = ""
    """Text before and after the tokens of each image, such as line breaks."""

    @property
    def patch_rows(self) -> int:
        """Rows and columns of patches."""
        return self.image_size // self.patch_size

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
        rows = self.patch_rows
        squares = [number**2 for number in range(1, rows + 1) if rows % number == 0]
        if self.projector.tokens not in squares:
            reason = f"does not divide the {rows} x {rows} patches of an image into equal squares"
            accepted = ", ".join(map(str, squares))
            yield Problem("projector.tokens", reason, value=self.projector.tokens, accepted=accepted)


def _divisors(number: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)
