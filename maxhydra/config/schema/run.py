"""Schema of the run, the training loop and trackers."""

import re
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import ClassVar

from maxhydra.config.declare import MAX_CONTEXT, Options, PlugInUse, Schema, option, schema, section
from maxhydra.config.errors import Problem, did_you_mean
from maxhydra.config.schema.benchmarks import TrainEvals
from maxhydra.config.schema.model import Model
from maxhydra.config.schema.plug_in import PlugIn
from maxhydra.record.log import printable
from maxhydra.record.storage import is_remote, read_only_reason, unsupported_reason, working_copy

# Kinds of inputs that a run records and compares when it resumes.
INPUT_KINDS = ("base", "teacher", "reference", "data", "tokenizer", "template", "reward", "environment", "code")
# Kinds of train.checks.
CHECKS = ("index", "nan", "div")
# Largest train.loss_chunk that an error suggests.
MAX_CHUNK_SHOWN = 2**16
# File systems accept 255 bytes in a name and 4095 in a path; temporary files add a suffix to the name.
MAX_NAME_PART, MAX_NAME = 200, 1000
# Characters that need quoting in shells, URLs or Hydra overrides. Sweeps name their runs 0_learning_rate=0.1,steps=2.
UNUSUAL = re.compile(r"[^-\w.=,+/]")
ACCEPTED_NAMES = f"letters, digits, - _ . = , + and /, at most {MAX_NAME_PART} bytes between two /"


class Nonfinite(Enum):
    stop = "stop"
    skip = "skip"


class Progress(Enum):
    auto = "auto"
    bar = "bar"
    lines = "lines"
    none = "none"


class TrackerMode(Enum):
    online = "online"
    offline = "offline"


def new_name_problem(name: str) -> Problem | None:
    """Return the problem of the name of a new run or sweep. Existing ones keep names that were accepted earlier."""
    unusual = " ".join(repr(character) for character in sorted(set(UNUSUAL.findall(name))))
    return Problem("run.name", f"contains {unusual}", name, ACCEPTED_NAMES) if unusual else None


@schema
class Task(Schema):
    """What the command does. A task with additional fields has a subclass in maxhydra/config/schema/tasks."""

    name: str = option("pretrain", one_of="maxhydra.tasks", plug_in=PlugInUse.here)
    """Module of maxhydra.tasks to run, or `package.module:function` of yours, called as function(job) with its options;
    its module has the constants of our tasks."""
    options: Options = section(Options)

    trains_mtp: ClassVar[bool] = True
    """Whether the loss of the task includes that of multi-token prediction layers."""

    @property
    def has_value_head(self) -> bool:
        """Whether the task trains a value head on the model's hidden states."""
        return False

    @property
    def separate_devices(self) -> tuple[str, float]:
        """Key and value of the devices of the run that do not train: a number, a fraction under 1, or 0."""
        return "", 0

    def check_model(self, model: Model) -> Iterator[Problem]:
        """Yield problems of the task with this model; paths are relative to the task."""
        yield from ()


@schema
class Run(Schema):
    """Identity of the run."""

    name: str | None = None
    """Folder under outputs; an existing name resumes that run. null: task, model and time."""
    outputs: str = "outputs"
    """Folder that contains the runs, or a URL such as s3://bucket/folder or gs://bucket/folder, to which they are
    uploaded."""
    staging: str | None = None
    """Local folder of runs whose outputs are a URL; several hosts need a shared one. null: in ~/.cache/maxhydra."""
    seed: int = option(0, ge=0, le=2**32 - 1)
    """Seed of the weights, the data order and dropout."""
    weights_seed: int | None = option(None, ge=0, le=2**32 - 1)
    """Seed of the initial weights. null: seed."""
    data_seed: int | None = option(None, ge=0, le=2**32 - 1)
    """Seed of the data order. null: seed."""
    tags: list[str] = option([])
    """Tags to find the run by."""
    notes: str = ""
    """Free text about the run."""
    accept_changed_inputs: list[str] = option([])
    """Kinds of inputs that may differ from the run's last session: base, teacher, reference, data, tokenizer, template,
    reward, environment, code. Otherwise a run whose files have changed does not resume."""
    accept_changed_config: list[str] = option([])
    """Keys or sections that may differ from the run's last session, or, in a new run, from the run whose weights it
    loads, such as model.kinds.layer.attention.rope.theta."""

    def folder(self) -> Path:
        """The local folder that contains the runs: outputs, or the working copies of a URL."""
        if not is_remote(self.outputs):
            return Path(self.outputs)
        return working_copy(self.outputs) if self.staging is None else Path(self.staging).expanduser()

    def url(self, folder: Path) -> str | None:
        """The URL of the run in a local folder; None if outputs is a local folder."""
        if not is_remote(self.outputs):
            return None
        return f"{self.outputs.rstrip('/')}/{folder.absolute().relative_to(self.folder().absolute()).as_posix()}"

    def check(self) -> Iterator[Problem]:
        if is_remote(self.outputs):
            problem = unsupported_reason(self.outputs) or read_only_reason(self.outputs)
            if problem is not None:
                yield Problem("outputs", problem[0], self.outputs, hint=problem[1])
        elif self.staging is not None:
            yield Problem("staging", "is only used if run.outputs is a URL", self.staging, accepted="null")
        yield from control_problems("tags", self.tags)
        yield from control_problems("notes", [self.notes], keep="\n\t")
        for kind in self.accept_changed_inputs:
            if kind not in INPUT_KINDS:
                accepted, hint = ", ".join(INPUT_KINDS), did_you_mean(kind, INPUT_KINDS)
                yield Problem("accept_changed_inputs", "contains an unknown kind", kind, accepted=accepted, hint=hint)
        if self.name is None:
            return
        parts = self.name.split("/")
        if not self.name.strip() or self.name.startswith(("/", ".")) or ".." in parts or "\0" in self.name:
            reason = "is not a folder name under run.outputs"
            yield Problem("name", reason, value=self.name, accepted=ACCEPTED_NAMES)
        elif len(self.name) > MAX_NAME or max(len(part.encode(errors="replace")) for part in parts) > MAX_NAME_PART:
            yield Problem("name", f"has {len(self.name)} characters", value=self.name, accepted=ACCEPTED_NAMES)


def control_problems(path: str, texts: Iterable[str], *, keep: str = "") -> Iterator[Problem]:
    """Yield the texts with control characters, which a terminal would execute when it shows the run."""
    for text in texts:
        if printable(text, keep=keep) != text:
            yield Problem(path, "contains control characters", value=printable(text, keep=""), accepted="plain text")


@schema
class Sample(Schema):
    """Text that is sampled from the model at the end of the run, and at evaluations."""

    tokens: int = option(0, ge=0)
    """Tokens to sample; 0 samples none."""
    prompt: str = "\n"
    """Prompt to continue; with data.record_type=chat, or prompts and a chat template, the user's message."""
    temperature: float = option(0.8, ge=0)
    """Sampling temperature; 0 is greedy."""
    at_evaluations: bool = False
    """Also sample at every evaluation, and keep the texts in the run's rollouts of kind eval."""


@schema
class Spike(Schema):
    """Skips updates whose loss or gradient norm is far above its recent mean."""

    sigmas: float | None = option(None, gt=0)
    """Standard deviations above the running mean that count as a spike. null: never skip."""
    decay: float = option(0.98, gt=0, lt=1)
    """Decay of the running mean and variance. Spikes are clipped to the threshold before they enter the statistics,
    so a sustained jump is accepted after a while."""
    warmup_steps: int = option(20, ge=1)
    """Steps before the first one can be skipped."""


@schema
class EarlyStop(Schema):
    """Stops the run when an evaluation metric no longer improves."""

    metric: str = "eval/loss"
    """Metric of evaluations that must improve, such as eval/bpb, eval/NAME/loss of a held-out set or eval/TASK/acc."""

    patience: int | None = option(None, ge=1)
    """Evaluations without improvement before the run stops. null: never."""
    min_delta: float = option(0.0, ge=0)
    """Change of the metric, relative to the last improvement, that counts as an improvement."""


@schema
class Ramp(Schema):
    """Batch size ramp: grows in equal steps to train.per_device_batch_size."""

    start: float | None = option(None, gt=0)
    """Sequences per device at the start. null: no ramp."""
    increment: float = option(1, gt=0)
    """Sequences per device that each step of the ramp adds."""
    sequences: int = option(1000, ge=1)
    """Sequences, over all devices, after which the batch reaches its full size."""


@schema
class Diloco(Schema):
    """DiLoCo: replicas (mesh.replica, mesh.dcn.replica) train on their own data and are averaged once per period."""

    period: int | None = option(None, ge=1)
    """Steps between synchronizations of a parameter. null: no DiLoCo."""
    learning_rate: float = option(0.3, gt=0)
    """Learning rate of the outer step, SGD on the difference between the shared and the averaged parameters."""
    momentum: float = option(0.9, ge=0, lt=1)
    """Nesterov momentum of the outer step."""
    fragments: int = option(1, ge=1)
    """Parts of the model that are synchronized at different steps of the period, which bounds the bytes sent at a time.
    Layers are assigned to the parts in turn."""

    def check(self) -> Iterator[Problem]:
        if self.period is not None and self.fragments > self.period:
            reason = f"is more than the {self.period} steps of a period, at each of which one part is synchronized"
            yield Problem("fragments", reason, value=self.fragments, accepted=f"1 to {self.period}")


@schema
class Train(Schema):
    """The training loop that all training tasks share."""

    steps: int = option(1000, ge=1, le=2**31 - 1)
    """Optimizer steps."""
    epochs: float | None = option(None, gt=0)
    """Epochs of the training data, which replace train.steps. Needs data whose size is known."""
    seq_len: int = option(1024, ge=1, le=MAX_CONTEXT)
    """Tokens per sequence."""
    per_device_batch_size: float = option(8, gt=0)
    """Sequences per device in one forward pass; a fraction if several devices share a sequence."""
    grad_accum: int = option(1, ge=1)
    """Forward and backward passes per optimizer step."""
    elastic: bool = False
    """Whether a run resumes on another number of devices with the same sequences per step: for that session,
    grad_accum is raised, or per_device_batch_size lowered. false: such a command is rejected."""
    ramp: Ramp = section(Ramp)
    log_every: int = option(10, ge=1)
    """Steps between lines in metrics.jsonl."""
    eval_every: int = option(100, ge=0)
    """Steps between evaluations; 0 evaluates only at the end."""
    eval_start: bool = False
    """Also evaluate before the first step, as step 0."""
    eval_batches: int = option(20, ge=0)
    """Batches per evaluation of each held-out set; 0 disables evaluation."""
    target_eval_loss: float | None = None
    """Stop, with status finished, when the eval loss reaches this value."""
    evals: TrainEvals = section(TrainEvals)
    early_stop: EarlyStop = section(EarlyStop)
    z_loss: float = option(0.0, ge=0)
    """Weight of log(sum(exp(logits)))^2, which keeps the logits from drifting (Chowdhery et al., 2022)."""
    loss_chunk: int | None = option(None, ge=0)
    """Positions per sequence whose logits are in memory at a time; 0 computes all at once. null: all at once, unless
    chunks let model.remat.policy=auto recompute less or are needed to fit in device memory."""
    diloco: Diloco = section(Diloco)
    spike: Spike = section(Spike)
    on_nonfinite: Nonfinite = Nonfinite.stop
    """A NaN or Inf in the loss or the gradients: stop the run, or skip the update. The update is never applied."""
    allow_no_learning: bool = False
    """Whether a run may finish that has learned nothing, because all updates (or all but the first) were skipped, all
    GRPO groups had equal rewards, or the loss never changed. false: its status is failed, with the reason."""
    checks: list[str] = option([])
    """Checks of every operation of a step: index (out of bounds), nan (a NaN result), div (by zero). The first that
    fails ends the run as failed, with the operation and its source line. One device; compiling and steps are slow."""
    loss: PlugIn = section(PlugIn)
    callbacks: dict[str, PlugIn] = option({})
    """Observers of the run by a name of your choice: classes whose methods begin, step, evaluation, save and end are
    called with copies of the logged metrics."""
    progress: Progress = Progress.auto
    """bar, lines or none; auto shows a bar on a terminal and lines otherwise."""
    sample: Sample = section(Sample)

    @property
    def chunk(self) -> int:
        """loss_chunk, with 0 for null."""
        return self.loss_chunk or 0

    def no_z_loss(self, *, task: str) -> Iterator[Problem]:
        """Yield the problem of a z_loss in a task that does not support it, with a path from the config root."""
        if self.z_loss:
            yield Problem("train.z_loss", f"is not used by task={task}", value=self.z_loss, accepted="0")

    def check(self) -> Iterator[Problem]:
        yield from self.evals.check_interval(self.eval_every)
        for name, callback in self.callbacks.items():
            if callback.function is None:
                yield Problem(f"callbacks.{name}.function", "is needed", value=None, accepted="package.module:object")
        if self.evals.every is not None and not self.eval_batches:
            reason, accepted = "is not used without held-out batches", "null, with train.eval_every"
            yield Problem("evals.every", reason, value=self.evals.every, accepted=accepted)
        if self.epochs is not None and self.elastic:
            yield Problem("elastic", "is not supported with train.epochs", value=True, accepted="false, or train.steps")
        if self.ramp.start is not None and self.elastic:
            reason = "is not supported with train.ramp, whose sizes depend on the number of devices"
            yield Problem("elastic", reason, value=True, accepted="false, or train.ramp.start=null")
        if unknown := [name for name in self.checks if name not in CHECKS]:
            yield Problem("checks", f"contains {unknown[0]!r}", self.checks, accepted=", ".join(CHECKS))
        if self.ramp.start is not None and self.ramp.start >= self.per_device_batch_size:
            reason = f"is not less than per_device_batch_size={self.per_device_batch_size:g}"
            accepted = f"over 0 and under {self.per_device_batch_size:g}, or null"
            yield Problem("ramp.start", reason, value=self.ramp.start, accepted=accepted)
        if 0 < self.chunk < self.seq_len and self.seq_len % self.chunk:
            divisors = [str(n) for n in range(1, min(self.seq_len, MAX_CHUNK_SHOWN)) if self.seq_len % n == 0]
            reason, accepted = f"does not divide seq_len={self.seq_len}", f"0 for no chunks, or {', '.join(divisors)}"
            yield Problem("loss_chunk", reason, value=self.loss_chunk, accepted=accepted)


@schema
class Tracker(Schema):
    """Trackers that receive metrics in addition to metrics.jsonl."""

    backends: list[str] = option([], one_of="maxhydra.train.trackers", plug_in=PlugInUse.here)
    """Any of tensorboard, wandb, mlflow and trackio, and at most one `package.module:object` of yours, called as
    object(session) with its options."""
    options: Options = section(Options)
    project: str = "maxhydra"
    """wandb, trackio: project; mlflow: experiment."""
    entity: str | None = None
    """wandb: team or user."""
    mode: TrackerMode = TrackerMode.online
    """wandb: online uploads during the run, offline writes files for `wandb sync`."""
    uri: str | None = None
    """mlflow: tracking server or local store, such as http://localhost:5000, or sqlite:///mlflow.db. null: the variable
    MLFLOW_TRACKING_URI, else mlflow.db in run.outputs."""

    def check(self) -> Iterator[Problem]:
        own = [backend for backend in self.backends if ":" in backend]
        if len(own) > 1:
            yield Problem(
                "backends", "has several trackers of yours", own, accepted="at most one, with tracker.options"
            )
        if len({*self.backends}) < len(self.backends):
            yield Problem("backends", "has a tracker twice", self.backends, accepted="each at most once")
