"""Fields of the tasks that train on preferences and rewards: task=dpo and grpo."""

import dataclasses
import math
from collections.abc import Iterator
from enum import Enum
from typing import ClassVar

from maxhydra.config.declare import option, schema, section
from maxhydra.config.errors import Problem, show
from maxhydra.config.schema.decode import Engine
from maxhydra.config.schema.model import Model
from maxhydra.config.schema.run import Task
from maxhydra.config.schema.tasks.policy import (
    PAIRWISE,
    SEQUENCE_LEVEL,
    Baseline,
    Clip,
    Critic,
    Evaluation,
    Importance,
    Kl,
    KlEstimator,
    PolicyLoss,
    Scale,
)


class PreferenceLoss(Enum):
    sigmoid = "sigmoid"
    ipo = "ipo"
    orpo = "orpo"
    simpo = "simpo"
    cpo = "cpo"
    kto_pair = "kto_pair"
    kto = "kto"


class Reference(Enum):
    auto = "auto"
    cached = "cached"
    adapter_off = "adapter_off"
    none = "none"


# Losses without a reference model.
WITHOUT_REFERENCE = (PreferenceLoss.orpo, PreferenceLoss.simpo, PreferenceLoss.cpo)
# Losses that support label smoothing.
SMOOTHED = (PreferenceLoss.sigmoid, PreferenceLoss.simpo, PreferenceLoss.cpo)


@schema
class DpoTask(Task):
    """Trains on preference pairs, a chosen and a rejected completion (data.record_type=preference), or with loss=kto on
    single completions, desirable or not (data.record_type=labeled)."""

    trains_mtp: ClassVar[bool] = False

    loss: PreferenceLoss = PreferenceLoss.sigmoid
    """sigmoid: DPO (Rafailov et al., 2023); ipo (Azar et al., 2023); orpo (Hong et al., 2024); simpo (Meng et al.,
    2024); cpo (Xu et al., 2024), usually with nll_weight=1; kto_pair: KTO over pairs (Ethayarajh et al., 2024);
    kto: KTO over labeled completions."""
    beta: float = option(0.1, gt=0)
    """Factor on the log-ratios; larger stays closer to the reference. orpo: weight of the odds ratio."""
    label_smoothing: float = option(0.0, ge=0, lt=0.5)
    """sigmoid, simpo, cpo: assumed fraction of pairs with swapped labels."""
    nll_weight: float = option(0.0, ge=0)
    """Weight of an additional loss, the mean negative log-likelihood of the tokens of the chosen completion. With
    loss=sigmoid this is RPO (Pang et al., 2024)."""
    margin: float | None = option(None, ge=0)
    """simpo: target margin between the rewards of the chosen and the rejected completion."""
    desirable_weight: float = option(1.0, gt=0)
    """kto: weight of the losses of desirable completions. Weights times numbers of completions should be within a ratio
    of 1 to 4/3."""
    undesirable_weight: float = option(1.0, gt=0)
    """kto: weight of the losses of undesirable completions."""
    reference: Reference = Reference.auto
    """Reference log-probs. cached: of the initial weights, computed once before training; adapter_off: of the model
    without its adapter, in every step; none: for orpo, simpo and cpo; auto: adapter_off with an adapter, else
    cached, or none for a loss without a reference."""

    def check(self) -> Iterator[Problem]:
        if self.label_smoothing and self.loss not in SMOOTHED:
            accepted = "0, or loss=sigmoid, simpo or cpo"
            yield Problem(
                "label_smoothing", f"is not used by loss={self.loss.value}", self.label_smoothing, accepted=accepted
            )
        if self.nll_weight and self.loss is PreferenceLoss.orpo:
            reason = "is not used by loss=orpo, which contains this likelihood with a weight of 1"
            yield Problem("nll_weight", reason, self.nll_weight, accepted="0")
        if (self.margin is not None) != (self.loss is PreferenceLoss.simpo):
            reason = "is not used by" if self.margin is not None else "is needed by"
            accepted = "null" if self.margin is not None else "0 or more; about beta / 2 is usual"
            yield Problem("margin", f"{reason} loss={self.loss.value}", value=self.margin, accepted=accepted)
        for name in ("desirable_weight", "undesirable_weight"):
            if self.loss is not PreferenceLoss.kto and getattr(self, name) != getattr(DpoTask, name):
                reason = f"is not used by loss={self.loss.value}"
                yield Problem(name, reason, value=getattr(self, name), accepted="1, or loss=kto")
        if self.nll_weight and self.loss is PreferenceLoss.kto:
            reason = "is not used by loss=kto, whose completions may be undesirable"
            yield Problem("nll_weight", reason, self.nll_weight, accepted="0")
        is_free = self.loss in WITHOUT_REFERENCE
        if self.reference is not Reference.auto and is_free != (self.reference is Reference.none):
            accepted = "auto, none" if is_free else "auto, cached, adapter_off"
            reason = f"is not supported by loss={self.loss.value}"
            yield Problem("reference", reason, value=self.reference, accepted=accepted)

    def reference_with(self, *, adapter: bool) -> Reference:
        """Return the reference of a run with or without an adapter."""
        if self.reference is not Reference.auto:
            return self.reference
        if self.loss in WITHOUT_REFERENCE:
            return Reference.none
        return Reference.adapter_off if adapter else Reference.cached


# Keys of task=grpo that losses of pairs do not use.
UNUSED_BY_PAIRS = (
    *("clip.low", "clip.high", "clip.dual", "kl.estimator", "kl.in_reward", "entropy_bonus", "baseline", "scale"),
    *("mask_degenerate", "importance", "importance_cap", "importance_floor", "router_replay"),
)


@schema
class GrpoTask(Task):
    """Group relative policy optimization: the advantage of a completion is its reward relative to its group."""

    trains_mtp: ClassVar[bool] = False

    group_size: int = option(8, ge=1)
    """Completions per prompt; a batch consists of whole groups. 1 needs baseline=critic or batch."""
    max_tokens: int = option(256, ge=1)
    """Maximum tokens of a completion; the rest of train.seq_len is for the prompt."""
    loss: PolicyLoss = PolicyLoss.dapo
    """dapo: mean over all tokens (Yu et al., 2025); grpo: mean over tokens, then over completions (Shao et al., 2024);
    dr_grpo: token sum divided by max_tokens, mean over completions (Liu et al., 2025); gspo: ratios of whole
    completions (Zheng et al., 2025); cispo: log-probs weighted by the clipped ratio (MiniMax, 2025); rloo:
    leave-one-out baseline (Ahmadian et al., 2024); reinforce_pp: advantages normalized over the batch (Hu et al.,
    2025). dpo, ipo: online DPO (Guo et al., 2024), the loss of task=dpo on the best and the worst completion of each
    prompt; a batch then consists of pairs, one of each prompt."""
    clip: Clip = section(Clip)
    kl: Kl = section(Kl)
    entropy_bonus: float = option(0.0, ge=0)
    """Weight of the mean entropy of the next-token distribution, which the loss subtracts."""
    baseline: Baseline | None = None
    """Subtracted from a reward: the mean of its group, of the other completions of its group, or of the batch; critic:
    the values of task.critic. null: leave_one_out for rloo, batch for reinforce_pp, otherwise group."""
    critic: Critic = section(Critic)
    scale: Scale | None = None
    """Divisor of the advantage: the standard deviation of the group or of the batch, or none. null: batch with
    baseline=batch and critic, none for dr_grpo and rloo, otherwise group."""
    mask_degenerate: bool = True
    """Exclude groups with equal rewards from the loss, unless baseline=batch or critic; false keeps them with
    advantage 0."""
    mask_truncated: bool = False
    """Exclude completions that reached max_tokens from the loss (overlong filtering, DAPO)."""
    rounds: int = option(1, ge=1)
    """Dynamic sampling: maximum number of times that new prompts are sampled until the batch is full of groups with
    different rewards; groups of the last round fill the rest."""
    importance: Importance | None = None
    """Weights that correct for the difference between the probabilities of decode engine and trainer, by the ratio of
    each token or of the whole completion: truncate bounds the ratio, mask excludes tokens or completions out of
    bounds. null: sequence_truncate for gspo and rloo, otherwise token_truncate."""
    importance_cap: float | None = option(2.0, gt=0)
    """Upper bound of the importance ratio. null: no correction."""
    importance_floor: float | None = option(None, gt=0)
    """Lower bound of the importance ratio. null: none."""
    router_replay: bool = False
    """Use the experts that were chosen in sampling in training too, for models with a mixture of experts: routers of
    decode engine and trainer disagree where scores are close. Prompts are then not taken from the prefix cache."""
    iterations: int = option(1, ge=1)
    """Updates per batch of rollouts."""
    off_policy_steps: int = option(0, ge=0)
    """Batches of rollouts that are generated ahead, concurrently with training and with the weights of that time; 0
    generates each batch with the newest weights before training on it."""
    max_staleness: int | None = option(None, ge=0)
    """Asynchronous rollouts: the sampler runs while the weights are trained, and takes new weights in the middle of
    completions; maximum number of updates between sampling a token and the first update on it. null: synchronous."""
    rollout_devices: float = option(0, ge=0)
    """Devices that only sample, while the others train: a fraction under 1, or a number. 0: all devices do both."""
    rollout_mesh: list[str] = option([])
    """Mesh of the rollouts, as overrides such as ['mesh=ddp'] or ['mesh=fsdp_tp','mesh.tensor=2']; weights are
    resharded to it. Empty: the training mesh, without resharding unless there are rollout_devices."""
    keep_rollouts: int = option(200_000, ge=0)
    """Number of completions of training, and of evaluations, that the run folder keeps in rollouts/; 0: none."""
    evaluation: Evaluation = section(Evaluation)
    engine: Engine = section(Engine)

    def check(self) -> Iterator[Problem]:
        if self.loss is PolicyLoss.cispo:
            if self.clip.low != Clip.low:
                reason = "is not used by loss=cispo, which has no lower bound"
                yield Problem("clip.low", reason, value=self.clip.low, accepted=f"{Clip.low}, the default")
            if self.clip.dual is not None:
                yield Problem("clip.dual", "is not used by loss=cispo", value=self.clip.dual, accepted="null")
        yield from self._check_baseline()
        if self.kl.in_reward is not None and not self.kl.beta:
            yield Problem("kl.in_reward", "is not used with kl.beta=0", value=self.kl.in_reward, accepted="null")
        if is_kl_in_reward(self) and self.kl.estimator is not KlEstimator.k3:
            reason = "is not used by a penalty in the reward, which is log(p / p_start)"
            yield Problem("kl.estimator", reason, value=self.kl.estimator, accepted="k3, the default")
        for name in ("importance", "importance_floor"):
            if self.importance_cap is None and getattr(self, name) is not None:
                reason = "is not used without importance_cap"
                yield Problem(name, reason, value=getattr(self, name), accepted="null")
        if (self.importance_floor or 0) >= (self.importance_cap or math.inf):
            accepted = f"under importance_cap={self.importance_cap:g}"
            yield Problem("importance_floor", "leaves no ratio", value=self.importance_floor, accepted=accepted)
        if self.loss is PolicyLoss.rloo and self.importance in (Importance.token_truncate, Importance.token_mask):
            accepted = "sequence_truncate, sequence_mask"
            yield Problem("importance", "is not supported by loss=rloo", value=self.importance, accepted=accepted)

        yield from self._check_pairs()
        yield from self._check_asynchronous()

    def _check_pairs(self) -> Iterator[Problem]:
        if self.loss not in PAIRWISE:
            return
        if not self.kl.beta:
            yield Problem("kl.beta", f"is needed by loss={self.loss.value}", value=0, accepted="over 0; 0.1 is usual")
        for path in UNUSED_BY_PAIRS:
            section, _, name = path.rpartition(".")
            owner = getattr(self, section) if section else self
            value, default = getattr(owner, name), getattr(type(owner), name)
            if value != default:
                accepted = f"{show(default)}, the default"
                yield Problem(path, f"is not used by loss={self.loss.value}", value=value, accepted=accepted)

    def _check_baseline(self) -> Iterator[Problem]:
        baseline = baseline_of(self)
        if baseline in (Baseline.batch, Baseline.critic) and scale_of(self) is Scale.group:
            reason = f"is not supported with baseline={baseline.value}"
            yield Problem("scale", reason, value=self.scale, accepted="batch, none, null")
        if baseline in (Baseline.group, Baseline.leave_one_out) and self.group_size == 1:
            reason = f"is not supported with baseline={baseline.value}, which compares completions"
            yield Problem("group_size", reason, value=1, accepted="2 or more, or baseline=critic or batch")
        if baseline is Baseline.critic and self.loss in (PolicyLoss.rloo, PolicyLoss.reinforce_pp):
            reason = f"is not supported by loss={self.loss.value}"
            yield Problem("baseline", reason, value=self.baseline, accepted="group, leave_one_out, batch, null")
        for field in dataclasses.fields(Critic):
            value = getattr(self.critic, field.name)
            if baseline is not Baseline.critic and value != getattr(Critic, field.name):
                accepted = f"{getattr(Critic, field.name)}, the default"
                yield Problem(f"critic.{field.name}", "is used by baseline=critic only", value, accepted=accepted)

    def _check_asynchronous(self) -> Iterator[Problem]:
        if self.max_staleness is None:
            if self.rollout_devices:
                reason = "needs task.max_staleness: without it, sampling and training take turns"
                yield Problem("rollout_devices", reason, value=self.rollout_devices, accepted="0")
            return
        asynchronous = f"is not supported with max_staleness={self.max_staleness}"
        if self.off_policy_steps:
            yield Problem("off_policy_steps", asynchronous, value=self.off_policy_steps, accepted="0")
        if self.rounds > 1:
            yield Problem("rounds", asynchronous, value=self.rounds, accepted="1")
        if self.importance_cap is None:
            reason = f"is needed with max_staleness={self.max_staleness}: older weights sampled the tokens"
            yield Problem("importance_cap", reason, value=None, accepted="over 0; 2 is usual")
        if self.engine.deterministic:
            reason = f"{asynchronous}: completions depend on when weights arrive"
            yield Problem("engine.deterministic", reason, value=True, accepted="false")

    @property
    def separate_devices(self) -> tuple[str, float]:
        return "task.rollout_devices", self.rollout_devices

    @property
    def has_value_head(self) -> bool:
        return baseline_of(self) is Baseline.critic

    def check_model(self, model: Model) -> Iterator[Problem]:
        yield from self.engine.check_model(model)
        yield from self.engine.check_one_group()
        if self.router_replay and not model.has_experts:
            yield Problem("router_replay", "needs a model with experts", value=True, accepted="false")
        if self.router_replay and self.engine.prefix_cache:
            reason = "is not supported with router_replay, which needs the experts of all tokens"
            yield Problem("engine.prefix_cache", reason, value=True, accepted="false or null")


def preference_of(task: GrpoTask) -> DpoTask:
    """The preference loss of online DPO."""
    loss = PreferenceLoss.ipo if task.loss is PolicyLoss.ipo else PreferenceLoss.sigmoid
    return DpoTask(name="dpo", loss=loss, beta=task.kl.beta)  # type: ignore[call-arg]


def baseline_of(task: GrpoTask) -> Baseline:
    """task.baseline, or the default of the loss."""
    defaults = {PolicyLoss.rloo: Baseline.leave_one_out, PolicyLoss.reinforce_pp: Baseline.batch}
    return task.baseline or defaults.get(task.loss, Baseline.group)


def scale_of(task: GrpoTask) -> Scale:
    """task.scale, or the default of baseline and loss."""
    if task.scale is None and baseline_of(task) in (Baseline.batch, Baseline.critic):
        return Scale.batch
    return task.scale or (Scale.none if task.loss in (PolicyLoss.dr_grpo, PolicyLoss.rloo) else Scale.group)


def importance_of(task: GrpoTask) -> Importance | None:
    """task.importance, or the default of the loss; None without correction."""
    default = Importance.sequence_truncate if task.loss in SEQUENCE_LEVEL else Importance.token_truncate
    return None if task.importance_cap is None else task.importance or default


def is_kl_in_reward(task: GrpoTask) -> bool:
    """Whether the KL penalty is part of the reward; otherwise it is part of the loss."""
    default = task.loss in (PolicyLoss.rloo, PolicyLoss.reinforce_pp) or baseline_of(task) is Baseline.critic
    return task.kl.beta > 0 and (default if task.kl.in_reward is None else task.kl.in_reward)
