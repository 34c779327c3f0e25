"""Fields of the training tasks: task=dpo, grpo and distill."""

import math
from collections.abc import Iterator
from enum import Enum
from typing import ClassVar

from maxhydra.config.declare import Schema, option, schema, section
from maxhydra.config.errors import Problem
from maxhydra.config.schema.decode import LARGEST, Engine
from maxhydra.config.schema.model import Model
from maxhydra.config.schema.run import Task


class PreferenceLoss(Enum):
    sigmoid = "sigmoid"
    ipo = "ipo"
    orpo = "orpo"
    simpo = "simpo"
    cpo = "cpo"
    kto_pair = "kto_pair"


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
    """Trains on preference pairs, a chosen and a rejected completion (data.record_type=preference)."""

    trains_mtp: ClassVar[bool] = False

    loss: PreferenceLoss = PreferenceLoss.sigmoid
    """sigmoid: DPO (Rafailov et al., 2023); ipo (Azar et al., 2023); orpo (Hong et al., 2024); simpo (Meng et al.,
    2024); cpo (Xu et al., 2024), usually with nll_weight=1; kto_pair: KTO over pairs (Ethayarajh et al., 2024)."""
    beta: float = option(0.1, gt=0)
    """Factor on the log-ratios; larger stays closer to the reference. orpo: weight of the odds ratio."""
    label_smoothing: float = option(0.0, ge=0, lt=0.5)
    """sigmoid, simpo, cpo: assumed fraction of pairs with swapped labels."""
    nll_weight: float = option(0.0, ge=0)
    """Weight of an additional loss, the mean negative log-likelihood of the tokens of the chosen completion. With
    loss=sigmoid this is RPO (Pang et al., 2024)."""
    margin: float | None = option(None, ge=0)
    """simpo: target margin between the rewards of the chosen and the rejected completion."""
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


class PolicyLoss(Enum):
    dapo = "dapo"
    grpo = "grpo"
    dr_grpo = "dr_grpo"
    gspo = "gspo"
    cispo = "cispo"
    rloo = "rloo"
    reinforce_pp = "reinforce_pp"


# Losses with one ratio per completion.
SEQUENCE_LEVEL = (PolicyLoss.gspo, PolicyLoss.rloo)


class Baseline(Enum):
    group = "group"
    leave_one_out = "leave_one_out"
    batch = "batch"


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
    """Weight of the KL divergence from the initial weights; 0 does not keep a copy of them."""
    estimator: KlEstimator = KlEstimator.k3
    """With r = log p_start - log p of a token: k1 is -r, k2 is r^2 / 2, k3 is exp(r) - r - 1 (Schulman, 2020)."""
    in_reward: bool | None = None
    """Subtract beta log(p / p_start) of the sampled tokens from the reward, instead of adding the divergence to the
    loss: the sum over the completion, with reinforce_pp the sum over the remaining tokens. null: true for rloo and
    reinforce_pp."""


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

    trains_mtp: ClassVar[bool] = False

    group_size: int = option(8, ge=2)
    """Completions per prompt; a batch consists of whole groups."""
    max_tokens: int = option(256, ge=1)
    """Maximum tokens of a completion; the rest of train.seq_len is for the prompt."""
    loss: PolicyLoss = PolicyLoss.dapo
    """dapo: mean over all tokens (Yu et al., 2025); grpo: mean over tokens, then over completions (Shao et al., 2024);
    dr_grpo: token sum divided by max_tokens, mean over completions (Liu et al., 2025); gspo: ratios of whole
    completions (Zheng et al., 2025); cispo: log-probs weighted by the clipped ratio (MiniMax, 2025); rloo:
    leave-one-out baseline (Ahmadian et al., 2024); reinforce_pp: advantages normalized over the batch (Hu et al.,
    2025)."""
    clip: Clip = section(Clip)
    kl: Kl = section(Kl)
    entropy_bonus: float = option(0.0, ge=0)
    """Weight of the mean entropy of the next-token distribution, which the loss subtracts."""
    baseline: Baseline | None = None
    """Subtracted from a reward: the mean of its group, of the other completions of its group, or of the batch.
    null: leave_one_out for rloo, batch for reinforce_pp, otherwise group."""
    scale: Scale | None = None
    """Divisor of the advantage: the standard deviation of the group or of the batch, or none. null: batch with
    baseline=batch, none for dr_grpo and rloo, otherwise group."""
    mask_degenerate: bool = True
    """Exclude groups with equal rewards from the loss, unless baseline=batch; false keeps them with advantage 0."""
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
    iterations: int = option(1, ge=1)
    """Updates per batch of rollouts."""
    off_policy_steps: int = option(0, ge=0)
    """Batches of rollouts that are generated ahead, concurrently with training and with the weights of that time; 0
    generates each batch with the newest weights before training on it."""
    rollout_mesh: list[str] = option([])
    """Mesh of the rollouts, as overrides such as ['mesh=ddp'] or ['mesh=fsdp_tp','mesh.tensor=2']; weights are
    resharded to it. Empty: the training mesh, without resharding."""
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
        if baseline_of(self) is Baseline.batch and scale_of(self) is Scale.group:
            yield Problem(
                "scale", "is not supported with baseline=batch", value=self.scale, accepted="batch, none, null"
            )
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

    def check_model(self, model: Model) -> Iterator[Problem]:
        yield from self.engine.check_model(model)
        yield from self.engine.check_one_group()


def baseline_of(task: GrpoTask) -> Baseline:
    """task.baseline, or the default of the loss."""
    defaults = {PolicyLoss.rloo: Baseline.leave_one_out, PolicyLoss.reinforce_pp: Baseline.batch}
    return task.baseline or defaults.get(task.loss, Baseline.group)


def scale_of(task: GrpoTask) -> Scale:
    """task.scale, or the default of baseline and loss."""
    if task.scale is None and baseline_of(task) is Baseline.batch:
        return Scale.batch
    return task.scale or (Scale.none if task.loss in (PolicyLoss.dr_grpo, PolicyLoss.rloo) else Scale.group)


def importance_of(task: GrpoTask) -> Importance | None:
    """task.importance, or the default of the loss; None without correction."""
    default = Importance.sequence_truncate if task.loss in SEQUENCE_LEVEL else Importance.token_truncate
    return None if task.importance_cap is None else task.importance or default


def is_kl_in_reward(task: GrpoTask) -> bool:
    """Whether the KL penalty is part of the reward; otherwise it is part of the loss."""
    default = task.loss in (PolicyLoss.rloo, PolicyLoss.reinforce_pp)
    return task.kl.beta > 0 and (default if task.kl.in_reward is None else task.kl.in_reward)


class Divergence(Enum):
    forward_kl = "forward_kl"
    reverse_kl = "reverse_kl"
    jensen_shannon = "jensen_shannon"


class FeatureLoss(Enum):
    none = "none"
    cosine = "cosine"
    l2 = "l2"


class Course(Enum):
    linear = "linear"
    cosine = "cosine"


@schema
class Teacher(Schema):
    """The teacher model, which runs next to the student in every step."""

    weights: str | None = None
    """Teacher weights, as for checkpoint.load_parameters. null: top logits in the data (data.record_type=teacher)."""
    model: str | None = None
    """Model option of the teacher. null: the model of the run in weights."""
    mesh: str | None = None
    """Mesh option of the teacher, on the same devices. null: the student's mesh."""
    overrides: list[str] = option([])
    """Overrides of these options, quoted, such as ["model.num_layers=2", "mesh.tensor=4"]."""

    def check(self) -> Iterator[Problem]:
        for name in ("model", "mesh"):
            if getattr(self, name) is not None and self.weights is None:
                yield Problem(name, "is not used without weights", value=getattr(self, name), accepted="null")
        for override in self.overrides:
            group = override.lstrip("+").partition(".")[0]
            if group not in ("model", "mesh") or getattr(self, group) is None:
                reason = f"{override!r} does not belong to a teacher option that is set"
                yield Problem(
                    "overrides", reason, value=self.overrides, accepted="keys of model or mesh, if that option is set"
                )


@schema
class Features(Schema):
    """Feature loss: similarity of student and teacher activations after selected layers."""

    loss: FeatureLoss = FeatureLoss.none
    """cosine: 1 - cosine; l2: mean squared difference; per token; the layers must have the same width."""
    weight: float = option(1.0, gt=0)
    """Weight of the feature loss."""
    student_layers: list[int] = option([], ge=0)
    """Layers of the student, from 0."""
    teacher_layers: list[int] = option([], ge=0)
    """Teacher layer for each student layer."""

    def check(self) -> Iterator[Problem]:
        if len(self.student_layers) != len(self.teacher_layers):
            reason = f"has {len(self.teacher_layers)} layers, but student_layers has {len(self.student_layers)}"
            yield Problem("teacher_layers", reason, value=self.teacher_layers)
        if (self.loss is not FeatureLoss.none) != bool(self.student_layers):
            reason = f"{'is empty with' if not self.student_layers else 'is not used by'} loss={self.loss.value}"
            yield Problem("student_layers", reason, value=self.student_layers)


@schema
class DistillTask(Task):
    """Distills a teacher's next-token distribution into a student."""

    trains_mtp: ClassVar[bool] = False

    teacher: Teacher = section(Teacher)
    divergence: Divergence = Divergence.forward_kl
    """forward_kl: KL(teacher | student); reverse_kl: KL(student | teacher); jensen_shannon: beta KL(teacher | m) +
    (1 - beta) KL(student | m), m = beta teacher + (1 - beta) student (Agarwal et al., 2024)."""
    alpha: float = option(1.0, ge=0, le=1)
    """Weight of the divergence in the loss; cross-entropy with the data has weight 1 - alpha."""
    alpha_end: float | None = option(None, ge=0, le=1)
    """alpha at the end of the run. null: constant."""
    beta: float | None = option(None, gt=0, lt=1)
    """jensen_shannon: weight of the teacher in the mixture."""
    beta_end: float | None = option(None, gt=0, lt=1)
    """beta at the end of the run. null: constant."""
    temperature: float = option(1.0, gt=0)
    """Both distributions are softmax(logits / temperature), and the divergence is multiplied by temperature^2, which
    keeps the scale of its gradient (Hinton et al., 2015)."""
    temperature_end: float | None = option(None, gt=0)
    """temperature at the end of the run. null: constant."""
    course: Course = Course.linear
    """Schedule of alpha, beta and temperature from start to end."""
    features: Features = section(Features)
    init_layers: list[int] | None = option(None, ge=0)
    """Teacher layers that initialize a new student, one per student layer, together with embedding, final norm and
    head. null: initialized as any other run."""

    def check(self) -> Iterator[Problem]:
        uses_beta = self.divergence is Divergence.jensen_shannon
        if uses_beta != (self.beta is not None):
            reason = "is needed by" if uses_beta else "is not used by"
            accepted = "over 0 and under 1; 0.5 is symmetric" if uses_beta else "null"
            yield Problem("beta", f"{reason} divergence={self.divergence.value}", value=self.beta, accepted=accepted)
        if self.beta is None and self.beta_end is not None:
            yield Problem("beta_end", "is not used without beta", value=self.beta_end, accepted="null")
        if self.teacher.weights is None:
            if self.features.loss is not FeatureLoss.none:
                reason = "needs the teacher's activations, which are not in the data"
                yield Problem("features.loss", reason, value=self.features.loss, hint="set teacher.weights")
            if self.init_layers is not None:
                reason = "needs the teacher's weights"
                yield Problem("init_layers", reason, value=self.init_layers, hint="set teacher.weights")
