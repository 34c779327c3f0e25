"""The distillation loss of a batch: divergence from the teacher, cross-entropy with the data, and feature distances.

A teacher on the student's devices is the entry `TEACHER` of the weights that the loss reads. The logits of an offline
teacher, or of one on its own devices, are the column `teacher_logits` of the batch, for the tokens in `teacher_ids`, or
for all tokens without that column. The scheduled values of alpha, beta and temperature are columns too.

p is the teacher's token distribution, q the student's, both softmax(logits / T).
"""

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from maxhydra.config.schema.tasks.distill import Course, DistillTask, Divergence, FeatureLoss, Features
from maxhydra.data import BatchSpec
from maxhydra.distill.teacher import OnlineTeacher
from maxhydra.layers import Context
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder
from maxhydra.train import TrainState, map_sequence_chunks
from maxhydra.train.batches import DerivedBatches
from maxhydra.train.loss import Batch, LossFn, Sums, Tree, add_aux_losses, target_logprobs
from maxhydra.train.step import sequences_in


def values_at(task: DistillTask, step: jax.Array, steps: int) -> dict[str, jax.Array]:
    """Alpha, temperature and (if used) beta at a step of a run of `steps` steps."""
    progress = jnp.clip(step / max(steps - 1, 1), 0, 1)
    if task.course is Course.cosine:
        progress = (1 - jnp.cos(jnp.pi * progress)) / 2
    schedules = {
        "alpha": (task.alpha, task.alpha_end),
        "beta": (task.beta, task.beta_end),
        "temperature": (task.temperature, task.temperature_end),
    }
    return {
        name: start + progress * ((start if end is None else end) - start)
        for name, (start, end) in schedules.items()
        if start is not None
    }


@dataclasses.dataclass(frozen=True)
class ScheduledBatches(DerivedBatches):
    """Batches with a column [B] for each scheduled value, computed on the device from the state's step.

    A column that the batches of the source already have is kept.
    """

    task: DistillTask
    spec: BatchSpec
    steps: int

    def peek(self) -> Mapping[str, Any]:
        batch = self.source.peek()
        return {**self._columns(jnp.zeros((), jnp.int32), sequences_in(batch)), **batch}

    def take(self, step: int, state: TrainState) -> Batch:
        batch = self.source.take(step, state)
        return {**self._columns(state.step, sequences_in(batch)), **batch}

    @cached_property
    def _columns(self) -> Any:
        def columns(step: jax.Array, rows: int) -> Batch:
            values = values_at(self.task, step, self.steps)
            return {name: jnp.full(rows, value, jnp.float32) for name, value in values.items()}

        return jax.jit(columns, static_argnums=1, out_shardings=self.spec.sharding_of(1))


TEACHER = "teacher"
# Columns of a batch with the outputs of the teacher.
LOGITS, IDS = "teacher_logits", "teacher_ids"


def feature_column(index: int) -> str:
    """The column of the teacher's activations for a pair of layers in task.features."""
    return f"teacher_features_{index}"


@dataclasses.dataclass(frozen=True)
class StudentTeacher:
    """Compares the predictions and features of the student with those of the teacher."""

    student: ModelDef
    sharder: Sharder
    teacher: OnlineTeacher | None
    """None: the batch contains the teacher's logits and features."""
    features: Features
    chunk: int

    def __call__(
        self,
        weights: Tree,
        batch: Batch,
        key: jax.Array | None,
        *,
        kind: Divergence,
        beta: jax.Array | None,
        temperature: jax.Array,
    ) -> tuple[dict[str, jax.Array], Tree]:
        """Per-token divergence, nll and (if configured) feature distance, [B, S]; and the student's aux outputs.

        beta and temperature are [B, 1]. With `chunk`, logits of only `chunk` positions exist at a time, of both models.
        """
        context = Context.of_batch(batch, self.sharder, key)
        layers = self.features.student_layers
        forward = self.student.forward(weights, batch["tokens"], context, keep_layers=bool(layers))
        student_features = [forward.layer_outputs[layer] for layer in layers]
        teacher_inputs, teacher_features = self._run_teacher(weights, batch)

        def compare(
            hidden: jax.Array, targets: jax.Array, teacher_input: jax.Array, *ids: jax.Array
        ) -> dict[str, jax.Array]:
            logits = self.student.logits(weights, hidden, self.sharder)
            log_q = log_probs(logits, temperature)
            if self.teacher is not None:
                teacher_input = self.teacher.logits(weights[TEACHER], teacher_input)
            elif ids:
                log_q = gather_top_k(log_q, ids[0], kind)
            log_p = log_probs(teacher_input, temperature)
            distance = divergence(log_p, log_q, kind, beta=beta, temperature=temperature)
            return {"divergence": distance, "nll": -target_logprobs(logits, targets)}

        token_losses = map_sequence_chunks(
            compare, forward.hidden_BTD, batch["targets"], *teacher_inputs, chunk=self.chunk
        )
        if student_features:
            pairs = zip(student_features, teacher_features, strict=True)
            distances = [feature_distance(*pair, self.features.loss) for pair in pairs]
            token_losses["features"] = sum(distances[1:], distances[0]) / len(distances)
        return token_losses, forward.aux

    def _run_teacher(self, weights: Tree, batch: Batch) -> tuple[list[jax.Array], list[jax.Array]]:
        """The teacher's hidden states, or its logits and their ids if there are any; and its features."""
        if self.teacher is None:
            features = [batch[feature_column(index)] for index in range(len(self.features.teacher_layers))]
            return [batch[name] for name in (LOGITS, IDS) if name in batch], features
        hidden, features = self.teacher.features(weights[TEACHER], batch, self.features.teacher_layers)
        arrays = [self.sharder.constrain(x, "act_batch", "act_length", "act_embed") for x in (hidden, *features)]
        return arrays[:1], arrays[1:]


def distillation_loss(comparison: StudentTeacher, task: DistillTask) -> LossFn:
    """alpha divergence + (1 - alpha) nll + weight features, with alpha, beta and temperature from the batch."""

    def loss(weights: Tree, batch: Batch, key: jax.Array | None) -> Sums:
        alpha, temperature = batch["alpha"][:, None], batch["temperature"][:, None]
        beta = None if task.beta is None else batch["beta"][:, None]
        losses, aux = comparison(weights, batch, key, kind=task.divergence, beta=beta, temperature=temperature)
        total = alpha * losses["divergence"] + (1 - alpha) * losses["nll"]
        if "features" in losses:
            total = total + task.features.weight * losses["features"]
        metrics = {"cross_entropy" if name == "nll" else name: values for name, values in losses.items()}
        sums = {name: jax.lax.stop_gradient(jnp.sum(batch["weights"] * x)) for name, x in metrics.items()}
        sums |= {"loss": jnp.sum(batch["weights"] * total), "weight": jnp.sum(batch["weights"])}
        return add_aux_losses(sums, aux)

    return loss


def held_out_divergence(comparison: StudentTeacher) -> LossFn:
    """The evaluation loss, whatever the training loss: nll, and `kl` = KL(teacher | student) at temperature 1."""

    def loss(weights: Tree, batch: Batch, key: jax.Array | None) -> Sums:
        temperature = jnp.ones((1, 1), jnp.float32)
        losses, _ = comparison(weights, batch, key, kind=Divergence.forward_kl, beta=None, temperature=temperature)
        nll, kl = (jnp.sum(batch["weights"] * losses[name]) for name in ("nll", "divergence"))
        return {"loss": nll, "nll": nll, "kl": kl, "weight": jnp.sum(batch["weights"])}

    return loss


def divergence(
    log_p: jax.Array, log_q: jax.Array, kind: Divergence, *, beta: jax.Array | None, temperature: jax.Array
) -> jax.Array:
    """T^2 times KL(p | q), KL(q | p), or beta KL(p | m) + (1 - beta) KL(q | m) with m = beta p + (1 - beta) q."""
    match kind:
        case Divergence.forward_kl:
            result = _kl(log_p, log_q)
        case Divergence.reverse_kl:
            result = _kl(log_q, log_p)
        case Divergence.jensen_shannon:
            assert beta is not None
            share = beta[..., None]
            log_m = jnp.logaddexp(log_p + jnp.log(share), log_q + jnp.log1p(-share))
            result = beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)
    return jnp.square(temperature) * result


def log_probs(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """log softmax(logits / T) in float32."""
    return jax.nn.log_softmax(logits.astype(jnp.float32) / temperature[..., None])


def gather_top_k(log_q: jax.Array, ids: jax.Array, kind: Divergence) -> jax.Array:
    """The student's log-probs of the teacher's top-k tokens, [..., k].

    The teacher's k probabilities are renormalized to sum to 1. For forward KL the student's are not, so that it is
    penalized for probability on other tokens; the other divergences would be infinite there, so the student's are
    renormalized too, and other tokens are ignored.
    """
    top_k = jnp.take_along_axis(log_q, ids, axis=-1)
    return top_k if kind is Divergence.forward_kl else jax.nn.log_softmax(top_k)


def feature_distance(student: jax.Array, teacher: jax.Array, kind: FeatureLoss) -> jax.Array:
    """1 - cosine, or the mean squared difference, of activations [..., D]."""
    x, y = student.astype(jnp.float32), teacher.astype(jnp.float32)
    if kind is FeatureLoss.l2:
        return jnp.mean(jnp.square(x - y), axis=-1)
    squared_norms = jnp.sum(x * x, axis=-1) * jnp.sum(y * y, axis=-1)
    # The lower bound keeps the gradient of a zero vector, as in padding, finite.
    return 1 - jnp.sum(x * y, axis=-1) * jax.lax.rsqrt(jnp.maximum(squared_norms, 1e-16))


def _kl(log_a: jax.Array, log_b: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(log_a) * (log_a - log_b), axis=-1)
