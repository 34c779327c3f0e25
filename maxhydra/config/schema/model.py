"""The model as data: sizes at the top, then a pattern of layer kinds and the mechanisms of each kind."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Schema, option, schema, section
from maxhydra.config.errors import Problem, did_you_mean
from maxhydra.config.schema.attention import Attention, AttentionBias, QkNorm, Temperature, ValueSource
from maxhydra.config.schema.embedding import Embedding, EmbeddingScale, Mtp, PerLayer, Positions
from maxhydra.config.schema.feed_forward import Activation, Mlp, MlpKind
from maxhydra.config.schema.gated_delta import Delta, DeltaBackend
from maxhydra.config.schema.kernels import (
    AttentionBackend,
    FusedLinearBackend,
    GroupedMatmulBackend,
    ModelKernels,
    Projection,
)
from maxhydra.config.schema.mla import Indexer, Mla
from maxhydra.config.schema.moe import Gate, GroupScore, Moe, Router, RouterScores, Scaled, Shared
from maxhydra.config.schema.rope import Pairs, Rope, RopeKind

__all__ = [
    "Activation",
    "Attention",
    "AttentionBackend",
    "AttentionBias",
    "Beside",
    "Delta",
    "DeltaBackend",
    "Dtype",
    "Dtypes",
    "Embedding",
    "EmbeddingScale",
    "FeedForward",
    "FusedLinearBackend",
    "Gate",
    "GroupScore",
    "GroupedMatmulBackend",
    "Head",
    "Indexer",
    "Kind",
    "Mixer",
    "Mla",
    "Mlp",
    "MlpKind",
    "Model",
    "ModelKernels",
    "Moe",
    "Mtp",
    "Norm",
    "Norms",
    "Pairs",
    "PerLayer",
    "Positions",
    "Projection",
    "QkNorm",
    "Remat",
    "RematPolicy",
    "Rope",
    "RopeKind",
    "Router",
    "RouterScores",
    "Scaled",
    "Shared",
    "Temperature",
    "ValueSource",
]


class Dtype(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Head(Enum):
    tied = "tied"
    separate = "separate"


class RematPolicy(Enum):
    none = "none"
    full = "full"
    minimal = "minimal"
    custom = "custom"


class Norm(Enum):
    rms = "rms"
    rms_plus_one = "rms_plus_one"
    layer = "layer"


class Norms(Enum):
    pre = "pre"
    post = "post"
    sandwich = "sandwich"


class Mixer(Enum):
    attention = "attention"
    delta = "delta"
    mla = "mla"


class FeedForward(Enum):
    mlp = "mlp"
    moe = "moe"


class Beside(Enum):
    none = "none"
    moe = "moe"


@schema
class Kind(Schema):
    """One kind of layer: x + mixer(norm(x)), then x + feed_forward(norm(x))."""

    norms: Norms = Norms.pre
    """What is normalised: the input of mixer and feed-forward (pre), their output (post), or both (sandwich)."""
    mixer: Mixer = Mixer.attention
    """What carries information between tokens; the section of that name says how."""
    attention: Attention = section(Attention)
    delta: Delta = section(Delta)
    mla: Mla = section(Mla)
    feed_forward: FeedForward = FeedForward.mlp
    """What works on each token alone; the section of that name says how."""
    mlp: Mlp = section(Mlp)
    moe: Moe = section(Moe)
    beside: Beside = Beside.none
    """moe: a mixture beside feed_forward=mlp, both with norms of their own after them, as the section moe says."""
    is_scaled: bool = False
    """Whether a constant of the layer, which comes with the weights and is not trained, multiplies what it leaves."""

    def check(self) -> Iterator[Problem]:
        is_mixture = self.feed_forward is FeedForward.moe or self.beside is Beside.moe
        if is_mixture and self.moe.experts is None:
            asker = "feed_forward" if self.feed_forward is FeedForward.moe else "beside"
            yield Problem("moe.experts", f"is needed by {asker}=moe", value=None, accepted="an integer, 2 or more")
        if self.beside is Beside.moe and self.feed_forward is not FeedForward.mlp:
            yield Problem("beside", "stands beside feed_forward=mlp", value="moe", accepted="none")
        if self.beside is Beside.moe and self.moe.router.bias_rate is not None:
            reason = "is for feed_forward=moe: no load is balanced that way beside another"
            yield Problem("moe.router.bias_rate", reason, value=self.moe.router.bias_rate, accepted="null")
        if not is_mixture and self.moe.experts is not None:
            hint = "set feed_forward=moe or beside=moe, or leave it null"
            yield Problem("moe.experts", "is not used by feed_forward=mlp", value=self.moe.experts, hint=hint)


@schema
class Dtypes(Schema):
    """Number formats by role."""

    weights: Dtype = Dtype.float32
    """Parameters, gradients and, unless optimizer.mu_dtype says otherwise, moments."""
    compute: Dtype = Dtype.bfloat16
    """Activations and matrix products."""
    softmax: Dtype = Dtype.float32
    """Attention logits and their softmax."""
    logits: Dtype = Dtype.float32
    """Output logits and the loss."""


@schema
class Remat(Schema):
    """Which activations of a layer are kept for the backward pass, and which are computed again."""

    policy: RematPolicy = RematPolicy.none
    """none keeps all, full layer inputs, minimal products and attention kernels, custom what save and offload name."""
    save: list[str] = option([])
    """custom: activations kept on the device: query, key, value, context, attention_out, mlp_gate, mlp_up, mlp_out."""
    offload: list[str] = option([])
    """custom: activations kept in host memory."""

    def check(self) -> Iterator[Problem]:
        for field in ("save", "offload"):
            names: list[str] = getattr(self, field)
            for name in names:
                if name not in ACTIVATIONS:
                    yield Problem(
                        field,
                        f"no activation is called {name!r}",
                        value=names,
                        accepted=", ".join(ACTIVATIONS),
                        hint=did_you_mean(name, ACTIVATIONS),
                    )
            if names and self.policy is not RematPolicy.custom:
                yield Problem(
                    field,
                    f"is not used by policy={self.policy.value}",
                    value=names,
                    hint="set policy=custom or leave it empty",
                )
        if self.policy is RematPolicy.custom and not self.save and not self.offload:
            yield Problem(
                "policy",
                "needs names in save or offload",
                value="custom",
                accepted="names from " + ", ".join(ACTIVATIONS),
                hint="to keep nothing, set policy=full",
            )


ACTIVATIONS = ("query", "key", "value", "context", "attention_out", "mlp_gate", "mlp_up", "mlp_out")


@schema
class Model(Schema):
    """A decoder: embedding, layers of a repeating pattern of kinds, final norm, head."""

    num_layers: int = option(ge=1)
    """Layers in all, prefix included."""
    emb_dim: int = option(ge=1)
    """Width of the residual stream."""
    mlp_dim: int = option(ge=1)
    """Hidden size of the feed-forward."""
    num_heads: int = option(ge=1)
    """Query heads."""
    num_kv_heads: int = option(ge=1)
    """Key and value heads; divides num_heads."""
    head_dim: int = option(ge=2)
    """Size of a head."""
    vocab_size: int = option(ge=2)
    """Rows of the embedding."""
    context_length: int = option(ge=1)
    """Longest sequence the model is meant for; train.seq_len stays within it."""
    prefix: list[str] = option([])
    """Kinds of the leading layers that stand outside the pattern."""
    pattern: list[str] = option(["layer"])
    """Kinds that repeat to fill the rest; a last repetition may be partial."""
    kinds: dict[str, Kind] = option({})
    """The layer kinds by name."""
    head: Head = Head.separate
    """Output projection: its own weights, or the embedding's (tied)."""
    norm: Norm = Norm.rms
    """rms: RMSNorm (Zhang and Sennrich, 2019); rms_plus_one: the same with 1 + scale for its scale, which begins at
    zero; layer: LayerNorm (Ba et al., 2016), with a bias."""
    norm_eps: float = option(1e-5, gt=0)
    """Added to the mean square or to the variance in norms."""
    mtp: Mtp = section(Mtp)
    embedding: Embedding = section(Embedding)
    logit_softcap: float | None = option(None, gt=0)
    """Output logits become softcap * tanh(logits / softcap)."""
    per_layer: PerLayer = section(PerLayer)
    dropout: float = option(0.0, ge=0, lt=1)
    """Dropped share of each residual branch's output, in training."""
    init_scale: float = option(1.0, gt=0)
    """Factor on the initial weights, which are normal with variance 1 / fan-in."""
    dtypes: Dtypes = section(Dtypes)
    remat: Remat = section(Remat)
    scan_unroll: int = option(1, ge=1)
    """Pattern repetitions written out per step of the scan over layers; num_layers unrolls all."""
    kernels: ModelKernels = section(ModelKernels)
    path: str | None = None
    """model=from_hf: Hugging Face folder whose config.json states the model. Weights and tokenizer come from there too,
    unless checkpoint.load_parameters and data.tokenizer say otherwise. Given on the command line."""

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer keeps a state of its sequence instead of every token, so that no part of it can be shared."""
        used = {*self.prefix, *self.pattern}
        return any(kind.mixer is Mixer.delta for name, kind in self.kinds.items() if name in used)

    def check(self) -> Iterator[Problem]:
        yield from self._check_heads()
        for field in ("prefix", "pattern"):
            for name in getattr(self, field):
                if name not in self.kinds:
                    yield Problem(
                        field,
                        f"no layer kind is called {name!r}",
                        value=getattr(self, field),
                        accepted=", ".join(self.kinds) or "a kind defined in model.kinds",
                        hint=did_you_mean(name, self.kinds),
                    )
        yield from self._check_shared()
        if self.mtp.depth and self.per_layer.dim is not None:
            reason = "has no embeddings for the layers of mtp"
            yield Problem("per_layer.dim", reason, value=self.per_layer.dim, accepted="null, or mtp.depth=0")
        if not self.pattern and len(self.prefix) != self.num_layers:
            yield Problem(
                "pattern",
                "is empty, and prefix alone does not make num_layers",
                value=[],
                accepted=f"kinds for {self.num_layers - len(self.prefix)} layers",
            )
        if len(self.prefix) > self.num_layers:
            yield Problem(
                "prefix",
                f"has {len(self.prefix)} layers, num_layers is {self.num_layers}",
                value=self.prefix,
                accepted=f"at most {self.num_layers} kinds",
            )

    def _check_shared(self) -> Iterator[Problem]:
        """Who shares keys and values finds them in the prefix, in heads of the same number and size."""
        for name, kind in self.kinds.items():
            source = kind.attention.shares
            if source is None:
                continue
            where, own = f"kinds.{name}.attention.shares", [k for k in self.prefix if k in self.kinds]
            givers = [k for k in own if self.kinds[k].attention.shares is None and k not in self.pattern]
            if source not in givers:
                reason = "is no kind of model.prefix alone, with keys and values of its own"
                yield Problem(where, reason, value=source, accepted=", ".join(dict.fromkeys(givers)) or "null")
            elif self._kv_sizes(self.kinds[source]) != self._kv_sizes(kind):
                yield Problem(where, "has other heads: num_kv_heads and head_dim must agree", value=source)

    def _kv_sizes(self, kind: Kind) -> tuple[int, int]:
        own = kind.attention
        return own.num_kv_heads or self.num_kv_heads, own.head_dim or self.head_dim

    def _check_heads(self) -> Iterator[Problem]:
        for where, kind in {
            "": None,
            **{f"kinds.{name}.attention.": kind for name, kind in self.kinds.items()},
        }.items():
            own = kind.attention if kind else None
            heads = own.num_heads if own and own.num_heads else self.num_heads
            kv_heads = own.num_kv_heads if own and own.num_kv_heads else self.num_kv_heads
            head_dim = own.head_dim if own and own.head_dim else self.head_dim
            is_repeat = own is not None and (own.num_heads, own.num_kv_heads) == (None, None)
            if heads % kv_heads and not is_repeat:
                divisors = [str(n) for n in range(1, heads + 1) if heads % n == 0]
                yield Problem(
                    f"{where}num_kv_heads",
                    f"does not divide {where}num_heads={heads}",
                    value=kv_heads,
                    accepted=", ".join(divisors),
                )
            if head_dim % 2 and not (own is not None and own.head_dim is None):
                yield Problem(
                    f"{where}head_dim", "is odd; rotary positions turn pairs", value=head_dim, accepted="an even number"
                )
            elif own and int(head_dim * own.rope.share) not in range(2, head_dim + 1, 2):
                accepted = f"a share of head_dim={head_dim} that is an even number"
                yield Problem(f"{where}rope.share", "leaves half a pair", value=own.rope.share, accepted=accepted)
