"""The chunked gated delta rule for GPUs, in Pallas for Triton.

In the forward pass, one kernel computes the state-independent part of all chunks in parallel, and another carries the
state through them. Only the arguments are saved for the gradient: both kernels run again, then one carries the gradient
of the state back through the chunks, and one computes the gradients of all chunks in parallel. Matmuls are in the dtype
of the values with float32 accumulation; the state is float32. A float32 matmul is three in TF32, which keeps some 21
bits of each number.

Shapes as in spec.py; N value heads of all key heads, C chunks, I and J tokens of a chunk. With A for the system of
chunked.py and R for the rates, the written values are (1 + A)^-1 R (v - predicted).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import DotAlgorithmPreset as Algorithm

from maxhydra.kernels.gated_delta.chunked import CHUNK
from maxhydra.kernels.gated_delta.spec import Inputs
from maxhydra.kernels.gated_delta.triton import backward, inter_chunk
from maxhydra.kernels.gated_delta.triton.common import KernelParams, Tile, Tiles, Tokens, systems

Pair = tuple[jax.Array, jax.Array]

# The sizes whose results were checked on a GPU.
HEAD_DIMS = (128,)

PARAMS = {
    "bfloat16": KernelParams(
        dtype=jnp.bfloat16,
        algorithm=Algorithm.BF16_BF16_F32,
        # In bfloat16 the inverse would have seven times the error of its rounding if keys are similar.
        inverse_algorithm=Algorithm.TF32_TF32_F32,
        tiles=Tiles(4, Tile(64, 4, 2), Tile(64, 4, 2), Tile(64, 8, 2)),
        interpret=False,
    ),
    "float32": KernelParams(
        dtype=jnp.float32,
        algorithm=Algorithm.TF32_TF32_F32_X3,
        inverse_algorithm=Algorithm.TF32_TF32_F32_X3,
        tiles=Tiles(4, Tile(32, 4, 1), Tile(32, 4, 1), Tile(32, 8, 1)),
        interpret=False,
    ),
}


def gated_delta(inputs: Inputs, *, params: KernelParams | None = None) -> Pair:
    """Return the outputs [B, T, M, G, V] and the state after the last token."""
    B, T, M, G, V = inputs.value_BTMGV.shape
    params = params or PARAMS[inputs.value_BTMGV.dtype.name]
    starts_BT = jnp.zeros((B, T), bool) if inputs.starts_BT is None else inputs.starts_BT
    tokens = Tokens(
        query_BTMK=_pad_to_chunks(inputs.query_BTMK.astype(params.dtype), 1),
        key_BTMK=_pad_to_chunks(inputs.key_BTMK.astype(params.dtype), 1),
        value_BTNV=_pad_to_chunks(inputs.value_BTMGV.astype(params.dtype).reshape(B, T, M * G, V), 1),
        log_decay_BNT=_pad_to_chunks(inputs.log_decay_BTMG.reshape(B, T, M * G).swapaxes(1, 2), 2),
        rate_BNT=_pad_to_chunks(inputs.rate_BTMG.reshape(B, T, M * G).swapaxes(1, 2), 2),
        resets_BT=_resets(_pad_to_chunks(starts_BT, 1)),
    )
    K = tokens.key_BTMK.shape[3]
    out_BTNV, state_BNKV = _run(params, tokens, inputs.state_BMGKV.reshape(B, M * G, K, V))
    return out_BTNV[:, :T].reshape(B, T, M, G, V), state_BNKV.reshape(inputs.state_BMGKV.shape)


def _pad_to_chunks(x: jax.Array, axis: int) -> jax.Array:
    """Pad to whole chunks. Padding tokens are zeros, which leave the state unchanged."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % CHUNK)
    return jnp.pad(x, widths)


def _resets(starts_BT: jax.Array) -> jax.Array:
    """Number of resets up to each token within its chunk."""
    B, T = starts_BT.shape
    return jnp.cumsum(starts_BT.astype(jnp.int32).reshape(B, -1, CHUNK), axis=2).reshape(B, T)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(params: KernelParams, tokens: Tokens, state_BNKV: jax.Array) -> Pair:
    out_BTNV, state_BNKV, *_ = inter_chunk.forward(
        params, tokens, systems(params, tokens), state_BNKV, save_residuals=False
    )
    return out_BTNV, state_BNKV


def _forward(params: KernelParams, tokens: Tokens, state_BNKV: jax.Array) -> tuple[Pair, tuple[Tokens, jax.Array]]:
    return _run(params, tokens, state_BNKV), (tokens, state_BNKV)


def _backward(params: KernelParams, residuals: tuple[Tokens, jax.Array], d_results: Pair) -> tuple[Any, jax.Array]:
    (tokens, state_BNKV), (d_out_BTNV, d_final_BNKV) = residuals, d_results
    chunk_systems = systems(params, tokens)
    forward_states = inter_chunk.forward(params, tokens, chunk_systems, state_BNKV, save_residuals=True)
    backward_states = inter_chunk.backward(params, tokens, chunk_systems, d_out_BTNV, d_final_BNKV)
    results = backward.gradients(params, tokens, chunk_systems, d_out_BTNV, forward_states, backward_states)
    d_tokens: Any = jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), results, tokens)
    return d_tokens._replace(resets_BT=None), backward_states.d_state_BNKV


_run.defvjp(_forward, _backward)
