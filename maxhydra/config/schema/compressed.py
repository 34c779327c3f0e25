"""Schema of compressed attention: a sliding window of tokens, and compressed entries of all earlier ones."""

from collections.abc import Iterator

from maxhydra.config.declare import MAX_HEADS, MAX_WIDTH, Schema, option, schema, section
from maxhydra.config.errors import Problem
from maxhydra.config.schema.attention import Indexer, Rope, RopeKind


@schema
class CompressedAttention(Schema):
    """Attention of all heads to one vector per token, which is key and value, in a sliding window, and to compressed
    entries of earlier tokens (DeepSeek-V4, 2026); with model.num_heads heads of model.head_dim."""

    q_lora_rank: int = option(1024, ge=1, le=MAX_WIDTH)
    """Rank of the compressed queries."""
    window: int = option(128, ge=2)
    """Sliding window: a token attends to itself and the window - 1 tokens before it."""
    rate: int | None = option(None, ge=2, le=MAX_WIDTH)
    """Tokens per entry: a sum of them with learned weights for each feature. A token attends to the entries of all
    complete groups of this many tokens, also of those in its window. null: no entries."""
    overlap: bool = False
    """An entry also sums the tokens of the group before its own, by other projections."""
    out_groups: int = option(8, ge=1, le=MAX_HEADS)
    """Groups of heads, each projected to out_rank numbers, which are projected to the residual stream together."""
    out_rank: int = option(1024, ge=1, le=MAX_WIDTH)
    """Numbers to which the heads of a group are projected."""
    rope: Rope = section(Rope)
    indexer: Indexer = section(Indexer)

    def check(self) -> Iterator[Problem]:
        if self.rate is None and self.overlap:
            yield Problem("overlap", "is not used without rate", value=True, hint="set rate, such as 4")
        if self.rate is None and self.indexer.top_k is not None:
            reason = "selects entries, and is not used without rate"
            yield Problem("indexer.top_k", reason, value=self.indexer.top_k, hint="set rate, such as 4")
        if self.rope.kind in (RopeKind.none, RopeKind.proportional):
            accepted = ", ".join(kind.value for kind in RopeKind if kind.value not in ("none", "proportional"))
            yield Problem("rope.kind", "is not supported here", value=self.rope.kind.value, accepted=accepted)
        if self.rope.sections:
            reason = "is not supported by compressed attention"
            yield Problem("rope.sections", reason, value=self.rope.sections, accepted="[]")

    def check_sizes(self, num_heads: int, head_dim: int) -> Iterator[Problem]:
        """Yield what does not fit the heads of the model."""
        if num_heads % self.out_groups:
            divisors = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
            reason = f"does not divide num_heads={num_heads}"
            yield Problem("out_groups", reason, value=self.out_groups, accepted=divisors)
        rotated = int(head_dim * self.rope.share)
        if rotated not in range(2, head_dim + 1, 2):
            accepted = f"a value for which share * head_dim={head_dim} is even"
            reason = "does not select a whole number of pairs"
            yield Problem("rope.share", reason, value=self.rope.share, accepted=accepted)
        elif self.indexer.top_k is not None and self.indexer.head_dim < rotated:
            reason = f"is smaller than the {rotated} rotated dimensions of a head"
            yield Problem("indexer.head_dim", reason, value=self.indexer.head_dim, accepted=f"{rotated} or more")
