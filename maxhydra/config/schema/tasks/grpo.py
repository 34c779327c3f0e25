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
    """Clipping of the ratio of new to old probability of a token (with gspo, of a completion)."""

    low: float = option(0.2, ge=0, lt=1)
    """Ratios below 1 - low have no gradient that would lower them further."""
    high: float = option(0.2, ge=0)
    """Ratios above 1 + high have no gradient that would raise them further."""


@schema
class Kl(Schema):
    """KL penalty to the initial model."""

    beta: float = option(0.0, ge=0)
    """Weight of the KL divergence from the initial weights; 0 does not keep a copy of them."""
    estimator: KlEstimator = KlEstimator.k3
    """With r = log p_start - log p of a token: k1 is -r, k2 is r^2 / 2, k3 is exp(r) - r - 1 (Schulman, 2020)."""


@schema
class Evaluation(Schema):
    """Evaluation on train.eval_batches batches of held-out prompts."""

    samples: int = option(1, ge=1)
    """Completions per prompt, k of pass@k and maj@k."""
    temperature: float = option(1.0, ge=0, le=LARGEST)
    """Sampling temperature; 0 is greedy."""


@schema
class GrpoTask(Task):
    """Group relative policy optimization: the advantage of a completion is its reward relative to its group."""

    group_size: int = option(8, ge=2)
    """Completions per prompt; a batch consists of whole groups."""
    max_tokens: int = option(256, ge=1)
    """Maximum tokens of a completion; the rest of train.seq_len is for the prompt."""
    loss: PolicyLoss = PolicyLoss.grpo
    """grpo: mean over tokens, then over completions (Shao et al., 2024); dr_grpo: token sum divided by max_tokens, mean
    over completions (Liu et al., 2025); dapo: mean over all tokens (Yu et al., 2025); gspo: ratios of whole
    completions (Zheng et al., 2025)."""
    clip: Clip = section(Clip)
    kl: Kl = section(Kl)
    scale: Scale | None = None
    """Divisor of the advantage (reward minus group mean): the standard deviation of the group or of the batch, or none.
    null: none for loss=dr_grpo, otherwise group."""
    mask_degenerate: bool = True
    """Exclude groups with equal rewards from the loss; false keeps them with advantage 0 in the mean."""
    rounds: int = option(1, ge=1)
    """Dynamic sampling: maximum number of times that new prompts are sampled until the batch is full of groups with
    different rewards; groups of the last round fill the rest."""
    importance_cap: float | None = option(None, gt=0)
    """Truncated importance sampling: weight tokens by the ratio of training to rollout probability, up to this cap.
    null: no weights."""
    iterations: int = option(1, ge=1)
    """Updates per batch of rollouts."""
    off_policy_steps: int = option(0, ge=0)
    """Batches of rollouts that are generated ahead, concurrently with training and with the weights of that time; 0
    generates each batch with the newest weights before training on it."""
    rollout_mesh: list[str] = option([])
    """Mesh of the rollouts, as overrides such as ['mesh=ddp'] or ['mesh=fsdp_tp','mesh.tensor=2']; weights are
    resharded to it. Empty: the training mesh, without resharding."""
    evaluation: Evaluation = section(Evaluation)
    engine: Engine = section(Engine)

    def check_model(self, model: Model) -> Iterator[Problem]:
        yield from self.engine.check_model(model)
