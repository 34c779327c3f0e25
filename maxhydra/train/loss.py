"""The next-token loss, log-probabilities of given tokens, and how aux losses of layers are added to a loss.

A loss returns sums over tokens rather than means, so that they add up over chunks, micro-batches and devices.

Log-probabilities are used by the losses of rl/, align/ and distill/ and by score/. Cross-entropy computes its gradient
together with its value; here the use of the values is not known yet, so the backward pass recomputes the logits of each
chunk.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from maxhydra.config.schema.run import Train
from maxhydra.kernels.linear_cross_entropy import LinearHead, linear_cross_entropy, token_nll_over_mesh
from maxhydra.kernels.linear_cross_entropy.xla import is_target, logprobs_at_targets
from maxhydra.kernels.placement import Placement
from maxhydra.layers import Context
from maxhydra.layers.context import KernelChoice, kernel_errors_as_config_errors
from maxhydra.layers.qk_clip import HEAD_LOGITS
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder

Tree = Any
Batch = dict[str, jax.Array]
# Arrays by name that add up over micro-batches; the entry AUX is a tree of such arrays.
Sums = dict[str, Any]
# (weights, batch, key) -> sums over the batch, including `loss` and `weight`: the step minimizes loss / weight.
# Without a key, dropout is off.
LossFn = Callable[[Tree, Batch, jax.Array | None], Sums]
# Entries of the sums: the aux losses of layers, already included in `loss`, and the tree of other layer statistics.
AUX_LOSS, AUX = "side_loss", "aux"
# Entry of the sums: arrays [B, ...] with values of each row of the batch, by name. They are not summed.
ROW_VALUES = "row_values"
# Entry of AUX: sums of nll and weight by bucket of the position in the document, on steps that record statistics.
POSITIONS = "positions"


def next_token_loss(model: ModelDef, sharder: Sharder, train: Train) -> LossFn:
    """Cross-entropy of each next token, plus the aux losses of layers and the multi-token prediction loss."""

    kernels = model.config.kernels

    def loss(params: Tree, batch: Batch, key: jax.Array | None) -> Sums:
        context = Context.of_batch(batch, sharder, key)
        forward = model.forward(params, batch["tokens"], context, mtp_hidden=True)
        token_loss = partial(
            cross_entropy,
            model.lm_head(params, sharder),
            z_loss=train.z_loss,
            chunk=train.chunk,
            kernel=KernelChoice(kernels.linear_cross_entropy.value, kernels.sizes("linear_cross_entropy")),
            placement=context.place,
        )
        sums = add_aux_losses(token_loss(forward.hidden_BTD, batch["targets"], batch["weights"]), forward.aux)
        if context.has_statistics:
            hidden_BTD = jax.lax.stop_gradient(forward.hidden_BTD)
            head = jax.lax.stop_gradient(params), sharder
            logprobs = token_logprobs(
                model.lm_head(*head), hidden_BTD, batch["targets"], chunk=train.chunk, place=context.place
            )
            sums = {**sums, AUX: {**sums.get(AUX, {}), POSITIONS: loss_by_position(logprobs, batch)}}
        if not forward.mtp_hidden:
            return sums
        mtp_sums = [
            token_loss(hidden, *mtp_targets(batch, depth)) for depth, hidden in enumerate(forward.mtp_hidden, 1)
        ]
        means = {name: sum(sums[name] for sums in mtp_sums) / len(mtp_sums) for name in ("loss", "nll")}
        return {**sums, "loss": sums["loss"] + model.config.mtp.loss_weight * means["loss"], "mtp_loss": means["nll"]}

    return loss


def cross_entropy(
    logits_of: Callable[[jax.Array], jax.Array] | LinearHead,
    hidden: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    z_loss: float,
    chunk: int,
    kernel: KernelChoice,
    placement: Placement | None = None,
) -> Sums:
    """Sums over tokens of weight, nll = logsumexp(z) - z[target], and loss = nll + z_loss * logsumexp(z)^2.

    Only `loss` has a gradient; `nll` and `weight` are constants for differentiation.
    """
    with jax.named_scope("loss"), kernel_errors_as_config_errors():
        loss, nll = linear_cross_entropy(
            logits_of, hidden, targets, weights, z_loss=z_loss, chunk=chunk, **kernel._asdict(), place=placement
        )
        return {"loss": loss, "nll": nll, "weight": jax.lax.stop_gradient(jnp.sum(weights))}


def loss_by_position(logprobs: jax.Array, batch: Batch) -> Sums:
    """Sums of nll and weight over the tokens at positions 0, 1-2, 3-6, 7-14, ... of their documents."""
    buckets = batch["tokens"].shape[1].bit_length()
    bucket = jnp.floor(jnp.log2(batch["positions"].astype(jnp.float32) + 1)).astype(jnp.int32)
    is_in = jnp.minimum(bucket, buckets - 1)[..., None] == jnp.arange(buckets)
    sums = {"nll": -logprobs * batch["weights"], "weight": batch["weights"]}
    return {name: jnp.sum(jnp.where(is_in, value[..., None], 0), axis=(0, 1)) for name, value in sums.items()}


def mtp_targets(batch: Batch, depth: int) -> tuple[jax.Array, jax.Array]:
    """Targets and weights shifted by `depth` tokens; positions past the end of a document or row have weight 0."""
    targets, weights = (jnp.roll(batch[name], -depth, axis=1) for name in ("targets", "weights"))
    is_valid = jnp.arange(targets.shape[1]) < targets.shape[1] - depth
    if "segments" in batch:
        is_valid = is_valid & (batch["segments"] == jnp.roll(batch["segments"], -depth, axis=1))
    return targets, jnp.where(is_valid, weights, 0)


def add_aux_losses(sums: Sums, aux: Tree) -> Sums:
    """Add the aux losses of the layers to a loss, and their other statistics to its sums.

    Aux losses are means over the batch; they are multiplied by the weight because the sums are divided by it later.
    """
    leaves = jax.tree_util.tree_leaves_with_path(aux)
    losses = [jnp.sum(leaf) for keys, leaf in leaves if keys[-1].key == "loss"]
    statistics = jax.lax.stop_gradient(_without_losses(aux))
    extra: Sums = {AUX: statistics} if statistics else {}
    if losses:
        aux_loss = sums["weight"] * sum(losses[1:], losses[0])
        extra |= {"loss": sums["loss"] + aux_loss, AUX_LOSS: jax.lax.stop_gradient(aux_loss)}
    return {**sums, **extra}


def layer_metrics(aux: Tree) -> dict[str, jax.Array]:
    """Metrics of the experts' load and of attention logits; empty for models without experts and QK-Clip.

    Max over mean of the load in the most imbalanced layer, and, if rows can be dropped, how many were in all layers;
    the largest attention logit of all layers before QK-Clip.
    """
    leaves = jax.tree_util.tree_leaves_with_path(aux)
    ratios = [_max_over_mean(leaf) for keys, leaf in leaves if keys[-1].key == "load"]
    dropped = [jnp.sum(leaf) for keys, leaf in leaves if keys[-1].key == "dropped"]
    logits = [jnp.max(leaf) for keys, leaf in leaves if keys[-1].key == HEAD_LOGITS]
    metrics = {"moe/load_max_mean": jnp.max(jnp.stack(ratios))} if ratios else {}
    metrics |= {"attention/logit_max": jnp.max(jnp.stack(logits))} if logits else {}
    return {**metrics, "moe/dropped": jnp.sum(jnp.stack(dropped))} if dropped else metrics


def _max_over_mean(load: jax.Array) -> jax.Array:
    return jnp.max(jnp.max(load, axis=-1) / jnp.maximum(jnp.mean(load, axis=-1), 1e-6))


def _without_losses(tree: Tree) -> Tree:
    """The tree without leaves named `loss`, and without the branches that become empty."""
    if not isinstance(tree, dict):
        return tree
    pruned = {name: _without_losses(subtree) for name, subtree in tree.items() if name != "loss"}
    return {name: subtree for name, subtree in pruned.items() if not isinstance(subtree, dict) or subtree}


T = TypeVar("T")


class ScoredTokens(NamedTuple):
    """Token log-probabilities of a forward pass, and the aux outputs of its layers."""

    logprobs: jax.Array
    aux: Any
    entropy: jax.Array | None = None
    """Entropy [B, S] of the next-token distributions, if it was asked for."""
    hidden_BTD: Any = None
    """Hidden states after the final norm."""
    sampler_error: jax.Array | None = None
    """`sampler_error` of each completion, of a batch that has the log-probabilities of its sampler."""


def sampler_error(logprobs: jax.Array, sampled: jax.Array, mask_BS: jax.Array) -> jax.Array:
    """[B]: mean ratio between the probabilities of a completion's tokens in the trainer and in its sampler, or inverse.

    `mask_BS` is 1 at the tokens of completions.
    """
    # Differences at other positions are unbounded.
    ratio_BS = jnp.exp(jnp.abs(jnp.where(mask_BS > 0, logprobs - sampled, 0)))
    total_B = jnp.sum(jnp.where(mask_BS > 0, ratio_BS, 0), axis=1)
    return jax.lax.stop_gradient(total_B / jnp.maximum(jnp.sum(mask_BS > 0, axis=1), 1))


@dataclasses.dataclass(frozen=True)
class Scorer:
    """Log-probabilities of the targets of a batch that has one document per row."""

    model: ModelDef
    sharder: Sharder
    chunk: int

    def __call__(
        self, weights: Any, batch: Mapping[str, jax.Array], key: jax.Array | None, *, is_adapted: bool
    ) -> jax.Array:
        """Log-probabilities [B, S] of the model with or without its adapter; without a key, dropout is off."""
        return self.score(weights, batch, key, is_adapted=is_adapted).logprobs

    def score(
        self,
        weights: Any,
        batch: Mapping[str, jax.Array],
        key: jax.Array | None,
        *,
        is_adapted: bool,
        with_entropy: bool = False,
    ) -> ScoredTokens:
        """Like calling the scorer, and also returns the aux outputs of the layers."""
        context = Context.of_batch(batch, self.sharder, key, is_adapted=is_adapted)
        forward = self.model.forward(weights, batch["tokens"], context)
        head = self.model.lm_head(weights, self.sharder, is_adapted=is_adapted)
        if with_entropy:
            logprobs, entropy = map_sequence_chunks(
                lambda hidden, targets: logprobs_and_entropy(head(hidden), targets),
                forward.hidden_BTD,
                batch["targets"],
                chunk=self.chunk,
            )
            return ScoredTokens(logprobs, forward.aux, entropy, forward.hidden_BTD)
        logprobs = token_logprobs(
            head,
            forward.hidden_BTD,
            batch["targets"],
            chunk=self.chunk,
            place=context.place,
        )
        return ScoredTokens(logprobs, forward.aux, None, forward.hidden_BTD)


@dataclasses.dataclass(frozen=True)
class SequenceScorer:
    """Scores of sequences by a reward model, at their last token."""

    model: ModelDef
    sharder: Sharder

    def __call__(
        self, weights: Tree, rows: Mapping[str, jax.Array], key: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """Scores [B] in float32, and the aux outputs of the layers. Without a key, dropout is off."""
        forward = self.model.forward(weights, rows["tokens"], Context.of_batch(rows, self.sharder, key))
        # The score of every position: a sum over the hidden state, and no gather of it over a sharded length.
        scores_BT = self.model.scores(weights, forward.hidden_BTD)
        is_last_BT = jnp.arange(scores_BT.shape[1]) == rows["last"][:, None]
        return jnp.sum(jnp.where(is_last_BT, scores_BT, 0), axis=1), forward.aux


def token_logprobs(
    logits_of: Callable[[jax.Array], jax.Array] | LinearHead,
    hidden: jax.Array,
    targets: jax.Array,
    *,
    chunk: int,
    place: Placement | None = None,
) -> jax.Array:
    """log p(target) at each position, float32 [B, S], differentiable in `hidden` and the closure of `logits_of`.

    With `chunk`, the logits of only `chunk` positions per sequence exist at a time, forward and backward. Over a mesh,
    which needs a LinearHead, the head is gathered once forward and once backward, whatever the number of chunks.
    """
    with jax.named_scope("logprobs"):
        if isinstance(logits_of, LinearHead) and place is not None and place.free_axes:
            return -token_nll_over_mesh(logits_of, hidden, targets, chunk=chunk, place=place)
        return map_sequence_chunks(
            lambda hidden, targets: target_logprobs(logits_of(hidden), targets), hidden, targets, chunk=chunk
        )


def logprobs_and_entropy(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """log p(target), and the entropy of p."""
    wide = logits.astype(jnp.float32)
    logprobs, normaliser, _ = logprobs_at_targets(wide, targets)
    all_logprobs = wide - normaliser[..., None]
    return logprobs, -jnp.sum(jnp.exp(all_logprobs) * all_logprobs, axis=-1)


def map_sequence_chunks(function: Callable[..., T], *arrays: jax.Array, chunk: int) -> T:
    """Apply a position-wise function of arrays [B, S, ...] to `chunk` positions at a time (0: all at once).

    The result, a tree of [B, S, ...], does not depend on `chunk`. Intermediates are rematerialized in the backward pass
    and never exist for more than one chunk.
    """
    length = arrays[0].shape[1]
    if not 0 < chunk < length:
        return function(*arrays)

    # Chunks are scanned inputs rather than slices of a closed-over array, so that each gradient is written once.
    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0], length // chunk, chunk, *x.shape[2:]), 1, 0)

    def join(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], length, *x.shape[3:])

    @jax.checkpoint
    def apply_chunk(_: None, chunks: tuple[jax.Array, ...]) -> tuple[None, Any]:
        return None, function(*chunks)

    return jax.tree.map(join, jax.lax.scan(apply_chunk, None, tuple(map(split, arrays)))[1])


@jax.custom_vjp
def target_logprobs(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """log softmax(logits)[target] in float32. The only residual of its size is the logits, in their own dtype."""
    return logprobs_at_targets(logits.astype(jnp.float32), targets)[0]


def _forward(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    logprobs, normaliser, _ = logprobs_at_targets(logits.astype(jnp.float32), targets)
    return logprobs, (logits, targets, normaliser)


def _backward(residuals: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[jax.Array, None]:
    logits, targets, normaliser = residuals
    softmax = jnp.exp(logits.astype(jnp.float32) - normaliser[..., None])
    return (cotangent[..., None] * (is_target(logits, targets) - softmax)).astype(logits.dtype), None


target_logprobs.defvjp(_forward, _backward)
