"""Fields of task=distill."""

from collections.abc import Iterator
from enum import Enum
from typing import ClassVar

from maxhydra.config.declare import Schema, option, schema, section
from maxhydra.config.errors import Problem, show
from maxhydra.config.schema.decode import LARGEST, Engine
from maxhydra.config.schema.model import Mixer, Model
from maxhydra.config.schema.run import Task


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
    """Model option of the teacher. null: the model of the run or Hugging Face folder in weights."""
    mesh: str | None = None
    """Mesh option of the teacher, on the student's devices or on its own `devices`. null: the student's."""
    devices: float = option(0, ge=0)
    """Devices that only run the teacher, while the others train: a fraction under 1, or a number. 0: all devices do
    both."""
    top_k: int | None = option(None, ge=1)
    """With devices: number of the teacher's most likely next tokens whose logits are sent to the devices that train,
    for each position. null: all logits."""
    align: bool = False
    """Whether the teacher has another tokenizer: completions of the student (on_policy.fraction=1,
    divergence=reverse_kl) are tokenized for it, and log-probs are compared over the shortest spans of text that both
    tokenizations share."""
    overrides: list[str] = option([])
    """Overrides of these options, quoted, such as ["model.num_layers=2", "mesh.tensor=4"]."""

    def check(self) -> Iterator[Problem]:
        for name in ("model", "mesh"):
            if getattr(self, name) is not None and self.weights is None:
                yield Problem(name, "is not used without weights", value=getattr(self, name), accepted="null")
        if self.devices and self.weights is None:
            yield Problem("devices", "is not used without weights", value=self.devices, accepted="0")
        if self.top_k is not None and not self.devices:
            reason = "is used with devices only: on the student's devices, the teacher's logits are not sent"
            yield Problem("top_k", reason, value=self.top_k, accepted="null, or set devices")
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
class OnPolicy(Schema):
    """Distillation on completions that the student samples itself (Agarwal et al., 2024; Gu et al., 2024)."""

    fraction: float = option(0.0, ge=0, le=1)
    """Fraction of batches in which the student samples the last assistant turn of each conversation anew, chosen by
    run.seed; their loss is the divergence alone. The other batches are those of the data."""
    max_tokens: int = option(256, ge=1)
    """Maximum tokens of a completion, as far as train.seq_len has space after the prompt."""
    temperature: float = option(1.0, gt=0, le=LARGEST)
    """Sampling temperature."""
    keep_rollouts: int = option(200_000, ge=0)
    """Number of completions that the run folder keeps in rollouts/; 0: none."""
    engine: Engine = section(Engine)


class WeightMap(Enum):
    none = "none"
    bilinear = "bilinear"
    linear = "linear"


@schema
class LearnToInit(Schema):
    """Learned initialization: with init_layers, the student may have other attention heads than the teacher. Its query,
    key, value and output projections start as linear maps of the teacher's, trained before the first step with the
    distillation loss; all other weights are the teacher's."""

    map: WeightMap = WeightMap.none
    """bilinear: a matrix for the heads and one for the head dimension, of each projection and layer; linear: one matrix
    for all of them, with more parameters; none: the projections must have the teacher's shapes."""
    steps: int = option(100, ge=1)
    """Steps that train the maps, each on the first micro-batch of a batch."""
    learning_rate: float = option(1e-3, gt=0)
    """Learning rate of the maps, trained by Adam."""

    def check(self) -> Iterator[Problem]:
        for name in ("steps", "learning_rate"):
            value, default = getattr(self, name), getattr(LearnToInit, name)
            if self.map is WeightMap.none and value != default:
                accepted = f"{default}, the default, or map=bilinear or linear"
                yield Problem(name, "is not used with map=none", value=value, accepted=accepted)


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
    on_policy: OnPolicy = section(OnPolicy)
    init_layers: list[int] | None = option(None, ge=0)
    """Teacher layers that initialize a new student, one per student layer, together with embedding, final norm and
    head. null: initialized as any other run."""
    learn_to_init: LearnToInit = section(LearnToInit)

    def check(self) -> Iterator[Problem]:
        uses_beta = self.divergence is Divergence.jensen_shannon
        if uses_beta != (self.beta is not None):
            reason = "is needed by" if uses_beta else "is not used by"
            accepted = "over 0 and under 1; 0.5 is symmetric" if uses_beta else "null"
            yield Problem("beta", f"{reason} divergence={self.divergence.value}", value=self.beta, accepted=accepted)
        if self.beta is None and self.beta_end is not None:
            yield Problem("beta_end", "is not used without beta", value=self.beta_end, accepted="null")
        yield from self._check_alignment()
        kind = self.learn_to_init.map
        if kind is not WeightMap.none and self.init_layers is None:
            reason, hint = "needs the layers of the teacher", "set task.init_layers"
            yield Problem("learn_to_init.map", reason, value=kind, accepted="none", hint=hint)
        if kind is not WeightMap.none and self.teacher.devices:
            reason = "is not supported with a teacher on its own devices"
            yield Problem("learn_to_init.map", reason, value=kind, accepted="none, or teacher.devices=0")
        if self.teacher.weights is None:
            if self.features.loss is not FeatureLoss.none:
                reason = "needs the teacher's activations, which are not in the data"
                yield Problem("features.loss", reason, value=self.features.loss, hint="set teacher.weights")
            if self.init_layers is not None:
                reason = "needs the teacher's weights"
                yield Problem("init_layers", reason, value=self.init_layers, hint="set teacher.weights")
            if self.on_policy.fraction:
                reason = "needs a teacher that scores new completions"
                yield Problem("on_policy.fraction", reason, value=self.on_policy.fraction, hint="set teacher.weights")

    def _check_alignment(self) -> Iterator[Problem]:
        """A teacher with another tokenizer scores sampled texts; it has no distribution over the student's tokens."""
        if not self.teacher.align:
            return
        needed = {
            "divergence": (self.divergence, Divergence.reverse_kl),
            "on_policy.fraction": (self.on_policy.fraction, 1.0),
            "on_policy.temperature": (self.on_policy.temperature, 1.0),
            "alpha": (self.alpha, 1.0),
            "alpha_end": (self.alpha_end, None),
            "temperature": (self.temperature, 1.0),
            "temperature_end": (self.temperature_end, None),
            "features.loss": (self.features.loss, FeatureLoss.none),
            "teacher.top_k": (self.teacher.top_k, None),
            "init_layers": (self.init_layers, None),
        }
        for path, (value, only) in needed.items():
            if value != only:
                yield Problem(path, "is not supported with teacher.align=true", value=value, accepted=show(only))

    @property
    def separate_devices(self) -> tuple[str, float]:
        return "task.teacher.devices", self.teacher.devices

    def check_model(self, model: Model) -> Iterator[Problem]:
        mixers = {model.kinds[name].mixer for name in (*model.prefix, *model.pattern) if name in model.kinds}
        if self.learn_to_init.map is not WeightMap.none and mixers != {Mixer.attention}:
            reason = "is only supported with layers of mixer=attention"
            yield Problem("learn_to_init.map", reason, value=self.learn_to_init.map, accepted="none")
        for problem in (*self.on_policy.engine.check_model(model), *self.on_policy.engine.check_one_group()):
            yield problem.under("on_policy")
        if (self.teacher.top_k or 0) > model.vocab_size:
            reason = "exceeds the size of the vocabulary"
            yield Problem("teacher.top_k", reason, value=self.teacher.top_k, accepted=f"1 to {model.vocab_size}")
