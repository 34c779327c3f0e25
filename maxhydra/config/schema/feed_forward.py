"""Schema of feed-forward layers, mixtures of experts, embeddings and multi-token prediction."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH, Schema, option, schema, section
from maxhydra.config.errors import Problem


class Activation(Enum):
    silu = "silu"
    gelu = "gelu"
    gelu_tanh = "gelu_tanh"
    relu = "relu"
    relu_squared = "relu_squared"
    sigmoid = "sigmoid"
    tanh = "tanh"
    linear = "linear"


class MlpKind(Enum):
    gated = "gated"
    plain = "plain"


class ParallelMoe(Enum):
    none = "none"
    moe = "moe"


@schema
class Mlp(Schema):
    """Feed-forward, gated (Shazeer, 2020: SwiGLU with silu, GeGLU with gelu or gelu_tanh) or plain."""

    kind: MlpKind = MlpKind.gated
    """gated: down(activation(gate(x)) * up(x)); plain: down(activation(up(x)))."""
    dim: int | None = option(None, ge=1, le=MAX_WIDTH)
    """Hidden size of this kind. null: model.mlp_dim."""
    activation: Activation = Activation.silu
    """Activation of the gate or, if plain, of the hidden layer; gelu is exact, gelu_tanh its approximation.
    relu_squared: relu(x)^2 (So et al., 2021); linear: none, so that a gated MLP is bilinear."""
    bias: bool = False
    """Add a bias to the projections."""


class RouterScores(Enum):
    softmax = "softmax"
    softmax_of_chosen = "softmax_of_chosen"
    sigmoid = "sigmoid"
    sqrt_softplus = "sqrt_softplus"


class GroupScore(Enum):
    max = "max"
    top2_sum = "top2_sum"


class Scaled(Enum):
    output = "output"
    input = "input"


class Gate(Enum):
    none = "none"
    sigmoid = "sigmoid"


@schema
class Router(Schema):
    """Scores every expert for every token in float32; each token is routed to its top_k experts."""

    scores: RouterScores = RouterScores.softmax
    """softmax over all experts (Shazeer et al., 2017), softmax_of_chosen over the logits of the top_k experts only,
    an independent sigmoid per expert (DeepSeek-AI, 2024), or the square root of softplus (DeepSeek-V4, 2026)."""
    normalize: bool = True
    """Divide the scores of the top_k experts by their sum; those of softmax_of_chosen sum to one already."""
    normalize_eps: float = option(1e-20, gt=0)
    """Added to that sum."""
    scale: float = option(1.0, gt=0)
    """Factor on the scores of the top_k experts."""
    scaled: Scaled = Scaled.output
    """Multiply the score with the expert's output, or with its input (Llama 4, 2025)."""
    bias: bool = False
    """Add a trained bias to the router logits."""
    norm: bool = False
    """Normalize the router's input by its root mean square, a learned scale and sqrt(emb_dim) (Gemma 4, 2026)."""
    expert_scale: bool = False
    """Multiply each expert's score by a learned factor, after normalization."""
    groups: int = option(1, ge=1, le=MAX_EXPERTS)
    """Group-limited routing: number of groups of adjacent experts (DeepSeek-AI, 2024)."""
    top_groups: int = option(1, ge=1, le=MAX_EXPERTS)
    """Number of groups from which a token's experts are chosen."""
    group_score: GroupScore = GroupScore.max
    """Score of a group: its best expert score (max), or the sum of its two best (top2_sum)."""
    bias_rate: float | None = option(None, ge=0)
    """Loss-free balancing (Wang et al., 2024): a bias that affects expert selection but not the scores. After
    each step it rises by this much for experts below the mean load and falls for the others. null: no bias."""
    by_token: bool = False
    """Experts of a token are those of its id in a table that is loaded with the weights and not trained; scores only
    weight them (Roller et al., 2021)."""


@schema
class Shared(Schema):
    """Shared expert that processes every token (DeepSeek-AI, 2024); several are one expert of their total size."""

    dim: int | None = option(None, ge=1, le=MAX_WIDTH)
    """Hidden size. null: no shared expert."""
    gate: Gate = Gate.none
    """Gate on its output: none, or the sigmoid of a projection of the token."""


@schema
class Moe(Schema):
    """A mixture of experts (Shazeer et al., 2017): MLPs, of which each token uses the top_k."""

    experts: int | None = option(None, ge=2, le=MAX_EXPERTS)
    """Number of experts per layer."""
    top_k: int = option(2, ge=1, le=MAX_EXPERTS)
    """Number of experts per token."""
    kind: MlpKind = MlpKind.gated
    """gated: routed and shared experts are down(activation(gate(x)) * up(x)); plain: down(activation(up(x)))."""
    dim: int | None = option(None, ge=1, le=MAX_WIDTH)
    """Hidden size of an expert. null: model.mlp_dim."""
    latent_dim: int | None = option(None, ge=1, le=MAX_WIDTH)
    """Width of the inputs and outputs of routed experts: one projection for all of them before, one after their sum.
    Router and shared expert have the width of the residual stream. null: routed experts have it too."""
    activation: Activation = Activation.silu
    """Activation of the gate or, if plain, of the hidden layer in routed and shared experts."""
    bias: bool = False
    """Add a bias to the projections of a routed expert."""
    clamp: float | None = option(None, gt=0)
    """Clamped SwiGLU (OpenAI, 2025): gate is clamped from above, up to [-clamp, clamp], and the result is
    (up + 1) * gate * sigmoid(clamp_slope * gate). null: activation(gate) * up."""
    clamp_slope: float = option(1.702, gt=0)
    """Slope of the sigmoid if clamp is set."""
    limit: float | None = option(None, gt=0)
    """Bound of the two factors of an expert, routed or shared: activation(min(gate, limit)) * clip(up, -limit, limit).
    null: no bound."""
    router: Router = section(Router)
    shared: Shared = section(Shared)
    capacity_factor: float | None = option(None, gt=0)
    """Expert capacity as a multiple of an even share of a sequence's tokens; later tokens are dropped (Lepikhin et al.,
    2021). No token is dropped if null, with a KV cache, or in task=score."""
    balance_weight: float = option(0.0, ge=0)
    """Weight of the auxiliary load balancing loss of each layer (Fedus et al., 2022): experts * sum(load fraction *
    mean score), which is 1 for an even load."""

    def check(self) -> Iterator[Problem]:
        if self.experts is None:
            return
        router = self.router
        yield from self._check_gate()
        if self.limit is not None and self.clamp is not None:
            yield Problem("limit", f"cannot be combined with clamp={self.clamp}", value=self.limit, accepted="null")
        if router.by_token and (router.bias_rate is not None or router.groups > 1):
            reason = "chooses experts by the token, so that router.bias_rate and router.groups have no effect"
            yield Problem("router.by_token", reason, value=True, accepted="false, or bias_rate=null and groups=1")
        if router.by_token and router.scores is RouterScores.softmax_of_chosen:
            yield Problem("router.by_token", "is not supported with scores=softmax_of_chosen", True, accepted="false")
        if self.top_k > self.experts:
            yield Problem("top_k", f"is more than experts={self.experts}", value=self.top_k)
        if self.experts % router.groups:
            divisors = ", ".join(str(n) for n in range(1, self.experts + 1) if self.experts % n == 0)
            yield Problem(
                "router.groups", f"does not divide experts={self.experts}", value=router.groups, accepted=divisors
            )
        elif router.top_groups > router.groups:
            yield Problem("router.top_groups", f"is more than groups={router.groups}", value=router.top_groups)
        elif self.top_k > router.top_groups * (self.experts // router.groups):
            available = router.top_groups * (self.experts // router.groups)
            yield Problem(
                "top_k", f"is more than the {available} experts in router.top_groups groups", value=self.top_k
            )
        elif router.group_score is GroupScore.top2_sum and self.experts // router.groups < 2:
            yield Problem("router.group_score", "needs groups of at least two experts", value="top2_sum")
        if router.scaled is Scaled.input and (self.bias or router.scores is RouterScores.softmax_of_chosen):
            yield Problem(
                "router.scaled",
                "input is only supported for experts without bias and not with softmax_of_chosen",
                value="input",
            )

    def _check_gate(self) -> Iterator[Problem]:
        """Bounds of two factors need two factors."""
        for name in ("clamp", "limit"):
            value = getattr(self, name)
            if self.kind is MlpKind.plain and value is not None:
                yield Problem(name, "bounds gate and up, and kind=plain has no gate", value, accepted="null")


class Dispatch(Enum):
    auto = "auto"
    all_to_all = "all_to_all"
    all_gather = "all_gather"


@schema
class ExpertParallel(Schema):
    """How tokens reach the devices of their experts, and return, if experts are sharded (mesh.expert)."""

    dispatch: Dispatch = Dispatch.auto
    """all_to_all sends each token to the devices of its experts: top_k * (n - 1) / n rows per token over n devices, and
    as many back. all_gather sends every token to all devices, n - 1 rows, and reduce-scatters the outputs. auto:
    whichever sends less, all_gather for n <= top_k. Both give the same result."""
    buffer: float | None = option(4.0, gt=0)
    """Rows that a device can receive, as a multiple of an even load; a row is a token for one of its experts, and an
    even load is top_k times the tokens of a device. At most n are used, which all tokens for one device fill: up to
    `buffer` devices nothing is dropped. Beyond it, the last rows of the longest queues are dropped and counted in
    moe/dropped. In bfloat16 a layer needs 4 * emb_dim + 6 * moe.dim bytes per row. null: n, never drop. With a KV cache
    and in task=score it is null."""
    chunks: int = option(1, ge=1, le=16)
    """Parts in which a device dispatches its tokens, so that the communication of one part overlaps with the matmuls of
    another. Each has its part of the buffer. Tokens that they do not divide are dispatched at once."""


class EmbeddingScale(Enum):
    one = "one"
    root_dim = "root_dim"


class Positions(Enum):
    none = "none"
    learned = "learned"
    sinusoidal = "sinusoidal"


@schema
class Embedding(Schema):
    """Token embedding."""

    scale: EmbeddingScale = EmbeddingScale.one
    """Factor on embeddings: one, or root_dim, sqrt(emb_dim) in the compute dtype (Vaswani et al., 2017)."""
    positions: Positions = Positions.none
    """learned: add a learned vector for each of context_length positions (Radford et al., 2018). sinusoidal: add sines,
    then cosines, of position * f_i with f_i = 10000^(-i / (emb_dim / 2 - 1)) (Vaswani et al., 2017)."""


@schema
class PerLayer(Schema):
    """Per-layer embeddings: an additional small embedding of each token for every layer (Gemma 3n, 2025)."""

    dim: int | None = option(None, ge=1, le=MAX_WIDTH)
    """Dimension. null: no per-layer embeddings."""
    activation: Activation = Activation.gelu_tanh
    """Activation of the gate through which a layer uses its embedding."""


@schema
class Mtp(Schema):
    """Multi-token prediction (DeepSeek-V3, 2024): extra layers of the last kind predict later tokens."""

    depth: int = option(0, ge=0, le=MAX_LAYERS)
    """Number of extra tokens that are predicted, each by an additional layer. Decoding uses the first one, with
    task.engine.speculation.method=mtp. 0: none."""
    loss_weight: float = option(0.3, ge=0)
    """Weight of the mean cross-entropy of the extra predictions."""
