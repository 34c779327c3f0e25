"""Fields of task=grpo."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Schema, option, schema, section
from maxhydra.config.errors import Problem
from maxhydra.config.schema.decode import LARGEST, Engine
from maxhydra.config.schema.model import Model
from maxhydra.config.schema.run import Task


class PolicyLoss(Enum):
    grpo = "grpo"
    dr_grpo = "dr_grpo"
    dapo = "dapo"
    gspo = "gspo"


class Scale(Enum):
    group = "group"
    batch = "batch"
    none = "none"


class KlEstimator(Enum):
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


@schema
class Clip(Schema):
    """How far an update may move the probability of a token (or, with gspo, of an answer)."""

    low: float = option(0.2, ge=0, lt=1)
    """Ratios of new to old probability below 1 - low give no gradient that would lower them."""
    high: float = option(0.2, ge=0)
    """Ratios above 1 + high give no gradient that would raise them."""


@schema
class Kl(Schema):
    """What ties the model to the one that it starts from."""

    beta: float = option(0.0, ge=0)
    """Weight of the divergence from the starting weights; 0 keeps none of them."""
    estimator: KlEstimator = KlEstimator.k3
    """With r = log p_start - log p of a token: k1 is -r, k2 is r^2 / 2, k3 is exp(r) - r - 1 (Schulman, 2020)."""


@schema
class Evaluation(Schema):
    """How held-out prompts are answered: train.eval_batches batches of them."""

    samples: int = option(1, ge=1)
    """Answers to each prompt, k of pass@k and maj@k."""
    temperature: float = option(1.0, ge=0, le=LARGEST)
    """Divides the logits; 0 takes the likeliest token."""


@schema
class GrpoTask(Task):
    """Reinforcement learning from groups of answers to a prompt, each worth more or less than its group's mean."""

    group_size: int = option(8, ge=2)
    """Answers to each prompt; a batch of train.per_device_batch_size rows and more holds whole groups."""
    max_tokens: int = option(256, ge=1)
    """Tokens of an answer at most; what they leave of train.seq_len is for the prompt."""
    loss: PolicyLoss = PolicyLoss.grpo
    """grpo: mean over tokens, then over answers (Shao et al., 2024); dr_grpo: over answers, each divided by max_tokens
    (Liu et al., 2025); dapo: over all tokens (Yu et al., 2025); gspo: ratios of whole answers (Zheng et al., 2025)."""
    clip: Clip = section(Clip)
    kl: Kl = section(Kl)
    scale: Scale | None = None
    """What a reward less its group's mean is divided by: the standard deviation in its group, in the batch, or nothing.
    null: nothing for loss=dr_grpo, else that of the group."""
    mask_degenerate: bool = True
    """Groups whose rewards are all equal count for nothing; otherwise with advantage 0, as a share of the mean."""
    rounds: int = option(1, ge=1)
    """Times that prompts are drawn for a batch at most, until it is full of groups whose rewards differ (dynamic
    sampling); the last round's others fill what is left."""
    importance_cap: float | None = option(None, gt=0)
    """Tokens are weighted by the ratio of their probabilities in training and in sampling, up to this. null: not."""
    iterations: int = option(1, ge=1)
    """Updates on each batch of answers."""
    off_policy_steps: int = option(0, ge=0)
    """Batches of answers that are written ahead, while training goes on, each with the weights of that time; 0 writes
    each with the newest weights, and waits for it."""
    rollout_mesh: list[str] = option([])
    """The mesh on which answers are written, as overrides such as ['mesh=ddp'] or ['mesh=fsdp_tp','mesh.tensor=2']; the
    weights are moved over to it. Empty: that of training, where they are used as they lie."""
    evaluation: Evaluation = section(Evaluation)
    engine: Engine = section(Engine)

    def check_model(self, model: Model) -> Iterator[Problem]:
        yield from self.engine.check_model(model)
