"""Mixtures of experts as data: how tokens find their experts, what the experts are, how their load is kept even."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Schema, option, schema, section
from maxhydra.config.errors import Problem
from maxhydra.config.schema.feed_forward import Activation


class RouterScores(Enum):
    softmax = "softmax"
    softmax_of_chosen = "softmax_of_chosen"
    sigmoid = "sigmoid"


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
    """Scores every expert for every token, in float32; the best get the token."""

    scores: RouterScores = RouterScores.softmax
    """softmax over all experts (Shazeer et al., 2017), softmax_of_chosen over the logits of the chosen alone, sigmoid
    of each by itself (DeepSeek-AI, 2024)."""
    normalize: bool = True
    """Whether the scores of the chosen are divided by their sum; softmax_of_chosen sums to one anyway."""
    scale: float = option(1.0, gt=0)
    """Factor on the scores of the chosen."""
    scaled: Scaled = Scaled.output
    """What a score multiplies: an expert's output, or its input (Llama 4, 2025)."""
    bias: bool = False
    """Whether the logits have a trained bias."""
    norm: bool = False
    """Whether tokens are normalised for the router alone, by their root mean square, a learned scale and sqrt(emb_dim)
    (Gemma 4, 2026)."""
    expert_scale: bool = False
    """Whether a learned factor of each expert multiplies its score, after the division by the sum."""
    groups: int = option(1, ge=1)
    """Groups of neighbouring experts; a token's experts come from its best groups (DeepSeek-AI, 2024)."""
    top_groups: int = option(1, ge=1)
    """Groups that a token's experts come from."""
    group_score: GroupScore = GroupScore.max
    """What a group is judged by: its best score, or the sum of its two best."""
    bias_rate: float | None = option(None, ge=0)
    """Loss-free balancing (Wang et al., 2024): a bias that counts in the choice alone, and after each step moves by
    this much, up for experts with less than the mean load, down for the others. null: no such bias."""


@schema
class Shared(Schema):
    """An expert that every token meets (DeepSeek-AI, 2024); several are one of their summed size."""

    dim: int | None = option(None, ge=1)
    """Hidden size. null: there is none."""
    gate: Gate = Gate.none
    """Factor on its output: none, or the sigmoid of a projection of the token."""


@schema
class Moe(Schema):
    """A mixture of experts (Shazeer et al., 2017): gated feed-forwards, of which a router gives each token a few."""

    experts: int | None = option(None, ge=2)
    """Experts of a layer."""
    top_k: int = option(2, ge=1)
    """Experts that a token meets."""
    dim: int | None = option(None, ge=1)
    """Hidden size of an expert, where it differs from the model's mlp_dim."""
    activation: Activation = Activation.silu
    """Function on the gate, of experts and of the shared one."""
    bias: bool = False
    """Whether the three maps of an expert have biases."""
    clamp: float | None = option(None, gt=0)
    """Clamped SwiGLU (OpenAI, 2025): gate up to this, up within plus and minus this, and (up + 1) * gate *
    sigmoid(clamp_slope * gate). null: activation(gate) * up."""
    clamp_slope: float = option(1.702, gt=0)
    """Slope of the sigmoid where clamp is set."""
    router: Router = section(Router)
    shared: Shared = section(Shared)
    capacity_factor: float | None = option(None, gt=0)
    """An expert takes at most this times an even share of the tokens of a sequence, the first to come, and the rest go
    without it (Lepikhin et al., 2021). With a cache, in task=score, and with null, no token is dropped."""
    balance_weight: float = option(0.0, ge=0)
    """Weight of the auxiliary loss experts * sum(load share * mean score) of each layer (Fedus et al., 2022), 1 where
    the load is even."""

    def check(self) -> Iterator[Problem]:
        if self.experts is None:
            return
        router = self.router
        if self.top_k > self.experts:
            yield Problem("top_k", f"is more than experts={self.experts}", value=self.top_k)
        if self.experts % router.groups:
            fits = ", ".join(str(n) for n in range(1, self.experts + 1) if self.experts % n == 0)
            yield Problem(
                "router.groups", f"does not divide experts={self.experts}", value=router.groups, accepted=fits
            )
        elif router.top_groups > router.groups:
            yield Problem("router.top_groups", f"is more than groups={router.groups}", value=router.top_groups)
        elif self.top_k > router.top_groups * (self.experts // router.groups):
            room = router.top_groups * (self.experts // router.groups)
            yield Problem("top_k", f"is more than the {room} experts of router.top_groups groups", value=self.top_k)
        elif router.group_score is GroupScore.top2_sum and self.experts // router.groups < 2:
            yield Problem("router.group_score", "needs groups of two experts or more", value="top2_sum")
        if router.scaled is Scaled.input and (self.bias or router.scores is RouterScores.softmax_of_chosen):
            yield Problem(
                "router.scaled", "input serves experts without bias and scores of each by itself", value="input"
            )
