"""Schema of block diffusion: a model that generates a sequence block by block, each by unmasking its tokens."""

from collections.abc import Iterator

from maxhydra.config.declare import MAX_CONTEXT, MAX_VOCABULARY, Schema, option, schema
from maxhydra.config.errors import Problem


@schema
class Diffusion(Schema):
    """Block diffusion (BD3-LM; Arriola et al., 2025): blocks are generated from left to right, the tokens of a block
    together. A block starts as mask tokens, which are replaced in a few denoising steps; its attention is bidirectional
    and includes all earlier blocks. Supported by task=pretrain, sft and decode."""

    block_size: int | None = option(None, ge=1, le=MAX_CONTEXT)
    """Tokens of a block. The first token of a sequence is a prefix, and the first block starts after it. null: the
    model is autoregressive."""
    mask_token: int | None = option(None, ge=0, le=MAX_VOCABULARY)
    """Token id of the mask, which texts must not contain."""
    min_noise: float = option(1e-3, gt=0, lt=1)
    """Smallest noise level t in training: the tokens of a block are masked with a probability t, uniform
    between min_noise and 1, and their cross-entropy has weight 1 / t."""

    def check(self) -> Iterator[Problem]:
        if self.block_size is not None and self.mask_token is None:
            accepted = "a token id that texts do not contain"
            yield Problem("mask_token", "is needed with diffusion.block_size", value=None, accepted=accepted)
        if self.block_size is None:
            for name, default in (("mask_token", None), ("min_noise", Diffusion.min_noise)):
                if (value := getattr(self, name)) != default:
                    hint = "set diffusion.block_size"
                    yield Problem(name, "is not used without diffusion.block_size", value=value, hint=hint)
