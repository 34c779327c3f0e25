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
    DeltaGate,
    Indexer,
    Mla,
    Moba,
    Pairs,
    QkNorm,
    Rope,
    RopeKind,
    Temperature,
    ValueSource,
)
from maxhydra.config.schema.audio import Audio
from maxhydra.config.schema.diffusion import Diffusion
from maxhydra.config.schema.encoders import encoder_problems, speech_problems
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
from maxhydra.config.schema.heads import head_problems
from maxhydra.config.schema.kernels import (
    AttentionBackend,
    FusedLinearBackend,
    GroupedMatmulBackend,
    ModelKernels,
    Projection,
)
from maxhydra.config.schema.layer_kind import FeedForward, Kind, Mixer, Norms
from maxhydra.config.schema.recurrence import Convolution, Ssm

__all__ = [
    "Activation",
    "Attention",
    "AttentionBackend",
    "AttentionBias",
    "Audio",
    "Convolution",
    "Delta",
    "DeltaBackend",
    "DeltaGate",
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
    "Moba",
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
    "Ssm",
    "Temperature",
    "ValueSource",
    "Vision",
]
from maxhydra.config.schema.remat import Remat, RematPolicy
from maxhydra.config.schema.residual import HyperConnections, Multipliers
from maxhydra.config.schema.speech import Speech
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
    hyper_connections: HyperConnections = section(HyperConnections)
    multipliers: Multipliers = section(Multipliers)
    dropout: float = option(0.0, ge=0, lt=1)
    """Dropout rate on the output of each residual branch, in training."""
    init_scale: float = option(1.0, gt=0)
    """Factor on the initial weights, which are normally distributed with variance 1 / fan-in."""
    qk_clip: float | None = option(None, gt=0)
    """QK-Clip (Kimi K2, 2025): after a training step, the query and key projections of each head whose largest
    attention logit exceeded this are scaled down, so that it would have been this. null: no clipping."""
    diffusion: Diffusion = section(Diffusion)
    transfer: Transfer = section(Transfer)
    dtypes: Dtypes = section(Dtypes)
    remat: Remat = section(Remat)
    scan_unroll: int | None = option(None, ge=1, le=MAX_LAYERS)
    """Pattern repetitions unrolled per iteration of the scan over layers; num_layers unrolls all. null: all to train
    on one GPU, unless that takes minutes to compile, and 1 otherwise."""
    expert_parallel: ExpertParallel = section(ExpertParallel)
    kernels: ModelKernels = section(ModelKernels)
    vision: Vision = section(Vision)
    audio: Audio = section(Audio)
    speech: Speech = section(Speech)
    path: str | None = None
    """model=from_hf: Hugging Face folder, or repository ORG/NAME[@REVISION] on the hub, whose config.json defines the
    model. Weights and tokenizer are loaded from it, unless checkpoint.load_parameters or data.tokenizer is set."""

    @property
    def has_experts(self) -> bool:
        """True if a layer has a mixture of experts."""
        return any(self.kinds[name].moe.experts is not None for name in {*self.prefix, *self.pattern})

    @property
    def stream_dim(self) -> int:
        """Width of what one layer passes to the next: all residual streams."""
        return self.emb_dim * self.hyper_connections.streams

    def layer_kinds(self) -> list[str]:
        """The kind of every layer from first to last: the prefix, then the pattern repeated."""
        repeated = self.num_layers - len(self.prefix)
        return [*self.prefix, *(self.pattern[index % len(self.pattern)] for index in range(repeated))]

    @property
    def is_recurrent(self) -> bool:
        """True if a layer keeps a state of fixed size per sequence, so that prefixes cannot be shared."""
        used = {*self.prefix, *self.pattern}
        return self.has_memory or any(kind.is_recurrent for name, kind in self.kinds.items() if name in used)

    @property
    def has_memory(self) -> bool:
        """True if a layer looks up n-grams of the tokens."""
        return any(self.kinds[name].engram.vocab_sizes for name in {*self.prefix, *self.pattern} if name in self.kinds)

    @property
    def reads_tokens(self) -> bool:
        """True if a layer reads the ids of the tokens."""
        used = [self.kinds[name] for name in {*self.prefix, *self.pattern} if name in self.kinds]
        return self.has_memory or any(kind.moe.experts and kind.moe.router.by_token for kind in used)

    @property
    def has_axis_positions(self) -> bool:
        """True if RoPE of a layer turns with time, row and column of an image token."""
        return any(kind.attention.rope.sections for kind in self.kinds.values())

    @property
    def video_audio_id(self) -> int | None:
        """Placeholder of the audio between the steps of a video; None: there is none."""
        return self.audio.placeholder_id if self.vision.videos.use_audio_in_video else None

    def check(self) -> Iterator[Problem]:
        yield from head_problems(self.kinds, self.num_heads, self.num_kv_heads, self.head_dim)
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
        yield from self._check_indexers()
        yield from self._check_qk_clip()
        yield from self._check_streams()
        yield from self._check_blocks()
        if self.mtp.depth and self.per_layer.dim is not None:
            reason = "is not supported together with mtp layers"
            yield Problem("per_layer.dim", reason, value=self.per_layer.dim, accepted="null, or mtp.depth=0")
        if self.mtp.depth and any(kind.latent_dim is not None for kind in self.kinds.values()):
            reason = "is not supported with layers of one residual branch (latent_dim)"
            yield Problem("mtp.depth", reason, value=self.mtp.depth, accepted="0")
        used = [self.kinds[name] for name in (*self.prefix, *self.pattern) if name in self.kinds]
        if used and all(kind.mixer is Mixer.none for kind in used):
            yield Problem("kinds", "gives no layer a mixer", accepted="mixer other than none in one of them")
        if self.mtp.depth and self.multipliers.logit_divisor != 1:
            reason = "is not supported together with mtp layers"
            yield Problem("multipliers.logit_divisor", reason, value=self.multipliers.logit_divisor, accepted="1.0")
        if self.mtp.depth and self.reads_tokens:
            reason = "is not supported with layers that have an engram or router.by_token"
            yield Problem("mtp.depth", reason, value=self.mtp.depth, accepted="0")
        if self.embedding.positions is Positions.sinusoidal and self.emb_dim % 2:
            reason = "is odd, but sinusoidal positions are pairs of sine and cosine"
            yield Problem("emb_dim", reason, value=self.emb_dim, accepted="an even number")
        yield from self._check_encoders()
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

    def _check_streams(self) -> Iterator[Problem]:
        """Several residual streams are only known to layers of two branches."""
        if self.hyper_connections.streams == 1:
            return
        conflicts = {"mtp.depth=0": self.mtp.depth > 0, "per_layer.dim=null": self.per_layer.dim is not None}
        for name, kind in self.kinds.items():
            conflicts[f"kinds.{name}.latent_dim=null"] = kind.latent_dim is not None
            conflicts[f"kinds.{name}.parallel_moe=none"] = kind.parallel_moe is not ParallelMoe.none
            conflicts[f"kinds.{name}.is_scaled=false"] = kind.is_scaled
        for accepted, is_conflict in conflicts.items():
            if is_conflict:
                path, streams = "hyper_connections.streams", self.hyper_connections.streams
                yield Problem(path, f"is only supported with {accepted}", value=streams, accepted=f"1, or {accepted}")

    def _check_blocks(self) -> Iterator[Problem]:
        """Mixture of block attention is not a kernel: its masks differ between heads."""
        backend = self.kernels.attention
        has_blocks = any(kind.attention.moba.block_size is not None for kind in self.kinds.values())
        if has_blocks and backend not in (AttentionBackend.auto, AttentionBackend.xla):
            reason = "has no form for attention.moba"
            yield Problem("kernels.attention", reason, value=backend.value, accepted="auto, xla")

    def _check_qk_clip(self) -> Iterator[Problem]:
        """QK-Clip needs logits that scale with the projections: norms of queries and keys would undo it."""
        if self.qk_clip is None:
            return
        used = {name: self.kinds[name] for name in (*self.prefix, *self.pattern) if name in self.kinds}
        if used and not any(kind.mixer in (Mixer.attention, Mixer.mla) for kind in used.values()):
            reason = "has no effect: no layer has mixer=attention or mla"
            yield Problem("qk_clip", reason, value=self.qk_clip, accepted="null")
        for name, kind in used.items():
            norm, block = kind.attention.qk_norm, kind.attention.moba.block_size
            if kind.mixer is Mixer.attention and block is not None:
                reason = "is not supported with qk_clip, which reads the logits of all earlier tokens"
                yield Problem(f"kinds.{name}.attention.moba.block_size", reason, value=block, accepted="null")
            if kind.mixer is Mixer.attention and norm is not QkNorm.none:
                reason = "bounds the attention logits and undoes qk_clip"
                yield Problem(f"kinds.{name}.attention.qk_norm", reason, value=norm.value, accepted="none")

    def _check_encoders(self) -> Iterator[Problem]:
        kinds = {name: self.kinds[name] for name in {*self.prefix, *self.pattern} if name in self.kinds}
        conflicts = {"mtp.depth": self.mtp.depth > 0}
        if len(layers := self.vision.deepstack) > len(self.prefix) or len(layers) >= self.num_layers:
            reason = f"needs as many layers in model.prefix, which has {len(self.prefix)}"
            yield Problem("vision.deepstack", reason, value=layers, hint="move the first layers to model.prefix")
        conflicts["hyper_connections.streams"] = bool(layers) and self.hyper_connections.streams > 1
        encoders = self.vision, self.audio
        yield from encoder_problems(*encoders, vocab_size=self.vocab_size, kinds=kinds, conflicts=conflicts)
        sizes = {"vocab_size": self.vocab_size, "num_layers": self.num_layers}
        yield from speech_problems(self.speech, self.vision, **sizes)

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

    def _check_indexers(self) -> Iterator[Problem]:
        """A layer that shares an indexer follows the one that has it, in the prefix or in each part of the pattern."""
        last = self.kinds.get((self.pattern or [""])[-1])
        if self.mtp.depth and last is not None and last.mla.indexer_of is not None:
            reason = "adds layers of the last kind, which shares an indexer (mla.indexer_of)"
            yield Problem("mtp.depth", reason, value=self.mtp.depth, accepted="0")
        for field in ("prefix", "pattern"):
            layers = getattr(self, field)
            for index, name in enumerate(layers):
                source = self.kinds[name].mla.indexer_of if name in self.kinds else None
                before = layers[:index] if field == "prefix" or source in self.pattern else [*self.prefix, *layers]
                found = {kind: self.kinds[kind] for kind in before if kind in self.kinds}
                owners = [k for k, v in found.items() if v.mixer is Mixer.mla and v.mla.indexer.top_k is not None]
                if source is not None and source not in owners:
                    reason = f"must be the kind of an earlier layer of model.{field}, and have an indexer"
                    path, accepted = f"kinds.{name}.mla.indexer_of", ", ".join(owners) or "null"
                    yield Problem(path, reason, value=source, accepted=accepted)

    def _kv_sizes(self, kind: Kind) -> tuple[int, int]:
        attention = kind.attention
        return attention.num_kv_heads or self.num_kv_heads, attention.head_dim or self.head_dim
