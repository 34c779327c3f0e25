"""Fields of task=distill."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Schema, option, schema, section
from maxhydra.config.errors import Problem
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
    """The model that is learned from, beside the student in every step."""

    weights: str | None = None
    """Its weights: what checkpoint.load_parameters takes. null: top logits in the data (data.record_type=teacher)."""
    model: str | None = None
    """Option of the group model that it is. null: that of the run which weights names."""
    mesh: str | None = None
    """Option of the group mesh by which its weights are split, over the same devices. null: as the student's."""
    overrides: list[str] = option([])
    """Changes to these options, in quotes, such as ["model.num_layers=2", "mesh.tensor=4"]."""

    def check(self) -> Iterator[Problem]:
        for name in ("model", "mesh"):
            if getattr(self, name) is not None and self.weights is None:
                yield Problem(name, "is not used without weights", value=getattr(self, name), accepted="null")
        for override in self.overrides:
            group = override.lstrip("+").partition(".")[0]
            if group not in ("model", "mesh") or getattr(self, group) is None:
                reason = f"{override!r} changes no option that is named here"
                yield Problem("overrides", reason, value=self.overrides, accepted="keys of model or mesh, beside them")


@schema
class Features(Schema):
    """Likeness of the residual stream after chosen layers, besides that of the predictions."""

    loss: FeatureLoss = FeatureLoss.none
    """cosine: 1 - cosine; l2: mean squared difference; of each token's activations, after layers of the same width."""
    weight: float = option(1.0, gt=0)
    """What it counts for beside the rest of the loss."""
    student_layers: list[int] = option([], ge=0)
    """Layers of the student, from 0."""
    teacher_layers: list[int] = option([], ge=0)
    """The teacher's layer for each of them."""

    def check(self) -> Iterator[Problem]:
        if len(self.student_layers) != len(self.teacher_layers):
            reason = f"names {len(self.teacher_layers)} layers for {len(self.student_layers)} of the student"
            yield Problem("teacher_layers", reason, value=self.teacher_layers)
        if (self.loss is not FeatureLoss.none) != bool(self.student_layers):
            reason = f"{'is empty with' if not self.student_layers else 'is not used by'} loss={self.loss.value}"
            yield Problem("student_layers", reason, value=self.student_layers)


@schema
class DistillTask(Task):
    """Trains a student on what a teacher thinks of the next token."""

    teacher: Teacher = section(Teacher)
    divergence: Divergence = Divergence.forward_kl
    """forward_kl: KL(teacher | student); reverse_kl: KL(student | teacher); jensen_shannon: beta KL(teacher | m) +
    (1 - beta) KL(student | m), m = beta teacher + (1 - beta) student (Agarwal et al., 2024)."""
    alpha: float = option(1.0, ge=0, le=1)
    """Share of the divergence in the loss; the rest is cross-entropy with the data."""
    alpha_end: float | None = option(None, ge=0, le=1)
    """alpha at the run's end. null: as at its start."""
    beta: float | None = option(None, gt=0, lt=1)
    """jensen_shannon: the teacher's share in the mixture."""
    beta_end: float | None = option(None, gt=0, lt=1)
    """beta at the run's end. null: as at its start."""
    temperature: float = option(1.0, gt=0)
    """Both distributions are softmax(logits / temperature), and the divergence counts temperature^2 times, which keeps
    the size of its gradient (Hinton et al., 2015)."""
    temperature_end: float | None = option(None, gt=0)
    """temperature at the run's end. null: as at its start."""
    course: Course = Course.linear
    """The way from the start of alpha, beta and temperature to their end."""
    features: Features = section(Features)
    init_layers: list[int] | None = option(None, ge=0)
    """Layers of the teacher that a new student begins with, one for each of its own; with them come embedding, final
    norm and head. null: it begins as any other run."""

    def check(self) -> Iterator[Problem]:
        is_mixed = self.divergence is Divergence.jensen_shannon
        if is_mixed != (self.beta is not None):
            reason = "is needed by" if is_mixed else "is not used by"
            accepted = "over 0 and under 1; 0.5 treats both alike" if is_mixed else "null"
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
