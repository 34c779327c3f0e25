"""The gated delta rule chunk by chunk for GPUs, in Pallas for Triton.

Forward, a kernel makes what chunks are without a state, all at once, and another takes the state through them. Nothing
but the arguments is kept for the gradient: both run again, then one takes the gradient of the state back through the
chunks, and one makes the gradients of all chunks at once. Products are in the format of the values, with sums in
float32; the state is float32. A product of float32 is three in TF32, which leaves some 21 bits of each number.

Shapes as in request.py; N value heads of all key heads, C chunks, I and J tokens of a chunk. With A for the system of
chunked.py and R for the rates, what is written is (1 + A)^-1 R (v - found).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import DotAlgorithmPreset as Algorithm

from maxhydra.kernels.gated_delta.chunked import CHUNK
from maxhydra.kernels.gated_delta.spec import Inputs
from maxhydra.kernels.gated_delta.triton import backward, inter_chunk
from maxhydra.kernels.gated_delta.triton.common import How, Tile, Tiles
from maxhydra.kernels.gated_delta.triton.intra_chunk import Tokens, systems

Pair = tuple[jax.Array, jax.Array]

# The sizes whose values were checked on a GPU.
HEAD_DIMS = (128,)

HOW = {
    "bfloat16": How(
        dtype=jnp.bfloat16,
        algorithm=Algorithm.BF16_BF16_F32,
        # In bfloat16 the inverse would err seven times as much as its rounding does, where keys are alike.
        of_inverse=Algorithm.TF32_TF32_F32,
        tiles=Tiles(4, Tile(64, 4, 2), Tile(64, 4, 2), Tile(64, 8, 2)),
        interpret=False,
    ),
    "float32": How(
        dtype=jnp.float32,
        algorithm=Algorithm.TF32_TF32_F32_X3,
        of_inverse=Algorithm.TF32_TF32_F32_X3,
        tiles=Tiles(4, Tile(32, 4, 1), Tile(32, 4, 1), Tile(32, 8, 1)),
        interpret=False,
    ),
}


def gated_delta(inputs: Inputs, *, how: How | None = None) -> Pair:
    """What every token reads, [B, T, M, G, V], and the state after the last."""
    B, T, M, G, V = inputs.value_BTMGV.shape
    how = how or HOW[inputs.value_BTMGV.dtype.name]
    starts_BT = jnp.zeros((B, T), bool) if inputs.starts_BT is None else inputs.starts_BT
    tokens = Tokens(
        query_BTMK=_whole(inputs.query_BTMK.astype(how.dtype), 1),
        key_BTMK=_whole(inputs.key_BTMK.astype(how.dtype), 1),
        value_BTNV=_whole(inputs.value_BTMGV.astype(how.dtype).reshape(B, T, M * G, V), 1),
        log_decay_BNT=_whole(inputs.log_decay_BTMG.reshape(B, T, M * G).swapaxes(1, 2), 2),
        rate_BNT=_whole(inputs.rate_BTMG.reshape(B, T, M * G).swapaxes(1, 2), 2),
        resets_BT=_resets(_whole(starts_BT, 1)),
    )
    K = tokens.key_BTMK.shape[3]
    out_BTNV, state_BNKV = _run(how, tokens, inputs.state_BMGKV.reshape(B, M * G, K, V))
    return out_BTNV[:, :T].reshape(B, T, M, G, V), state_BNKV.reshape(inputs.state_BMGKV.shape)


def _whole(x: jax.Array, axis: int) -> jax.Array:
    """In whole chunks. Tokens that are added are zeros, which leave the state alone."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % CHUNK)
    return jnp.pad(x, widths)


def _resets(starts_BT: jax.Array) -> jax.Array:
    """Starts up to each token within its chunk."""
    B, T = starts_BT.shape
    return jnp.cumsum(starts_BT.astype(jnp.int32).reshape(B, -1, CHUNK), axis=2).reshape(B, T)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(how: How, tokens: Tokens, state_BNKV: jax.Array) -> Pair:
    out_BTNV, state_BNKV, *_ = inter_chunk.forward(how, tokens, systems(how, tokens), state_BNKV, is_kept=False)
    return out_BTNV, state_BNKV


def _forward(how: How, tokens: Tokens, state_BNKV: jax.Array) -> tuple[Pair, tuple[Tokens, jax.Array]]:
    return _run(how, tokens, state_BNKV), (tokens, state_BNKV)


def _backward(how: How, kept: tuple[Tokens, jax.Array], d_results: Pair) -> tuple[Any, jax.Array]:
    (tokens, state_BNKV), (d_out_BTNV, d_left_BNKV) = kept, d_results
    made = systems(how, tokens)
    there = inter_chunk.forward(how, tokens, made, state_BNKV, is_kept=True)
    back = inter_chunk.backward(how, tokens, made, d_out_BTNV, d_left_BNKV)
    found = backward.gradients(how, tokens, made, d_out_BTNV, there, back)
    d_tokens: Any = jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), found, tokens)
    return d_tokens._replace(resets_BT=None), back.d_state_BNKV


_run.defvjp(_forward, _backward)
