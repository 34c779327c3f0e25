"""The loss that a model is trained and evaluated with: of the next token, of block diffusion, or the user's own."""

import dataclasses

import jax
import jax.numpy as jnp

from maxhydra.config.plug_ins import call_plug_in
from maxhydra.config.schema.run import Train
from maxhydra.layers import Context
from maxhydra.layers.context import KernelChoice
from maxhydra.model import ModelDef
from maxhydra.model.diffusion import add_noise, training_mask
from maxhydra.sharding import Sharder
from maxhydra.train.loss import Batch, LossFn, Sums, Tree, add_aux_losses, cross_entropy, next_token_loss


def training_loss(model: ModelDef, sharder: Sharder, train: Train) -> LossFn:
    """The loss of training steps: that of the object in train.loss, or that of the model."""
    if train.loss.function is None:
        return likelihood_loss(model, sharder, train)
    own: LossFn = call_plug_in(
        train.loss.function, model, sharder, train, options=train.loss.options, key="train.loss.function"
    )
    return own


def likelihood_loss(model: ModelDef, sharder: Sharder, train: Train) -> LossFn:
    """The negative log-likelihood of the model, or for block diffusion its upper bound."""
    is_diffusion = model.config.diffusion.block_size is not None
    return (block_diffusion_loss if is_diffusion else next_token_loss)(model, sharder, train)


def block_diffusion_loss(model: ModelDef, sharder: Sharder, train: Train) -> LossFn:
    """The NELBO of block diffusion (Arriola et al., 2025) with the linear schedule, one noise level for each block.

    With a masking probability of t, the cross-entropy of masked tokens has weight 1 / t. The targets of a batch are
    noised, and its tokens are the clean copy: it lacks only the last token of a sequence, which nothing attends to.
    """
    diffusion, kernels = model.config.diffusion, model.config.kernels
    assert diffusion.block_size is not None
    size = diffusion.block_size

    def loss(params: Tree, batch: Batch, key: jax.Array | None) -> Sums:
        context, length = Context.of_batch(batch, sharder, key), batch["tokens"].shape[1]
        positions, clean_positions = batch["positions"] + 1, batch["positions"]
        noised = add_noise(batch["targets"], positions, batch["weights"], diffusion, _noise_key(batch, key))
        # Padding behind a sequence is not hidden by causality here.
        segments = context.is_real_BT.astype(jnp.int32) if context.segments is None else context.segments
        context = dataclasses.replace(
            context,
            positions=jnp.concatenate([positions, clean_positions], axis=1),
            segments=jnp.concatenate([segments, segments], axis=1),
            visible_BTS=training_mask(positions, clean_positions, size),
        )
        forward = model.forward(params, jnp.concatenate([noised.tokens_BS, batch["tokens"]], axis=1), context)
        sums = cross_entropy(
            model.lm_head(params, sharder),
            forward.hidden_BTD[:, :length],
            batch["targets"],
            batch["weights"] * noised.scale_BS,
            z_loss=train.z_loss,
            chunk=train.chunk,
            kernel=KernelChoice(kernels.linear_cross_entropy.value, kernels.sizes("linear_cross_entropy")),
            placement=context.place,
        )
        return add_aux_losses({**sums, "weight": jnp.sum(batch["weights"])}, forward.aux)

    return loss


def _noise_key(batch: Batch, key: jax.Array | None) -> jax.Array:
    """The key of the noise; in evaluations it depends on the tokens alone, so that all evaluations have the same."""
    if key is None:
        return jax.random.fold_in(jax.random.key(0), jnp.sum(batch["tokens"].astype(jnp.uint32)))
    # Layers fold their indices into the key.
    return jax.random.fold_in(key, 2**31 - 1)
