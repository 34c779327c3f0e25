"""The gated delta rule chunk by chunk for GPUs, in Pallas for Triton.

Forward, a kernel makes what chunks are without a state, all at once, and another takes the state through them. Nothing
but the arguments is kept for the gradient: both run again, then one takes the gradient of the state back through the
chunks, and one makes the gradients of all chunks at once. Products are in the format of the values, with sums in
float32; the state is float32. Of float32, products are made of three in TF32 each, which loses nothing that matters.

Shapes as in request.py; N value heads of all key heads, C chunks, I and J tokens of a chunk. With A for the system of
chunked.py and R for the rates, what is written is (1 + A)^-1 R (v - found).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import DotAlgorithmPreset as Algorithm

from maxhydra.kernels.gated_delta.request import Inputs
from maxhydra.kernels.gated_delta.triton import gradients, scan
from maxhydra.kernels.gated_delta.triton.parts import CHUNK, How, Tile, Tiles
from maxhydra.kernels.gated_delta.triton.systems import Tokens, systems

Pair = tuple[jax.Array, jax.Array]

HOW = {
    "bfloat16": How(
        dtype=jnp.bfloat16,
        algorithm=Algorithm.BF16_BF16_F32,
        of_inverse=Algorithm.TF32_TF32_F32,
        tiles=Tiles(Tile(0, 4, 1), Tile(64, 4, 2), Tile(64, 4, 2), Tile(64, 8, 2)),
        interpret=False,
    ),
    "float32": How(
        dtype=jnp.float32,
        algorithm=Algorithm.TF32_TF32_F32_X3,
        of_inverse=Algorithm.TF32_TF32_F32_X3,
        tiles=Tiles(Tile(0, 4, 1), Tile(32, 4, 1), Tile(32, 4, 1), Tile(32, 8, 1)),
        interpret=False,
    ),
}


def gated_delta(inputs: Inputs, *, how: How | None = None) -> Pair:
    """What every token reads, [B, T, M, G, V], and the state after the last."""
    B, T, M, G, V = inputs.value_BTMGV.shape
    how = how or HOW[inputs.value_BTMGV.dtype.name]
    query, key, value = (x.astype(how.dtype) for x in inputs[:3])
    starts_BT = jnp.zeros((B, T), bool) if inputs.starts_BT is None else inputs.starts_BT
    log_decay_BNT, rate_BNT = (x.reshape(B, T, M * G).swapaxes(1, 2) for x in inputs[3:5])
    # Tokens that are added are zeros, which leave the state alone.
    added = -T % CHUNK
    tokens = Tokens(
        *(jnp.pad(x, ((0, 0), (0, added), (0, 0), (0, 0))) for x in (query, key, value.reshape(B, T, M * G, V))),
        *(jnp.pad(x, ((0, 0), (0, 0), (0, added))) for x in (log_decay_BNT, rate_BNT)),
        resets_BT=_resets(jnp.pad(starts_BT, ((0, 0), (0, added)))),
    )
    K = tokens.key_BTMK.shape[3]
    out_BTNV, state_BNKV = _run(how, tokens, inputs.state_BMGKV.reshape(B, M * G, K, V))
    return out_BTNV[:, :T].reshape(B, T, M, G, V), state_BNKV.reshape(inputs.state_BMGKV.shape)


def _resets(starts_BT: jax.Array) -> jax.Array:
    """Starts up to each token within its chunk."""
    B, T = starts_BT.shape
    return jnp.cumsum(starts_BT.astype(jnp.int32).reshape(B, -1, CHUNK), axis=2).reshape(B, T)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(how: How, tokens: Tokens, state_BNKV: jax.Array) -> Pair:
    out_BTNV, state_BNKV, *_ = scan.forward(how, tokens, systems(how, tokens), state_BNKV, is_kept=False)
    return out_BTNV, state_BNKV


def _forward(how: How, tokens: Tokens, state_BNKV: jax.Array) -> tuple[Pair, tuple[Tokens, jax.Array]]:
    return _run(how, tokens, state_BNKV), (tokens, state_BNKV)


def _backward(how: How, kept: tuple[Tokens, jax.Array], d_results: Pair) -> tuple[Any, jax.Array]:
    (tokens, state_BNKV), (d_out_BTNV, d_left_BNKV) = kept, d_results
    made = systems(how, tokens)
    there = scan.forward(how, tokens, made, state_BNKV, is_kept=True)
    back = scan.backward(how, tokens, made, d_out_BTNV, d_left_BNKV)
    found = gradients.gradients(how, tokens, made, d_out_BTNV, there, back)
    narrow = (gradient.astype(x.dtype) for gradient, x in zip(found[:5], tokens[:5], strict=True))
    return Tokens(*narrow, None), back.d_state_BNKV  # type: ignore[arg-type]


_run.defvjp(_forward, _backward)
