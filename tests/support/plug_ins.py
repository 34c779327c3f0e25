"""Objects of a user for every kind of plug-in, which tests name as `tests.support.plug_ins:NAME`."""

import dataclasses
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from maxhydra import Options, Problem, option, schema
from maxhydra.config.schema.data import Corpus, Data
from maxhydra.config.schema.model import Kind, Model
from maxhydra.config.schema.run import Train
from maxhydra.data.records import BadRecord, Record
from maxhydra.data.rows import RowSpec
from maxhydra.data.sources import RecordSource, hold_out
from maxhydra.layers.context import Context
from maxhydra.layers.interfaces import AuxOutputs, FeedForwardOutput, MixerOutput
from maxhydra.layers.params import ParamBuilder
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder
from maxhydra.tasks import Job, Outcome
from maxhydra.train.callbacks import CallbackSession
from maxhydra.train.loss import LossFn
from maxhydra.train.trackers import TrackedOutcome, TrackedSession


@schema
class CountOptions(Options):
    """Settings of `counting`."""

    records: int = option(64, ge=4)
    """Number of records."""
    word: str = "one"
    """Text of the records."""
    step: int = option(1, ge=1)
    """Difference of the numbers in a record."""

    def check(self) -> Iterator[Problem]:
        if self.step >= self.records:
            yield Problem("step", f"is not under records={self.records}", self.step)


class Counts:
    """Records of a word and a number."""

    groups = None

    def __init__(self, options: CountOptions):
        self.options = options

    def __len__(self) -> int:
        return self.options.records

    def read(self, indices: Sequence[int]) -> list[Record | BadRecord]:
        return [{"text": f"{self.options.word} {self.options.step * int(index)} " * 8} for index in indices]

    def location(self, index: int) -> str:
        return f"count {index}"


def counting(corpus: Corpus, data: Data, spec: RowSpec, options: CountOptions) -> RecordSource:
    """A data source."""
    return hold_out(Counts(options), corpus.eval_fraction)


@schema
class SquareOptions(Options):
    """Settings of `square_feed_forward`."""

    dim: int = option(48, ge=1)
    """Hidden units."""
    power: float = option(2.0, gt=0)
    """Exponent of the activation."""


@dataclasses.dataclass(frozen=True)
class SquareSpec:
    """down(relu(up(x)) ** power)."""

    emb_dim: int
    scale: float
    options: tuple[int, float]

    def build(self, make: ParamBuilder) -> "Square":
        return Square(self, make)

    def forward_flops(self) -> float:
        return 4.0 * self.emb_dim * self.options[0]

    def idle_parameters(self) -> int:
        return 0

    def apply_aux_updates(self, new: Any, old: Any, aux: AuxOutputs) -> Any:
        return new


class Square(nnx.Module):
    """A feed-forward with a power of relu (So et al., 2021)."""

    def __init__(self, spec: SquareSpec, make: ParamBuilder):
        self.spec = spec
        D, F = spec.emb_dim, spec.options[0]
        self.up = make.projection("up", (D,), (F,), ("embed", "mlp"), scale=spec.scale)
        self.down = make.projection("down", (F,), (D,), ("mlp", "embed"), scale=spec.scale)

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> FeedForwardOutput:
        hidden_BTF = jax.nn.relu(self.up(x_BTD, ctx)) ** self.spec.options[1]
        return FeedForwardOutput(self.down(hidden_BTF, ctx), {})


def square_feed_forward(model: Model, kind: Kind, options: SquareOptions) -> SquareSpec:
    """A layer mechanism."""
    return SquareSpec(model.emb_dim, model.init_scale, (options.dim, options.power))


@dataclasses.dataclass(frozen=True)
class MeanSpec:
    """The mean of all tokens so far."""

    emb_dim: int

    def build(self, make: ParamBuilder) -> "Mean":
        return Mean(self, make)

    def forward_flops(self, seq_len: int) -> float:
        return 2.0 * self.emb_dim**2


class Mean(nnx.Module):
    """A mixer without a cache, which trains and scores but does not decode."""

    def __init__(self, spec: MeanSpec, make: ParamBuilder):
        self.out = make.projection("out", (spec.emb_dim,), (spec.emb_dim,), ("embed", "embed"), scale=0.1)

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> MixerOutput:
        counts_T1 = jnp.arange(1, x_BTD.shape[1] + 1, dtype=x_BTD.dtype)[:, None]
        return MixerOutput(self.out(jnp.cumsum(x_BTD, axis=1) / counts_T1, ctx), None, {})


def mean_mixer(model: Model, kind: Kind) -> MeanSpec:
    """A layer mechanism without options."""
    return MeanSpec(model.emb_dim)


@schema
class SignOptions(Options):
    """Settings of `scale_by_sign`."""

    decay: float = option(0.9, ge=0, lt=1)
    """Decay of the momentum."""


def scale_by_sign(options: SignOptions) -> optax.GradientTransformation:
    """An optimizer: the sign of the momentum."""
    return optax.chain(
        optax.trace(decay=options.decay), optax.stateless(lambda updates, _: jax.tree.map(jnp.sign, updates))
    )


@schema
class SmoothOptions(Options):
    """Settings of `smooth_loss`."""

    smoothing: float = option(0.1, ge=0, lt=1)
    """Share of the uniform distribution in the targets."""


def smooth_loss(model: ModelDef, sharder: Sharder, train: Train, options: SmoothOptions) -> LossFn:
    """A loss: cross-entropy with label smoothing."""

    def loss(params: Any, batch: Mapping[str, jax.Array], key: jax.Array | None) -> dict[str, Any]:
        context = Context.of_batch(batch, sharder, key)
        hidden_BTD, _ = model.hidden(params, batch["tokens"], context)
        logprobs = jax.nn.log_softmax(model.logits(params, hidden_BTD, sharder))
        nll = -jnp.take_along_axis(logprobs, batch["targets"][..., None], axis=-1)[..., 0]
        smoothed = (1 - options.smoothing) * nll - options.smoothing * jnp.mean(logprobs, axis=-1)
        weights = batch["weights"]
        return {
            "loss": jnp.sum(smoothed * weights),
            "nll": jax.lax.stop_gradient(jnp.sum(nll * weights)),
            "weight": jax.lax.stop_gradient(jnp.sum(weights)),
        }

    return loss


@schema
class GreetOptions(Options):
    """Settings of `greet`."""

    word: str = "hello"
    """What to say."""


def greet(job: Job, options: GreetOptions) -> Outcome:
    """A task."""
    (job.run.path / "greeting.txt").write_text(options.word)
    return Outcome("finished", f"said {options.word}", {"letters": float(len(options.word))})


@schema
class FileOptions(Options):
    """Settings of `FileTracker` and `EventLog`."""

    file: str = "events.jsonl"
    """Name of the file in the run folder."""


class FileTracker:
    """A tracker that appends to a file."""

    def __init__(self, session: TrackedSession, options: FileOptions):
        self._path = session.run.path / options.file

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(["log", step, sorted(metrics)]) + "\n")

    def log_outcome(self, outcome: TrackedOutcome) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(["outcome", outcome.status, outcome.step]) + "\n")

    def close(self) -> None:
        pass


class EventLog:
    """A callback that writes down every event, clears its arguments and seeds the global random generators."""

    def __init__(self, session: CallbackSession, options: FileOptions):
        self._path = session.folder / options.file

    def _write(self, *event: Any) -> None:
        np.random.seed(0)
        random.seed(0)
        with self._path.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def begin(self) -> None:
        self._write("begin")

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self._write("step", step, metrics["loss"])
        metrics.clear()

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self._write("evaluation", step, metrics["eval/loss"])
        metrics.clear()

    def save(self, step: int, path: Path) -> None:
        self._write("save", step, path.is_dir())

    def end(self, status: str, step: int, metrics: dict[str, float]) -> None:
        self._write("end", status, step)
        metrics.clear()


class Failing:
    """A callback that fails."""

    def __init__(self, session: CallbackSession):
        pass

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        raise ValueError("no step is good enough")


@schema
class LengthOptions(Options):
    """Settings of `near_length`."""

    target: int = option(3, ge=1)
    """Characters that score 1."""


def near_length(text: str, *, options: LengthOptions, **others: Any) -> float:
    """A reward."""
    return 1.0 / (1 + abs(len(text) - options.target))
