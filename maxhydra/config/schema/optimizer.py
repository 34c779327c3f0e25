"""Schema of the optimizer, the learning rate schedule and the trained parameters."""

from collections.abc import Iterator
from enum import Enum
from itertools import pairwise

from maxhydra.config.declare import Options, PlugInUse, Schema, option, schema, section
from maxhydra.config.errors import Problem
from maxhydra.config.schema.model import Dtype
from maxhydra.config.values import regex_problems


class OptimizerKind(Enum):
    adamw = "adamw"
    adafactor = "adafactor"
    sgd = "sgd"
    muon = "muon"
    lion = "lion"
    soap = "soap"
    schedule_free = "schedule_free"
    function = "function"


class MomentFormat(Enum):
    dynamic8 = "dynamic8"


class ScheduleKind(Enum):
    cosine = "cosine"
    wsd = "wsd"
    linear = "linear"
    constant = "constant"
    inverse_sqrt = "inverse_sqrt"


class DecayStyle(Enum):
    linear = "linear"
    cosine = "cosine"
    sqrt = "sqrt"
    exponential = "exponential"
    inverse = "inverse"


# Styles whose rate never reaches zero.
POSITIVE_STYLES = (DecayStyle.exponential, DecayStyle.inverse)
# Largest group of N:M sparsity, and the matrices that it prunes by default.
MAX_GROUP = 64
PRUNED = ["/attention/", "/mlp/(?!router)"]
DECAYING = (ScheduleKind.cosine, ScheduleKind.linear, ScheduleKind.wsd)


@schema
class Schedule(Schema):
    """Learning rate schedule: linear warm-up, then the curve of the kind."""

    kind: ScheduleKind = ScheduleKind.cosine
    """cosine, wsd (warm-up, stable, decay), linear, constant, inverse_sqrt."""
    warmup_steps: int = option(0, ge=0)
    """Steps of linear warm-up from zero."""
    final_fraction: float | None = option(None, ge=0, le=1)
    """cosine, linear, wsd: learning rate at the last step, as a fraction of the peak."""
    decay_steps: int | None = option(None, ge=1)
    """wsd: length of the final decay."""
    decay_style: DecayStyle | None = None
    """wsd: shape of the final decay, linear, cosine, sqrt (1 - sqrt of the progress; Haegele et al., 2024),
    exponential, or inverse (linear in 1 / rate; Wen et al., 2024)."""
    steps: int | None = option(None, ge=1)
    """Steps after which the schedule is complete; later steps keep its last rate. null: train.steps."""
    restarts: list[int] = option([], ge=1)
    """cosine, linear, wsd: numbers of steps after which a decay is complete and the rate returns to the peak. With wsd
    this is WSD-S (Wen et al., 2024), with cosine SGDR (Loshchilov and Hutter, 2017)."""

    def length(self, train_steps: int) -> int:
        """Steps of the schedule in a run of this length."""
        return train_steps if self.steps is None else self.steps

    def check(self) -> Iterator[Problem]:
        wsd, decays = self.kind is ScheduleKind.wsd, self.kind in DECAYING
        yield from _used(self, "optimizer/schedule", {"decay_steps": wsd, "decay_style": wsd, "final_fraction": decays})
        if self.decay_style in POSITIVE_STYLES and self.final_fraction == 0:
            reason = f"is never reached with decay_style={self.decay_style.value}"
            yield Problem("final_fraction", reason, value=0.0, accepted="over 0 and at most 1")
        if self.restarts and not decays:
            reason, accepted = f"is not used by kind={self.kind.value}, which has no decay", "[]"
            yield Problem("restarts", reason, value=self.restarts, accepted=accepted)
        shortest = max(self.decay_steps or 0, 1)
        starts = [self.warmup_steps, *self.restarts]
        if any(after - before < shortest for before, after in pairwise(starts)):
            reason = f"leaves less than {shortest} steps between warm-up and restarts"
            yield Problem("restarts", reason, value=self.restarts, accepted="ascending numbers of steps")

    def check_length(self, train_steps: int) -> Iterator[Problem]:
        """Yield the problem of a run that is too short for the schedule, with a path from the config root."""
        path = "train.steps" if self.steps is None else "optimizer.schedule.steps"
        needed = max(self.warmup_steps, *self.restarts, 0) + (self.decay_steps or 0)
        if needed > self.length(train_steps):
            yield Problem(
                path,
                f"is less than the {needed} steps of warm-up, restarts and decay in optimizer.schedule",
                value=self.length(train_steps),
                accepted=f"{needed} or more",
                hint="or reduce optimizer.schedule.warmup_steps, restarts and decay_steps",
            )


@schema
class Sparsity(Schema):
    """N:M sparsity: of every m consecutive inputs of an output, the n weights of the largest magnitude are kept."""

    n: int | None = option(None, ge=1, le=MAX_GROUP)
    """Weights that are kept of m. null: all weights are trained and used."""
    m: int | None = option(None, ge=2, le=MAX_GROUP)
    """Size of a group; divides the inputs of every target."""
    start_step: int = option(50, ge=1)
    """Updates after which the first masks are chosen; until then the weights are dense."""
    update_every: int = option(10, ge=1)
    """Updates between two choices of the masks. Pruned weights keep learning, by straight-through gradients."""
    targets: list[str] = option(PRUNED)
    """Pruned matrices: regular expressions on parameter paths."""

    def check(self) -> Iterator[Problem]:
        if (self.n is None) != (self.m is None):
            name, other = ("n", "m") if self.n is None else ("m", "n")
            yield Problem(name, f"is required together with {other}", value=None, accepted=f"2 to {MAX_GROUP}")
        if self.n is not None and self.m is not None and self.n >= self.m:
            yield Problem("n", f"is not smaller than m={self.m}", value=self.n, accepted=f"1 to {self.m - 1}")
        yield from regex_problems("targets", self.targets)
        if self.n is None:
            defaults = {"start_step": Sparsity.start_step, "update_every": Sparsity.update_every, "targets": PRUNED}
            for name, default in defaults.items():
                if getattr(self, name) != default:
                    hint = "set n and m, such as n=2 m=4"
                    yield Problem(name, "is not used without n and m", value=getattr(self, name), hint=hint)


MUON_OPTIONAL = ("matrix_weight_decay", "update_rms", "neuron_b2")
# Which of the kind-specific fields each optimizer uses; the others must stay null.
USES: dict[OptimizerKind, tuple[str, ...]] = {
    OptimizerKind.adamw: ("b1", "b2", "eps", "eps_root", "mu_dtype", "moments"),
    OptimizerKind.adafactor: ("b2_decay", "eps", "min_dim_factored"),
    OptimizerKind.sgd: ("momentum", "mu_dtype"),
    OptimizerKind.muon: ("b1", "b2", "eps", "eps_root", "momentum", "newton_schulz_steps", "mu_dtype", *MUON_OPTIONAL),
    OptimizerKind.lion: ("b1", "b2", "mu_dtype"),
    OptimizerKind.soap: ("b1", "b2", "eps", "precondition_every", "precondition_max_dim"),
    OptimizerKind.schedule_free: ("b1", "b2", "eps"),
    OptimizerKind.function: ("function",),
}
OPTIONAL = ("mu_dtype", "moments", "eps_root", *MUON_OPTIONAL)
# In bfloat16, subtracting less than 1/256 of a number leaves it unchanged.
LARGEST_DECAY = 0.995


@schema
class Optimizer(Schema):
    """Optimizer. Its option in conf/optimizer sets the fields that the kind uses and leaves the others null."""

    kind: OptimizerKind = OptimizerKind.adamw
    """adamw, adafactor, sgd, muon (matrices of the layers; adamw for the rest), lion, soap (as muon),
    schedule_free (AdamW at a constant rate; the average of its iterates is evaluated, saved and exported) or function
    (one of yours)."""
    function: str | None = option(None, plug_in=PlugInUse.here)
    """function: `package.module:function`, called with its options; returns the optax transformation of clipped
    gradients into updates, before weight decay and learning rate, such as optax.scale_by_adam()."""
    options: Options = section(Options)
    learning_rate: float = option(3e-4, gt=0)
    """Peak learning rate."""
    schedule: Schedule = section(Schedule)
    weight_decay: float = option(0.1, ge=0)
    """Decoupled weight decay, multiplied by the learning rate."""
    cautious_decay: bool = False
    """Decay a weight only in steps whose update also moves it towards zero (Chen et al., 2025)."""
    no_decay: list[str] = option(["norm", "bias"])
    """Parameters whose path matches one of these regular expressions are not decayed."""
    rate_ratios: dict[str, float] = option({}, ge=0)
    """Learning rate of parameters whose path matches a regular expression, relative to that of the others; ratios of
    several matching ones are multiplied."""
    layer_decay: float | None = option(None, gt=0, le=1)
    """Learning rate of each layer relative to that of the layer after it; the embedding is before the first layer.
    null: all are equal."""
    ema_decay: float | None = option(None, gt=0, lt=1)
    """Decay of an exponential moving average of the weights, which is evaluated, saved and exported in place of the
    trained weights; a run resumes from both. null: no average."""
    trainable: list[str] = option([".*"])
    """Parameters whose path matches one of these regular expressions are trained; all others are frozen and have no
    optimizer state."""
    clip_norm: float | None = option(1.0, gt=0)
    """Global norm to which gradients are clipped. null: no clipping."""
    b1: float | None = option(None, ge=0, lt=1)
    """adamw, soap, muon (its adamw part), lion: decay of the first moment; schedule_free: share of the average in the
    weights at which gradients are computed."""
    b2: float | None = option(None, ge=0, lt=1)
    """adamw, soap, muon (its adamw part), schedule_free: decay of the second moment; lion: decay of the momentum."""
    b2_decay: float | None = option(None, gt=0, lt=1)
    """adafactor: exponent of the second moment's decay, 1 - step ** -b2_decay."""
    eps: float | None = option(None, gt=0)
    """adamw, adafactor, muon, soap, schedule_free: added to the denominator for numerical stability."""
    eps_root: float | None = option(None, ge=0)
    """adamw, muon (its adamw part): added to the second moment under the square root. null: 0."""
    momentum: float | None = option(None, ge=0, lt=1)
    """sgd, muon: momentum (Nesterov in muon)."""
    newton_schulz_steps: int | None = option(None, ge=1)
    """muon: iterations of the orthogonalization."""
    matrix_weight_decay: float | None = option(None, ge=0)
    """muon: weight decay of the matrices that it updates. null: weight_decay."""
    update_rms: float | None = option(None, ge=0)
    """muon: root mean square of an update of a matrix before the learning rate; 0 is Jordan's scale, sqrt(max(1,
    outputs / inputs)) times an orthogonal matrix. null: 0.2, as in AdamW."""
    neuron_b2: float | None = option(None, ge=0, lt=1)
    """muon: decay of the second moment of the update of each neuron, by which it is divided (NorMuon; Li et al., 2025).
    null: neurons are not normalized."""
    precondition_every: int | None = option(None, ge=1)
    """soap: steps between two refreshes of the eigenvectors by which gradients are rotated."""
    precondition_max_dim: int | None = option(None, ge=1)
    """soap: longer sides of a matrix are not rotated. A side of n has two n x n matrices in the optimizer state."""
    min_dim_factored: int | None = option(None, ge=1)
    """adafactor: the second moment is factored if the two largest dimensions are at least this."""
    mu_dtype: Dtype | None = None
    """Dtype of the first moment. null: that of the weights."""
    grad_dtype: Dtype | None = None
    """Dtype of the gradients from the backward pass to the update, in which those of micro-batches add up. null: that
    of the weights to add up, model.dtypes.compute otherwise."""
    offload: bool = False
    """Keep the optimizer state in pinned host memory. The update copies the arrays of one group of weights after the
    other to the device and back; device memory holds a few of them at a time."""
    offload_weights: bool = False
    """Keep the trained weights in pinned host memory too: a step copies them to the device twice, for the forward pass
    in the compute dtype and for the update."""
    sparsity: Sparsity = section(Sparsity)
    moments: MomentFormat | None = None
    """adamw: dynamic8 stores both moments of the layers' matrices in 8 bits, with a scale per block of 256 (Dettmers et
    al., 2021): 2 bytes per weight instead of 8. null: as arrays, see mu_dtype."""

    def check(self) -> Iterator[Problem]:
        specific = sorted({field for fields in USES.values() for field in fields})
        yield from _used(self, "optimizer", {field: field in USES[self.kind] for field in specific})
        if self.moments is not None and self.mu_dtype is not None:
            reason = f"has no effect with moments={self.moments.value}, which sets the format of both moments"
            yield Problem("mu_dtype", reason, value=self.mu_dtype.value, accepted="null")

        if self.neuron_b2 is not None and self.update_rms == 0:
            reason, accepted = "is not the RMS of an update, to which neuron_b2 scales", "over 0, or null"
            yield Problem("update_rms", reason, value=0, accepted=accepted)
        if self.sparsity.n is not None and self.has_average:
            reason = "is not supported with an average of the weights, which would not be sparse"
            yield Problem("sparsity.n", reason, self.sparsity.n, accepted="null, or ema_decay=null and another kind")
        if self.kind is OptimizerKind.schedule_free and self.ema_decay is not None:
            reason = "is not supported with kind=schedule_free, which has its own average"
            yield Problem("ema_decay", reason, value=self.ema_decay, accepted="null")

    @property
    def has_average(self) -> bool:
        """Whether an average of the weights is kept, evaluated and saved."""
        return self.ema_decay is not None or self.kind is OptimizerKind.schedule_free

    def check_grad_dtype(self, compute: Dtype, *, grad_accum: int) -> Iterator[Problem]:
        """Yield the problem of a gradient dtype that would change nothing; paths are relative to the optimizer."""
        is_wider = self.grad_dtype is Dtype.float32 and compute is not Dtype.float32
        if grad_accum == 1 and (is_wider or self.grad_dtype is compute):
            reason = f"has no effect on gradients that the backward pass computes in {compute.value}"
            hint = "it sets the dtype in which micro-batches add up: train.grad_accum=2 or more"
            assert self.grad_dtype is not None
            yield Problem("grad_dtype", reason, value=self.grad_dtype.value, accepted="null", hint=hint)

    def check_moments(self, weights: Dtype) -> Iterator[Problem]:
        """Yield problems of decay rates that moments in their dtype cannot represent."""
        by_weights, by_mu = (weights, "model.dtypes.weights"), (self.mu_dtype or weights, "optimizer.mu_dtype")
        if self.moments is not None:
            return
        if self.kind is OptimizerKind.schedule_free and weights is not Dtype.float32:
            reason, hint = "needs weights in float32", "set model.dtypes.weights=float32"
            yield Problem("kind", reason, value=self.kind.value, accepted="another kind", hint=hint)
        # Lion's b1 does not belong to any optimizer state.
        formats = {"b1": by_mu, "b2": by_weights, "momentum": by_mu}
        for field, (dtype, key) in ({"b2": by_mu} if self.kind is OptimizerKind.lion else formats).items():
            decay = getattr(self, field)
            if dtype is Dtype.bfloat16 and decay is not None and decay > LARGEST_DECAY:
                reason = "is too close to 1 for a moment in bfloat16, whose updates would round to zero"
                accepted, hint = f"at most {LARGEST_DECAY}", f"or set {key}=float32"
                yield Problem(field, reason, value=decay, accepted=accepted, hint=hint)


def _used(section: Schedule | Optimizer, group: str, used: dict[str, bool]) -> Iterator[Problem]:
    """Yield problems of fields that the kind needs and that are null, or that it does not use and are set."""
    kind = section.kind.value
    for field, is_used in used.items():
        value = getattr(section, field)
        if is_used and value is None and field not in OPTIONAL:
            yield Problem(
                field,
                f"is needed by kind={kind}",
                value=None,
                hint=f"set it, or choose the option {group}={kind}, which sets all fields",
            )
        if not is_used and value is not None:
            uses = [name for name, is_used in used.items() if is_used]
            yield Problem(
                field,
                f"is not used by kind={kind}",
                value=value,
                accepted=f"null; {kind} uses {', '.join(uses) or 'none of these'}",
                hint=f"{group}={kind} sets all fields of this kind",
            )
