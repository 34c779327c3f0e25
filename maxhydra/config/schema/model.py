"""Schema of a model: sizes, a repeating pattern of layer kinds, and the mechanisms of each kind."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import (
    MAX_CONTEXT,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    Schema,
    option,
    schema,
    section,
)
from maxhydra.config.errors import Problem, did_you_mean
from maxhydra.config.schema.attention import (
    Attention,
    AttentionBias,
    Delta,
    DeltaBackend,
    Indexer,
    Mla,
    Pairs,
    QkNorm,
    Rope,
    RopeKind,
    Temperature,
    ValueSource,
)
from maxhydra.config.schema.feed_forward import (
    Activation,
    Dispatch,
    Embedding,
    EmbeddingScale,
    ExpertParallel,
    Gate,
    GroupScore,
    Mlp,
    MlpKind,
    Moe,
    Mtp,
    ParallelMoe,
    PerLayer,
    Positions,
    Router,
    RouterScores,
    Scaled,
    Shared,
)
from maxhydra.config.schema.kernels import (
    AttentionBackend,
    FusedLinearBackend,
    GroupedMatmulBackend,
    ModelKernels,
    Projection,
)

__all__ = [
    "Activation",
    "Attention",
    "AttentionBackend",
    "AttentionBias",
    "Delta",
    "DeltaBackend",
    "Dispatch",
    "Dtype",
    "Dtypes",
    "Embedding",
    "EmbeddingScale",
    "ExpertParallel",
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
    "ParallelMoe",
    "PerLayer",
    "Pooling",
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
    "Vision",
]
from maxhydra.config.schema.plug_in import PlugIn
from maxhydra.config.schema.remat import Remat, RematPolicy
from maxhydra.config.schema.transfer import Transfer
from maxhydra.config.schema.vision import Pooling, Vision


class Dtype(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Head(Enum):
    tied = "tied"
    separate = "separate"
    score = "score"


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
    own_mixer = "own_mixer"


class FeedForward(Enum):
    mlp = "mlp"
    moe = "moe"
    own_feed_forward = "own_feed_forward"


@schema
class Kind(Schema):
    """One kind of layer: x + mixer(norm(x)), then x + feed_forward(norm(x))."""

    norms: Norms = Norms.pre
    """Norm placement: on the input of mixer and feed-forward (pre), on their output (post), or both (sandwich)."""
    mixer: Mixer = Mixer.attention
    """Token mixer; configured in the section of the same name. own_mixer: one of yours."""
    attention: Attention = section(Attention)
    delta: Delta = section(Delta)
    mla: Mla = section(Mla)
    own_mixer: PlugIn = section(PlugIn)
    feed_forward: FeedForward = FeedForward.mlp
    """Per-token layer; configured in the section of the same name. own_feed_forward: one of yours."""
    mlp: Mlp = section(Mlp)
    moe: Moe = section(Moe)
    own_feed_forward: PlugIn = section(PlugIn)
    parallel_moe: ParallelMoe = ParallelMoe.none
    """moe: a mixture of experts (section moe) in parallel with feed_forward=mlp, each followed by its own norm."""
    is_scaled: bool = False
    """Multiply the layer's output by a per-layer constant that is loaded with the weights and not trained."""

    def check(self) -> Iterator[Problem]:
        yield from self.own_mixer.check_use("own_mixer", self.mixer)
        yield from self.own_feed_forward.check_use("own_feed_forward", self.feed_forward)
        is_mixture = self.feed_forward is FeedForward.moe or self.parallel_moe is ParallelMoe.moe
        if is_mixture and self.moe.experts is None:
            user = "feed_forward" if self.feed_forward is FeedForward.moe else "parallel_moe"
            yield Problem("moe.experts", f"is needed by {user}=moe", value=None, accepted="an integer, 2 or more")
        if self.parallel_moe is ParallelMoe.moe and self.feed_forward is not FeedForward.mlp:
            yield Problem("parallel_moe", "requires feed_forward=mlp", value="moe", accepted="none")
        if self.parallel_moe is ParallelMoe.moe and self.moe.router.bias_rate is not None:
            reason = "requires feed_forward=moe: a parallel MoE has no router bias for load balancing"
            yield Problem("moe.router.bias_rate", reason, value=self.moe.router.bias_rate, accepted="null")
        if not is_mixture and self.moe.experts is not None:
            hint = "set feed_forward=moe or parallel_moe=moe, or leave it null"
            yield Problem("moe.experts", "is not used by feed_forward=mlp", value=self.moe.experts, hint=hint)


@schema
class Dtypes(Schema):
    """Dtypes by role."""

    weights: Dtype = Dtype.float32
    """Parameters, gradients and, unless optimizer.mu_dtype is set, optimizer moments."""
    compute: Dtype = Dtype.bfloat16
    """Activations and matmuls."""
    softmax: Dtype = Dtype.float32
    """Attention logits and their softmax."""
    logits: Dtype = Dtype.float32
    """Output logits and the loss."""


@schema
class Model(Schema):
    """A decoder: embedding, layers of a repeating pattern of kinds, final norm, head."""

    num_layers: int = option(ge=1, le=MAX_LAYERS)
    """Number of layers, including the prefix."""
    emb_dim: int = option(ge=1, le=MAX_WIDTH)
    """Width of the residual stream."""
    mlp_dim: int = option(ge=1, le=MAX_WIDTH)
    """Hidden size of the feed-forward."""
    num_heads: int = option(ge=1, le=MAX_HEADS)
    """Query heads."""
    num_kv_heads: int = option(ge=1, le=MAX_HEADS)
    """Key and value heads; divides num_heads."""
    head_dim: int = option(ge=2, le=MAX_WIDTH)
    """Dimension of a head."""
    vocab_size: int = option(ge=2, le=MAX_VOCABULARY)
    """Rows of the embedding."""
    context_length: int = option(ge=1, le=MAX_CONTEXT)
    """Maximum sequence length of the model; train.seq_len must not exceed it."""
    prefix: list[str] = option([])
    """Kinds of the leading layers, before the pattern starts."""
    pattern: list[str] = option(["layer"])
    """Kinds that repeat to fill the remaining layers; the last repetition may be partial."""
    kinds: dict[str, Kind] = option({})
    """Layer kinds by name."""
    head: Head = Head.separate
    """LM head: separate weights, or those of the embedding (tied). score: one number per token instead of logits, for
    task=reward_model; it starts at zero unless the loaded weights have it."""
    norm: Norm = Norm.rms
    """rms: RMSNorm (Zhang and Sennrich, 2019); rms_plus_one: the same with a scale of 1 + w, w
    initialized to zero; layer: LayerNorm (Ba et al., 2016), with a bias."""
    norm_eps: float = option(1e-5, gt=0)
    """Added to the mean square or the variance in norms."""
    mtp: Mtp = section(Mtp)
    embedding: Embedding = section(Embedding)
    logit_softcap: float | None = option(None, gt=0)
    """Output logits become softcap * tanh(logits / softcap)."""
    per_layer: PerLayer = section(PerLayer)
    dropout: float = option(0.0, ge=0, lt=1)
    """Dropout rate on the output of each residual branch, in training."""
    init_scale: float = option(1.0, gt=0)
    """Factor on the initial weights, which are normally distributed with variance 1 / fan-in."""
    transfer: Transfer = section(Transfer)
    dtypes: Dtypes = section(Dtypes)
    remat: Remat = section(Remat)
    scan_unroll: int | None = option(None, ge=1, le=MAX_LAYERS)
    """Pattern repetitions unrolled per iteration of the scan over layers; num_layers unrolls all. null: all to train
    on one GPU, unless that takes minutes to compile, and 1 otherwise."""
    expert_parallel: ExpertParallel = section(ExpertParallel)
    kernels: ModelKernels = section(ModelKernels)
    vision: Vision = section(Vision)
    path: str | None = None
    """model=from_hf: Hugging Face folder, or repository ORG/NAME[@REVISION] on the hub, whose config.json defines the
    model. Weights and tokenizer are loaded from it, unless checkpoint.load_parameters or data.tokenizer is set."""

    @property
    def has_experts(self) -> bool:
        """True if a layer has a mixture of experts."""
        return any(self.kinds[name].moe.experts is not None for name in {*self.prefix, *self.pattern})

    def layer_kinds(self) -> list[str]:
        """The kind of every layer from first to last: the prefix, then the pattern repeated."""
        repeated = self.num_layers - len(self.prefix)
        return [*self.prefix, *(self.pattern[index % len(self.pattern)] for index in range(repeated))]

    @property
    def is_recurrent(self) -> bool:
        """True if a layer keeps a recurrent state instead of a KV cache, so that prefixes cannot be shared."""
        used = {*self.prefix, *self.pattern}
        return any(kind.mixer is Mixer.delta for name, kind in self.kinds.items() if name in used)

    def check(self) -> Iterator[Problem]:
        yield from self._check_heads()
        for field in ("prefix", "pattern"):
            for name in getattr(self, field):
                if name not in self.kinds:
                    yield Problem(
                        field,
                        f"model.kinds has no {name!r}",
                        value=getattr(self, field),
                        accepted=", ".join(self.kinds) or "a kind defined in model.kinds",
                        hint=did_you_mean(name, self.kinds),
                    )
        yield from self._check_shared()
        if self.mtp.depth and self.per_layer.dim is not None:
            reason = "is not supported together with mtp layers"
            yield Problem("per_layer.dim", reason, value=self.per_layer.dim, accepted="null, or mtp.depth=0")
        yield from self._check_vision()
        if not self.pattern and len(self.prefix) != self.num_layers:
            yield Problem(
                "pattern",
                "is empty, and prefix alone does not have num_layers layers",
                value=[],
                accepted=f"kinds for {self.num_layers - len(self.prefix)} layers",
            )
        if len(self.prefix) > self.num_layers:
            reason = f"has {len(self.prefix)} layers, but num_layers is {self.num_layers}"
            yield Problem("prefix", reason, value=self.prefix, accepted=f"at most {self.num_layers} kinds")

    def _check_vision(self) -> Iterator[Problem]:
        """Placeholders are tokens of the vocabulary, and mechanisms that look up tokens again see no images."""
        if self.vision.num_layers is None:
            return
        for name in ("placeholder_id", "begin_id", "end_id"):
            value = getattr(self.vision, name)
            if value is not None and value >= self.vocab_size:
                reason = f"is not in the vocabulary of {self.vocab_size} tokens"
                yield Problem(f"vision.{name}", reason, value=value, accepted=f"0 to {self.vocab_size - 1}")
        kinds = {name: self.kinds[name] for name in {*self.prefix, *self.pattern} if name in self.kinds}
        for name, kind in kinds.items() if self.vision.bidirectional else ():
            if kind.mixer is not Mixer.attention or kind.attention.chunk is not None:
                reason = f"requires mixer=attention without chunks, which model.kinds.{name} does not have"
                yield Problem("vision.bidirectional", reason, value=True, accepted="false")
        for name, is_used in {"per_layer.dim": self.per_layer.dim is not None, "mtp.depth": self.mtp.depth > 0}.items():
            if is_used:
                reason = f"is not supported together with model.{name}"
                yield Problem("vision.num_layers", reason, value=self.vision.num_layers, accepted="null")

    def _check_shared(self) -> Iterator[Problem]:
        """Shared keys and values must come from a kind in the prefix with the same KV heads."""
        for name, kind in self.kinds.items():
            source = kind.attention.shares
            if source is None:
                continue
            path, prefix = f"kinds.{name}.attention.shares", [k for k in self.prefix if k in self.kinds]
            sources = [k for k in prefix if self.kinds[k].attention.shares is None and k not in self.pattern]
            if source not in sources:
                reason = "must be a kind that is used only in model.prefix and has its own keys and values"
                yield Problem(path, reason, value=source, accepted=", ".join(dict.fromkeys(sources)) or "null")
            elif self._kv_sizes(self.kinds[source]) != self._kv_sizes(kind):
                yield Problem(path, "has a different num_kv_heads or head_dim; they must be equal", value=source)

    def _kv_sizes(self, kind: Kind) -> tuple[int, int]:
        attention = kind.attention
        return attention.num_kv_heads or self.num_kv_heads, attention.head_dim or self.head_dim

    def _check_heads(self) -> Iterator[Problem]:
        for prefix, kind in {
            "": None,
            **{f"kinds.{name}.attention.": kind for name, kind in self.kinds.items()},
        }.items():
            layer = kind.attention if kind else None
            heads = layer.num_heads if layer and layer.num_heads else self.num_heads
            kv_heads = layer.num_kv_heads if layer and layer.num_kv_heads else self.num_kv_heads
            head_dim = layer.head_dim if layer and layer.head_dim else self.head_dim
            is_repeat = layer is not None and (layer.num_heads, layer.num_kv_heads) == (None, None)
            if heads % kv_heads and not is_repeat:
                divisors = [str(n) for n in range(1, heads + 1) if heads % n == 0]
                yield Problem(
                    f"{prefix}num_kv_heads",
                    f"does not divide {prefix}num_heads={heads}",
                    value=kv_heads,
                    accepted=", ".join(divisors),
                )
            if head_dim % 2 and not (layer is not None and layer.head_dim is None):
                yield Problem(
                    f"{prefix}head_dim", "is odd, but RoPE rotates pairs", value=head_dim, accepted="an even number"
                )
            elif layer and int(head_dim * layer.rope.share) not in range(2, head_dim + 1, 2):
                accepted = f"a value for which share * head_dim={head_dim} is even"
                yield Problem(
                    f"{prefix}rope.share",
                    "does not select a whole number of pairs",
                    value=layer.rope.share,
                    accepted=accepted,
                )
