"""The run itself: its name, its length, when it logs, evaluates, saves and stops."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Schema, option, schema, section
from maxhydra.config.errors import Problem
from maxhydra.config.schema.model import Model


class Nonfinite(Enum):
    stop = "stop"
    skip = "skip"


class Progress(Enum):
    auto = "auto"
    bar = "bar"
    lines = "lines"
    none = "none"


class SaveMode(Enum):
    asynchronous = "asynchronous"
    synchronous = "synchronous"
    off = "off"


class TrackerMode(Enum):
    online = "online"
    offline = "offline"


@schema
class Task(Schema):
    """What the command does. A task with fields of its own has a subclass in maxhydra/config/tasks."""

    name: str = option("pretrain", one_of="maxhydra.tasks")
    """Module of maxhydra.tasks that runs."""

    def check_model(self, model: Model) -> Iterator[Problem]:
        """What a task asks of the model; paths relative to the task."""
        yield from ()


@schema
class Run(Schema):
    """Identity of the run."""

    name: str | None = None
    """Folder under outputs; the same name again resumes. null: task, model and time."""
    outputs: str = "outputs"
    """Folder that holds the runs."""
    seed: int = option(0, ge=0, le=2**32 - 1)
    """Seed of the weights, the data order and dropout."""
    tags: list[str] = option([])
    """Words to find the run by."""
    notes: str = ""
    """Why this run, in a sentence."""

    def check(self) -> Iterator[Problem]:
        if self.name is not None and (
            not self.name.strip() or self.name.startswith(("/", ".")) or ".." in self.name.split("/")
        ):
            yield Problem(
                "name",
                "is not a folder name under run.outputs",
                value=self.name,
                accepted="letters, digits, - _ . and /",
            )


@schema
class Sample(Schema):
    """A little text from the model at the end of the run."""

    tokens: int = option(0, ge=0)
    """Tokens to write; 0 writes none."""
    prompt: str = "\n"
    """Text to go on from; with data.record_type=chat, what a user says."""
    temperature: float = option(0.8, ge=0)
    """0 takes the likeliest token."""


@schema
class Spike(Schema):
    """Skips an update whose loss or gradient norm stands far over the recent past."""

    sigmas: float | None = option(None, gt=0)
    """Standard deviations over the running mean that count as a spike. null: never skip."""
    decay: float = option(0.98, gt=0, lt=1)
    """Decay of the running mean and variance. A spike counts in them as the most that is none, so that many in a row
    are none in the end."""
    warmup_steps: int = option(20, ge=1)
    """Steps seen before any is skipped."""


@schema
class EarlyStop(Schema):
    """Ends the run when evaluation stops improving."""

    patience: int | None = option(None, ge=1)
    """Evaluations without improvement before the run ends. null: never."""
    min_delta: float = option(0.0, ge=0)
    """What counts as an improvement of the eval loss, over that at the last improvement."""


@schema
class Ramp(Schema):
    """A batch that starts small and grows in even steps to train.per_device_batch_size."""

    start: float | None = option(None, gt=0)
    """Sequences per device at the start. null: no ramp."""
    increment: float = option(1, gt=0)
    """Sequences per device that each growth adds."""
    sequences: int = option(1000, ge=1)
    """Sequences, over all devices, after which the batch has its full size."""


@schema
class Train(Schema):
    """The loop that every training task shares."""

    steps: int = option(1000, ge=1, le=2**31 - 1)
    """Optimizer steps."""
    seq_len: int = option(1024, ge=1)
    """Tokens in a sequence."""
    per_device_batch_size: float = option(8, gt=0)
    """Sequences per device in one forward pass; a fraction where several devices share a sequence."""
    grad_accum: int = option(1, ge=1)
    """Forward and backward passes per optimizer step."""
    ramp: Ramp = section(Ramp)
    log_every: int = option(10, ge=1)
    """Steps between two lines in metrics.jsonl."""
    eval_every: int = option(100, ge=0)
    """Steps between two evaluations; 0 evaluates only at the end."""
    eval_start: bool = False
    """Evaluate before the first step too, as step 0."""
    eval_batches: int = option(20, ge=0)
    """Batches per evaluation; 0 never evaluates."""
    target_eval_loss: float | None = None
    """The run ends, finished, when the eval loss reaches this."""
    early_stop: EarlyStop = section(EarlyStop)
    z_loss: float = option(0.0, ge=0)
    """Weight of log(sum(exp(logits)))^2, which keeps the logits from drifting (Chowdhery et al., 2022)."""
    loss_chunk: int = option(0, ge=0)
    """Positions of each sequence whose logits exist at a time; 0 makes all at once."""
    spike: Spike = section(Spike)
    on_nonfinite: Nonfinite = Nonfinite.stop
    """A NaN or Inf in the loss or the gradients: stop the run, or skip the update. Neither applies it."""
    progress: Progress = Progress.auto
    """bar, lines, none; auto shows a bar on a terminal and lines elsewhere."""
    sample: Sample = section(Sample)

    def no_z_loss(self, *, task: str) -> Iterator[Problem]:
        """Seen from the root of the config: the loss of a task has no such part."""
        if self.z_loss:
            yield Problem("train.z_loss", f"is not used by task={task}", value=self.z_loss, accepted="0")

    def check(self) -> Iterator[Problem]:
        if self.ramp.start is not None and self.ramp.start >= self.per_device_batch_size:
            yield Problem(
                "ramp.start",
                f"is not under per_device_batch_size={self.per_device_batch_size:g}",
                value=self.ramp.start,
                accepted=f"over 0 and under {self.per_device_batch_size:g}, or null",
            )
        if 0 < self.loss_chunk < self.seq_len and self.seq_len % self.loss_chunk:
            divisors = [str(n) for n in range(1, self.seq_len) if self.seq_len % n == 0]
            yield Problem(
                "loss_chunk",
                f"does not divide seq_len={self.seq_len}",
                value=self.loss_chunk,
                accepted=f"0 for all at once, or {', '.join(divisors)}",
            )


@schema
class Checkpoint(Schema):
    """Saving and loading of the whole state: weights, optimizer, step, data position and random key."""

    mode: SaveMode = SaveMode.asynchronous
    """asynchronous writes while training goes on, synchronous waits, off never saves."""
    every: int = option(1000, ge=1)
    """Steps between two saves; the end of the run, SIGTERM and SIGUSR1 save too."""
    keep: int = option(3, ge=1)
    """Newest checkpoints kept."""
    keep_best: int = option(0, ge=0)
    """Checkpoints with the best best_metric kept besides."""
    best_metric: str = "eval/loss"
    """Metric, smaller is better, by which keep_best ranks."""
    load_full_state: str | None = None
    """Run or checkpoint folder whose whole state a new run starts from."""
    load_parameters: str | None = None
    """Weights that a new run starts from: a run or checkpoint folder, a Hugging Face or PEFT folder with safetensors,
    a .gguf file, or package:NAME for the one inside an installed package."""

    def check(self) -> Iterator[Problem]:
        if self.load_full_state is not None and self.load_parameters is not None:
            yield Problem(
                "load_parameters",
                "is given beside load_full_state",
                value=self.load_parameters,
                hint="keep one of the two",
            )


@schema
class Tracker(Schema):
    """Where metrics go besides metrics.jsonl."""

    backends: list[str] = option([], one_of="maxhydra.train.trackers")
    """tensorboard, wandb, both or none."""
    project: str = "maxhydra"
    """wandb: project."""
    entity: str | None = None
    """wandb: team or user."""
    mode: TrackerMode = TrackerMode.online
    """wandb: online sends as it goes, offline writes for `wandb sync`."""
