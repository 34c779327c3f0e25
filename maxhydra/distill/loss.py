"""From a batch to the sums that a step minimises and logs: how far the student is from the teacher, and from the data.

The teacher stands beside the student, its weights under `TEACHER` among those that a loss sees, or its likeliest tokens
are in the batch (`teacher_ids`, `teacher_logits`).
"""

import dataclasses

import jax
import jax.numpy as jnp

from maxhydra.config.schema.tasks.distill import DistillTask, Divergence, Features
from maxhydra.distill.losses import at_top, divergence, feature_distance, log_probs
from maxhydra.distill.teacher import OnlineTeacher
from maxhydra.layers import Context
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder
from maxhydra.train import map_sequence_chunks
from maxhydra.train.logprobs import target_logprobs
from maxhydra.train.loss import Sums, add_aux_losses
from maxhydra.train.state import Tree
from maxhydra.train.step import Batch, LossFn

TEACHER = "teacher"


@dataclasses.dataclass(frozen=True)
class StudentTeacher:
    """The student beside the teacher."""

    student: ModelDef
    sharder: Sharder
    teacher: OnlineTeacher | None
    """None: its likeliest tokens are in the batch."""
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
        """Of every token, [B, S]: divergence, nll, and the distance of features where there are any; and what the
        student's layers tell besides.

        beta and temperature are [B, 1]. With `chunk`, logits of so many places exist at a time, of both models.
        """
        context = Context.of_batch(batch, self.sharder, key)
        layers = self.features.student_layers
        forward = self.student.forward(weights, batch["tokens"], context, keep=bool(layers))
        own = [forward.kept[layer] for layer in layers]
        seen, theirs = self._teacher(weights, batch)

        def places(hidden: jax.Array, targets: jax.Array, *seen: jax.Array) -> dict[str, jax.Array]:
            logits = self.student.logits(weights, hidden, self.sharder)
            log_q = log_probs(logits, temperature)
            if self.teacher is None:
                ids, top = seen
                log_p, log_q = log_probs(top, temperature), at_top(log_q, ids, kind)
            else:
                log_p = log_probs(self.teacher.logits(weights[TEACHER], *seen), temperature)
            found = divergence(log_p, log_q, kind, beta=beta, temperature=temperature)
            return {"divergence": found, "nll": -target_logprobs(logits, targets)}

        found = map_sequence_chunks(places, forward.hidden_BTD, batch["targets"], *seen, chunk=self.chunk)
        if own:
            distances = [feature_distance(*pair, self.features.loss) for pair in zip(own, theirs, strict=True)]
            found["features"] = sum(distances[1:], distances[0]) / len(distances)
        return found, forward.sides

    def _teacher(self, weights: Tree, batch: Batch) -> tuple[list[jax.Array], list[jax.Array]]:
        """What its predictions are made of, and its features."""
        if self.teacher is None:
            return [batch["teacher_ids"], batch["teacher_logits"]], []
        hidden, features = self.teacher.features(weights[TEACHER], batch, self.features.teacher_layers)
        whole = [self.sharder.constrain(x, "act_batch", "act_length", "act_embed") for x in (hidden, *features)]
        return whole[:1], whole[1:]


def distillation_loss(comparison: StudentTeacher, task: DistillTask) -> LossFn:
    """alpha divergence + (1 - alpha) nll + weight features, with the batch's own alpha, beta and temperature."""

    def loss(weights: Tree, batch: Batch, key: jax.Array | None) -> Sums:
        alpha, temperature = batch["alpha"][:, None], batch["temperature"][:, None]
        beta = None if task.beta is None else batch["beta"][:, None]
        found, sides = comparison(weights, batch, key, kind=task.divergence, beta=beta, temperature=temperature)
        total = alpha * found["divergence"] + (1 - alpha) * found["nll"]
        if "features" in found:
            total = total + task.features.weight * found["features"]
        measured = {"cross_entropy" if name == "nll" else name: values for name, values in found.items()}
        sums = {name: jax.lax.stop_gradient(jnp.sum(batch["weights"] * x)) for name, x in measured.items()}
        sums |= {"loss": jnp.sum(batch["weights"] * total), "weight": jnp.sum(batch["weights"])}
        return add_aux_losses(sums, sides)

    return loss


def held_out_divergence(comparison: StudentTeacher) -> LossFn:
    """What a held-out batch is measured by, whatever is minimised: nll, and kl, KL(teacher | student) as they are."""

    def loss(weights: Tree, batch: Batch, key: jax.Array | None) -> Sums:
        temperature = jnp.ones((1, 1), jnp.float32)
        found, _ = comparison(weights, batch, key, kind=Divergence.forward_kl, beta=None, temperature=temperature)
        nll, kl = (jnp.sum(batch["weights"] * found[name]) for name in ("nll", "divergence"))
        return {"loss": nll, "nll": nll, "kl": kl, "weight": jnp.sum(batch["weights"])}

    return loss
