"""The gated delta rule over sequences that are sharded along their length: only states pass between devices.

The tokens of a device map the state before them, S, to the state behind them, A S + B, and add Q S to the outputs that
they have with a state of zero. No device waits for A, B and Q: they are the results for a state of one and values of
zero, and for a state of zero. A and B, [K, K] and [K, V] for each head, are gathered, and every device computes the
state before its tokens from those of the devices before it.

Shapes as in spec.py.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxhydra.kernels.gated_delta.spec import Inputs
from maxhydra.kernels.placement import Entry, Placement

Run = Callable[[Inputs], tuple[jax.Array, jax.Array]]


def over_length(run: Run, place: Placement) -> Run:
    """Run a backend on the tokens, rows and key heads of each device."""
    axis, size = place.spec("length")[0], place.num_shards("length")
    tokens, state = place.spec("batch", "length", "kv_heads"), place.spec("batch", "kv_heads")
    specs = Inputs(tokens, tokens, tokens, tokens, tokens, state, place.spec("batch", "length"))  # type: ignore[arg-type]

    def on_device(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
        out_BTMGV, state_BMGKV = pass_states(run, inputs, axis, size)
        return out_BTMGV, state_BMGKV[None]

    def run_sharded(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
        # The last state is the same on all devices.
        out_specs = (tokens, place.spec("length", "batch", "kv_heads"))
        out_BTMGV, states = place.shard_map(on_device, (specs,), out_specs)(inputs)
        return out_BTMGV, states[-1]

    return run_sharded


def pass_states(run: Run, inputs: Inputs, axis: Entry, size: int) -> tuple[jax.Array, jax.Array]:
    """The outputs of a device's tokens, and the state behind the last token of all devices; runs under shard_map."""
    start_BMGKV, K = inputs.state_BMGKV, inputs.key_BTMK.shape[-1]
    out_BTMGV, change_BMGKV = run(inputs._replace(state_BMGKV=jnp.zeros_like(start_BMGKV)))
    no_value = jnp.zeros((*inputs.value_BTMGV.shape[:-1], K), inputs.value_BTMGV.dtype)
    ones = jnp.broadcast_to(jnp.eye(K, dtype=jnp.float32), (*start_BMGKV.shape[:-2], K, K))
    query_BTMGK, transition_BMGKK = run(inputs._replace(value_BTMGV=no_value, state_BMGKV=ones))

    def advance(state_BMGKV: jax.Array, device: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        transition, change = device
        return jnp.matmul(transition, state_BMGKV, precision="highest") + change, state_BMGKV

    devices = tuple(jax.lax.all_gather(x, axis) for x in (transition_BMGKK, change_BMGKV))
    last_BMGKV, before = jax.lax.scan(advance, start_BMGKV, devices)
    own_BMGKV = jax.lax.dynamic_index_in_dim(before, jax.lax.axis_index(axis), keepdims=False)
    from_state = jnp.einsum("BTMGK,BMGKV->BTMGV", query_BTMGK, own_BMGKV, precision="highest")
    return out_BTMGV + from_state, last_BMGKV
