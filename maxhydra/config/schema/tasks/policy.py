"""Sections and choices of task=grpo: loss, baseline, clipping, KL penalty, critic, evaluation."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Schema, option, schema
from maxhydra.config.errors import Problem
from maxhydra.config.schema.decode import LARGEST


class PolicyLoss(Enum):
    dapo = "dapo"
    grpo = "grpo"
    dr_grpo = "dr_grpo"
    gspo = "gspo"
    cispo = "cispo"
    rloo = "rloo"
    reinforce_pp = "reinforce_pp"
    dpo = "dpo"
    ipo = "ipo"


# Losses of pairs, the best and the worst completion of a prompt.
PAIRWISE = (PolicyLoss.dpo, PolicyLoss.ipo)
# Losses with one ratio per completion.
SEQUENCE_LEVEL = (PolicyLoss.gspo, PolicyLoss.rloo)


class Baseline(Enum):
    group = "group"
    leave_one_out = "leave_one_out"
    batch = "batch"
    critic = "critic"


class Scale(Enum):
    group = "group"
    batch = "batch"
    none = "none"


class Importance(Enum):
    token_truncate = "token_truncate"
    token_mask = "token_mask"
    sequence_truncate = "sequence_truncate"
    sequence_mask = "sequence_mask"


class KlEstimator(Enum):
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


@schema
class Clip(Schema):
    """Clipping of the ratio of new to old probability of a token (with gspo and rloo, of a completion)."""

    low: float = option(0.2, ge=0, lt=1)
    """Ratios below 1 - low have no gradient that would lower them further."""
    high: float = option(0.2, ge=0)
    """Ratios above 1 + high have no gradient that would raise them further. cispo: upper bound 1 + high of the ratio as
    a weight of the gradient; 4 is usual."""
    dual: float | None = option(None, gt=1)
    """Dual clip (Ye et al., 2020): upper bound of the ratio if the advantage is negative. null: no bound."""

    def check(self) -> Iterator[Problem]:
        if self.dual is not None and self.dual <= 1 + self.high:
            reason = f"is not over 1 + clip.high = {1 + self.high:g}"
            yield Problem("dual", reason, value=self.dual, accepted=f"over {1 + self.high:g}")


@schema
class Kl(Schema):
    """KL penalty to the initial model."""

    beta: float = option(0.0, ge=0)
    """Weight of the KL divergence from the initial weights; 0 does not keep a copy of them. dpo, ipo: the factor beta
    of the log-ratios, which has the same effect; 0.1 is usual."""
    estimator: KlEstimator = KlEstimator.k3
    """With r = log p_start - log p of a token: k1 is -r, k2 is r^2 / 2, k3 is exp(r) - r - 1 (Schulman, 2020)."""
    in_reward: bool | None = None
    """Subtract beta log(p / p_start) of the sampled tokens from the reward, instead of adding the divergence to the
    loss: the sum over the completion, with reinforce_pp the sum over the remaining tokens, with baseline=critic at
    each token. null: true for rloo, reinforce_pp and baseline=critic."""


@schema
class Critic(Schema):
    """The critic of baseline=critic (PPO; Schulman et al., 2017): a value head on the hidden states of the policy."""

    discount: float = option(1.0, gt=0, le=1)
    """Discount of later rewards per token, gamma."""
    trace: float = option(0.95, ge=0, le=1)
    """lambda of generalized advantage estimation (Schulman et al., 2016); 1 is the return minus the value."""
    clip: float | None = option(0.2, gt=0)
    """Values that moved further than this from those at the start of the batch have no gradient. null: no clipping."""
    weight: float = option(0.1, gt=0)
    """Weight of the value loss, half the squared error, next to the loss of the policy, which shares its layers."""


@schema
class Evaluation(Schema):
    """Evaluation on train.eval_batches batches of held-out prompts."""

    samples: int = option(1, ge=1)
    """Completions per prompt, k of pass@k and maj@k."""
    temperature: float = option(1.0, ge=0, le=LARGEST)
    """Sampling temperature; 0 is greedy."""
