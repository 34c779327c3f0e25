"""What is asked of the gated delta rule, and what is known of the tokens.

Shapes: B batch, T tokens, M key heads, G value heads of each key head, K key size, V value size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Inputs(NamedTuple):
    """A call of the gated delta rule. Decays, rates and the state are float32; heads are in formats of their own."""

    query_BTMK: jax.Array
    """Already scaled."""
    key_BTMK: jax.Array
    """Of length one, or near it: a longer key would not overwrite what it finds, but overshoot."""
    value_BTMGV: jax.Array
    log_decay_BTMG: jax.Array
    """At most 0: what a token leaves of the state is its exponential."""
    rate_BTMG: jax.Array
    """From 0 to 1: how much of what the key finds is replaced."""
    state_BMGKV: jax.Array
    """What the tokens before these left."""
    starts_BT: jax.Array | None
    """Tokens that begin anew, without what was before them; None where none does."""

    def wide(self) -> "Inputs":
        """With heads in float32 too."""
        query, key, value = (heads.astype(jnp.float32) for heads in self[:3])
        return self._replace(query_BTMK=query, key_BTMK=key, value_BTMGV=value)


def masked(inputs: Inputs, segments_BT: jax.Array | None) -> Inputs:
    """The inputs with padding (segment 0) that leaves the state as it is, and a start at every change of segment.

    The first segment of a row goes on from the state that the call is given.
    """
    if segments_BT is None:
        return inputs
    is_token_BT = segments_BT != 0
    # The segment of the last token before each one, padding left out; 0 where there is none.
    places_BT = jnp.where(is_token_BT, jnp.arange(segments_BT.shape[1])[None], -1)
    last_BT = jnp.pad(jax.lax.cummax(places_BT, axis=1), ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    earlier_BT = jnp.where(last_BT < 0, 0, jnp.take_along_axis(segments_BT, jnp.maximum(last_BT, 0), axis=1))
    is_token_BT11 = is_token_BT[:, :, None, None]
    return inputs._replace(
        log_decay_BTMG=jnp.where(is_token_BT11, inputs.log_decay_BTMG, 0),
        rate_BTMG=jnp.where(is_token_BT11, inputs.rate_BTMG, 0),
        starts_BT=is_token_BT & (earlier_BT != 0) & (earlier_BT != segments_BT),
    )
