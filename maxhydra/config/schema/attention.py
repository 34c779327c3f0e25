"""Schema of the mixers: rotary embeddings, grouped-query attention, latent attention (MLA) and Gated DeltaNet."""

import dataclasses
from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import MAX_HEADS, MAX_WIDTH, Schema, option, schema, section
from maxhydra.config.errors import Problem


class RopeKind(Enum):
    none = "none"
    default = "default"
    proportional = "proportional"
    linear = "linear"
    llama3 = "llama3"
    yarn = "yarn"


class Pairs(Enum):
    halves = "halves"
    neighbours = "neighbours"


@schema
class Rope(Schema):
    """Rotary position embedding (Su et al., 2021)."""

    kind: RopeKind = RopeKind.default
    """Frequencies: default; proportional (Gemma 4, 2026), over the whole head with frequency zero beyond share; linear,
    llama3 (Llama 3.1) and yarn, which extend the context length; none for no position embedding."""
    theta: float = option(10000.0, gt=0)
    """Base of the geometric series of wavelengths."""
    share: float = option(1.0, gt=0, le=1)
    """Fraction of the head dimensions that is rotated, from the first on; the rest has no position information."""
    pairs: Pairs = Pairs.halves
    """Dimensions that are rotated together: i and i + dim/2 (halves), or 2i and 2i + 1 (neighbours)."""
    factor: float | None = option(None, gt=0)
    """linear, llama3, yarn: scaling factor of the longest wavelengths."""
    low_freq_factor: float | None = option(None, gt=0)
    """llama3: wavelengths above original_context / low_freq_factor are scaled by the full factor."""
    high_freq_factor: float | None = option(None, gt=0)
    """llama3: wavelengths below original_context / high_freq_factor are not scaled."""
    original_context: int | None = option(None, ge=1)
    """llama3, yarn: context length before extension."""
    beta_fast: float = option(32.0, gt=0)
    """yarn: pairs with more rotations than this over the original context are not scaled."""
    beta_slow: float = option(1.0, gt=0)
    """yarn: pairs with fewer rotations than this over the original context are scaled by the full factor."""
    truncate: bool = True
    """yarn: round the bounds of the interpolation range to whole pairs."""
    attention_factor: float | None = option(None, gt=0)
    """yarn: factor on rotated queries and keys. null: 0.1 * ln(factor) + 1."""
    sections: list[int] = option([], ge=1)
    """Pairs that turn with time, row and column of an image token, interleaved (Qwen3-VL, 2025); text tokens have
    three equal positions. []: positions have one axis."""

    def check(self) -> Iterator[Problem]:
        yield from self._check_sections()
        for field in dataclasses.fields(self):
            kinds, value = _KINDS.get(field.name, ()), getattr(self, field.name)
            if self.kind in kinds and field.name in _NEEDED and value is None:
                reason = f"is needed by kind={self.kind.value}"
                yield Problem(field.name, reason, value=None, accepted="a positive number")
            if kinds and self.kind not in kinds and value != field.default:
                hint = f"set kind={' or '.join(kind.value for kind in kinds)}, or leave this at its default"
                yield Problem(field.name, f"is not used by kind={self.kind.value}", value=value, hint=hint)
        if self.kind is RopeKind.yarn and self.beta_slow > self.beta_fast:
            accepted = f"at most beta_fast={self.beta_fast}"
            yield Problem("beta_slow", "is larger than beta_fast", value=self.beta_slow, accepted=accepted)

    def pairs_of(self, head_dim: int) -> int:
        """Pairs of a head that have a frequency."""
        return head_dim // 2 if self.kind is RopeKind.proportional else int(head_dim * self.share) // 2

    def _check_sections(self) -> Iterator[Problem]:
        if not self.sections:
            return
        accepted = "three numbers of pairs, such as [24, 20, 20], the first at least as large as the others, or []"
        if len(self.sections) != 3 or max(self.sections) > self.sections[0]:
            yield Problem("sections", "does not divide pairs into three axes", value=self.sections, accepted=accepted)
        if self.kind is RopeKind.none:
            yield Problem("sections", "is not used by kind=none", value=self.sections, accepted="[]")


# Kinds that use a field; fields not listed are used by all kinds.
_LLAMA3, _YARN = (RopeKind.llama3,), (RopeKind.yarn,)
_KINDS = {
    "factor": (RopeKind.linear, RopeKind.llama3, RopeKind.yarn),
    "low_freq_factor": _LLAMA3,
    "high_freq_factor": _LLAMA3,
    "original_context": (RopeKind.llama3, RopeKind.yarn),
    "beta_fast": _YARN,
    "beta_slow": _YARN,
    "truncate": _YARN,
    "attention_factor": _YARN,
}
_NEEDED = ("factor", "low_freq_factor", "high_freq_factor", "original_context")


class QkNorm(Enum):
    none = "none"
    head = "head"
    head_plain = "head_plain"
    whole = "whole"


class ValueSource(Enum):
    own = "own"
    key = "key"


class AttentionBias(Enum):
    none = "none"
    qkv = "qkv"
    all = "all"


@schema
class Temperature(Schema):
    """Position-dependent query scale, which keeps attention sharp over long contexts (Nakanishi, 2025):
    1 + scale * ln(1 + floor((position + offset) / floor))."""

    floor: int | None = option(None, ge=1)
    """Number of positions that share a scale. null: queries are not scaled."""
    scale: float | None = option(None, gt=0)
    """Growth of the scale with the logarithm of the position."""
    offset: int = option(1, ge=0)
    """Added to the position, which is 0 for the first token."""

    def check(self) -> Iterator[Problem]:
        given = {"floor": self.floor, "scale": self.scale}
        missing = [name for name, value in given.items() if value is None]
        if len(missing) == 1:
            other = "scale" if missing == ["floor"] else "floor"
            yield Problem(missing[0], f"is required together with {other}", value=None, accepted="a positive number")
        if self.floor is None and self.offset != Temperature.offset:
            yield Problem("offset", "is not used without floor", value=self.offset, hint="set floor and scale")


@schema
class Moba(Schema):
    """Mixture of block attention (Lu et al., 2025): a query attends to its own block and to the best earlier ones."""

    block_size: int | None = option(None, ge=1)
    """Tokens of a block. null: a query attends to all earlier tokens."""
    top_k: int = option(8, ge=1)
    """Blocks that a query head attends to, its own included; the others by the dot product with their mean key."""


@schema
class Attention(Schema):
    """Grouped-query attention (Ainslie et al., 2023); multi-head and multi-query attention are special cases."""

    num_heads: int | None = option(None, ge=1, le=MAX_HEADS)
    """Query heads of this kind. null: model.num_heads."""
    num_kv_heads: int | None = option(None, ge=1, le=MAX_HEADS)
    """Key and value heads of this kind. null: model.num_kv_heads."""
    head_dim: int | None = option(None, ge=1, le=MAX_WIDTH)
    """Head dimension of this kind. null: model.head_dim."""
    window: int | None = option(None, ge=1)
    """Sliding window: a token attends to itself and the window - 1 tokens before it. null: to all before it."""
    chunk: int | None = option(None, ge=1)
    """Chunked attention: tokens attend only within chunks of this many tokens. null: no chunks."""
    softcap: float | None = option(None, gt=0)
    """Attention logits become softcap * tanh(logits / softcap)."""
    scale: float | None = option(None, gt=0)
    """Factor on the attention logits. null: 1 / sqrt(head_dim)."""
    sinks: bool = False
    """Add a learned logit per query head to the softmax, so that a head can attend to nothing (gpt-oss, 2025)."""
    qk_norm: QkNorm = QkNorm.none
    """Norm of queries and keys (Henry et al., 2020) before RoPE: per head with a scale (head) or without (head_plain),
    or over the whole projection (whole)."""
    bias: AttentionBias = AttentionBias.none
    """Projections with a bias: none, query, key and value (qkv), or all, including the output."""
    gated: bool = False
    """Multiply the attention output by the sigmoid of a projection of the token (Qiu et al., 2025)."""
    value: ValueSource = ValueSource.own
    """Values: a separate projection (own), or the key projection before norm and RoPE (key)."""
    value_norm: bool = False
    """Normalize the values of each head."""
    value_norm_scale: bool = False
    """Multiply the normalized values by a learned scale."""
    shares: str | None = None
    """Kind of the prefix from whose last layer keys and values are taken (cross-layer sharing, Brandon et al., 2024).
    null: the layer computes its own."""
    temperature: Temperature = section(Temperature)
    moba: Moba = section(Moba)
    rope: Rope = section(Rope)

    def check(self) -> Iterator[Problem]:
        if self.moba.block_size is None and self.moba.top_k != Moba.top_k:
            yield Problem("moba.top_k", "is not used without block_size", self.moba.top_k, hint="set moba.block_size")
        conflicts = {"window": self.window, "chunk": self.chunk, "softcap": self.softcap, "sinks": self.sinks or None}
        for name, value in conflicts.items():
            if self.moba.block_size is not None and value is not None:
                reason, accepted = "is not supported with moba.block_size", "false" if name == "sinks" else "null"
                yield Problem(name, reason, value=value, accepted=accepted)
        if self.shares is not None and (self.value is ValueSource.key or self.value_norm):
            reason = "uses the values of another kind, so value and value_norm must be set there"
            yield Problem("shares", reason, value=self.shares, accepted="null")
        if self.value_norm_scale and not self.value_norm:
            yield Problem("value_norm_scale", "is not used without value_norm", value=True, hint="set value_norm=true")
        if self.window is not None and self.chunk is not None:
            yield Problem(
                "chunk",
                f"cannot be combined with window={self.window}",
                value=self.chunk,
                accepted="only one of the two",
            )


@schema
class Indexer(Schema):
    """Sparse attention (DeepSeek-V3.2, 2025): indexer heads score earlier tokens, attention uses the top_k."""

    top_k: int | None = option(None, ge=1)
    """Tokens that a query attends to. null: no indexer, all earlier tokens. With train.seq_len or more, attention is
    dense, which is used to warm up an indexer."""
    num_heads: int = option(64, ge=1, le=MAX_HEADS)
    """Heads of the indexer."""
    head_dim: int = option(128, ge=2, le=MAX_WIDTH)
    """Head dimension of the indexer; RoPE is applied to its first qk_rope_head_dim dimensions."""
    pairs: Pairs = Pairs.halves
    """Dimensions of these that are rotated together, as in rope.pairs, which the indexer does not use."""
    loss_weight: float = option(1.0, ge=0)
    """Weight of the indexer loss, the mean over tokens of KL(attention summed over heads || softmax of the scores).
    Only this loss trains the indexer, and it trains nothing else."""


@schema
class Mla(Schema):
    """Multi-head latent attention (DeepSeek-V2, 2024), with model.num_heads heads for queries, keys and values."""

    q_lora_rank: int | None = option(None, ge=1, le=MAX_WIDTH)
    """Rank of the compressed queries. null: queries are projected directly from the residual stream."""
    kv_lora_rank: int = option(512, ge=1, le=MAX_WIDTH)
    """Dimension of the latent vector from which keys and values of all heads are projected."""
    qk_nope_head_dim: int | None = option(None, ge=1, le=MAX_WIDTH)
    """Dimensions of queries and keys without RoPE. null: model.head_dim."""
    qk_rope_head_dim: int = option(64, ge=2, le=MAX_WIDTH)
    """Dimensions of queries and keys with RoPE; this part of the key is shared by all heads."""
    v_head_dim: int | None = option(None, ge=1, le=MAX_WIDTH)
    """Dimension of values. null: model.head_dim."""
    mscale: float | None = option(None, gt=0)
    """rope.kind=yarn: multiply attention logits, in addition to 1 / sqrt(qk_nope_head_dim + qk_rope_head_dim), by
    (0.1 * mscale * ln(rope.factor) + 1)^2. null: no extra factor."""
    temperature: Temperature = section(Temperature)
    rope: Rope = section(Rope)
    indexer: Indexer = section(Indexer)
    indexer_of: str | None = None
    """Name of a kind: attend to the tokens that the indexer of its latest layer selected (IndexCache, 2026), instead of
    having one. null: a separate indexer, if indexer.top_k is set."""

    def check(self) -> Iterator[Problem]:
        if self.indexer_of is not None and self.indexer.top_k is not None:
            reason = "cannot be combined with a separate indexer"
            yield Problem("indexer_of", reason, self.indexer_of, accepted="null, or indexer.top_k=null")
        if self.qk_rope_head_dim % 2:
            yield Problem(
                "qk_rope_head_dim",
                "is odd, but RoPE rotates pairs",
                value=self.qk_rope_head_dim,
                accepted="an even number",
            )
        if self.rope.sections:
            reason = "is not supported by multi-head latent attention"
            yield Problem("rope.sections", reason, value=self.rope.sections, accepted="[]")
        if self.mscale is not None and self.rope.kind is not RopeKind.yarn:
            hint = "set rope.kind=yarn, or leave this null"
            yield Problem("mscale", f"is not used by rope.kind={self.rope.kind.value}", value=self.mscale, hint=hint)
        if self.indexer.top_k is None:
            return
        if self.q_lora_rank is None:
            hint = "set it, or leave indexer.top_k null"
            yield Problem(
                "q_lora_rank", "is required by the indexer, whose queries are projected from it", value=None, hint=hint
            )
        if self.indexer.head_dim < self.qk_rope_head_dim:
            yield Problem(
                "indexer.head_dim",
                f"is smaller than qk_rope_head_dim={self.qk_rope_head_dim}",
                value=self.indexer.head_dim,
                accepted=f"{self.qk_rope_head_dim} or more",
            )


class DeltaBackend(Enum):
    auto = "auto"
    chunked = "chunked"
    pallas_tpu = "pallas_tpu"
    triton = "triton"
    reference = "reference"


class DeltaGate(Enum):
    silu = "silu"
    sigmoid = "sigmoid"


@schema
class Delta(Schema):
    """Gated DeltaNet (Yang et al., 2024): a decaying state per head, updated by the delta rule."""

    num_key_heads: int | None = option(None, ge=1, le=MAX_HEADS)
    """Query and key heads; divides num_value_heads. null: model.num_kv_heads."""
    num_value_heads: int | None = option(None, ge=1, le=MAX_HEADS)
    """Value heads, each with its own state. null: model.num_heads."""
    key_dim: int | None = option(None, ge=1, le=MAX_WIDTH)
    """Dimension of a query and key head. null: model.head_dim."""
    value_dim: int | None = option(None, ge=1, le=MAX_WIDTH)
    """Dimension of a value head. null: model.head_dim."""
    taps: int = option(4, ge=1, le=MAX_WIDTH)
    """Kernel size of the short causal convolution before the heads."""
    max_rate: float = option(1.0, gt=0, le=2)
    """Upper bound of the rate of the delta rule, max_rate * sigmoid(rate(x)). With 2, transitions of the state have
    eigenvalues down to -1 (Grazzi et al., 2024)."""
    norm_eps: float | None = option(None, gt=0)
    """Added to the mean square in the norm of the output heads. null: model.norm_eps."""
    decay_rank: int | None = option(None, ge=1, le=MAX_WIDTH)
    """Rank of a projection that gives every channel of a key its own decay (Kimi Linear, 2025). null: one decay per
    head."""
    gate: DeltaGate = DeltaGate.silu
    """Activation of the gate on the normalized output heads."""
    gate_rank: int | None = option(None, ge=1, le=MAX_WIDTH)
    """Rank of the projection of that gate. null: a full matrix."""

    def check(self) -> Iterator[Problem]:
        keys, values = self.num_key_heads, self.num_value_heads
        if keys is not None and values is not None and values % keys:
            divisors = [str(n) for n in range(1, values + 1) if values % n == 0]
            yield Problem(
                "num_key_heads", f"does not divide num_value_heads={values}", value=keys, accepted=", ".join(divisors)
            )
