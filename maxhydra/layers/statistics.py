"""Statistics of the activations of a layer, as aux outputs on the training steps that record them.

Values add up over microbatches, except those whose names end in `max`, of which the largest counts. Padding is not
counted. B batch, T tokens, S keys, C queries of a chunk, D features, F units, N query heads, K key heads, H head size.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from maxhydra.kernels.attention.spec import Request, TokenInfo, visible
from maxhydra.layers.context import Context

# Key of the statistics of a whole layer, next to those of its sub-layers.
LAYER = "layer"
# Queries per sequence whose logits are computed, and those whose logits are in memory at a time.
QUERIES, CHUNK = 512, 64


def is_maximum(name: str) -> bool:
    """Whether an aux output is combined by its maximum instead of its sum."""
    return name.endswith("max")


def add_aux(path: Any, total: jax.Array, part: jax.Array) -> jax.Array:
    """Combine the aux outputs of two microbatches; `path` is that of the leaf."""
    return jnp.maximum(total, part) if is_maximum(path[-1].key) else total + part.astype(total.dtype)


def reduce_aux(aux: Any, axes: tuple[int, ...]) -> Any:
    """Combine aux outputs that are stacked over these axes."""

    def reduce(path: Any, x: jax.Array) -> jax.Array:
        return jnp.max(x, axis=axes) if is_maximum(path[-1].key) else jnp.sum(x, axis=axes)

    return jax.tree_util.tree_map_with_path(reduce, aux)


def activation_statistics(activations: Mapping[str, jax.Array], ctx: Context) -> dict[str, jax.Array]:
    """Sum over the tokens of the mean square, and the largest magnitude, of activations [B, T, D] by name."""
    if not ctx.has_statistics:
        return {}
    real_BT1 = ctx.is_real_BT[:, :, None]
    found = {"count": jnp.sum(real_BT1, dtype=jnp.float32)}
    for name, x_BTD in activations.items():
        magnitude_BTD = jnp.where(real_BT1, jnp.abs(jax.lax.stop_gradient(x_BTD).astype(jnp.float32)), 0)
        found[f"{name}_square"] = jnp.sum(jnp.square(magnitude_BTD)) / x_BTD.shape[-1]
        found[f"{name}_max"] = jnp.max(magnitude_BTD)
    return found


def unit_statistics(hidden_BTF: jax.Array, ctx: Context) -> dict[str, jax.Array]:
    """The largest magnitude of each hidden unit of a feed-forward."""
    if not ctx.has_statistics:
        return {}
    magnitude_BTF = jnp.abs(jax.lax.stop_gradient(hidden_BTF).astype(jnp.float32))
    return {"unit_max": jnp.max(jnp.where(ctx.is_real_BT[:, :, None], magnitude_BTF, 0), axis=(0, 1))}


def logit_statistics(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    request: Request,
    ctx: Context,
    *,
    segments_BT: jax.Array | None,
    selected_BTS: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """The largest attention logit over all heads and the keys that a query sees, before any soft cap.

    Of a long sequence, about 512 evenly spaced queries count: the logits of all would take half the time of a training
    step on a GPU.
    """
    if not ctx.has_statistics:
        return {}
    stride = max(1, q_BTNH.shape[1] // QUERIES)
    tokens = {"segments_BT": segments_BT, "selected_BTS": selected_BTS}
    return {"logit_max": jnp.max(largest_logits(q_BTNH, k_BSKH, request, ctx, stride=stride, **tokens))}


def largest_logits(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    request: Request,
    ctx: Context,
    *,
    segments_BT: jax.Array | None,
    selected_BTS: jax.Array | None = None,
    stride: int = 1,
) -> jax.Array:
    """[N] largest attention logit of each query head, before any soft cap, of every `stride`-th query."""
    q_BTNH, k_BSKH = (jax.lax.stop_gradient(x) for x in (q_BTNH, k_BSKH))
    segments_BT = ctx.is_real_BT.astype(jnp.int32) if segments_BT is None else segments_BT
    S, K = k_BSKH.shape[1:3]
    index_T = jnp.arange(q_BTNH.shape[1])[stride - 1 :: stride]
    q_BTNH, query_segments_BT, selected_BTS = jax.tree.map(
        lambda x: x[:, stride - 1 :: stride], (q_BTNH, segments_BT, selected_BTS)
    )
    B, T, N, H = q_BTNH.shape
    chunk = CHUNK if T % CHUNK == 0 else T

    def of_chunk(queries: tuple[Any, ...]) -> jax.Array:
        q_BCNH, segments_BC, selected_BCS, index_C = queries
        tokens = TokenInfo(segments_BC, segments_BT, index_C[None], jnp.arange(S)[None], selected_BCS)
        mask_BCS = visible(request, tokens, queries=range(chunk), keys=range(S))
        assert mask_BCS is not None
        logits_BKGCS = jnp.einsum("BCKGH,BSKH->BKGCS", q_BCNH.reshape(B, chunk, K, N // K, H), k_BSKH)
        logits_BKGCS = logits_BKGCS.astype(jnp.float32) * request.scale
        return jnp.max(jnp.where(mask_BCS[:, None, None], logits_BKGCS, -jnp.inf), axis=(0, 3, 4)).reshape(N)

    def cut(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0], T // chunk, chunk, *x.shape[2:]), 1, 0)

    chunks = (*jax.tree.map(cut, (q_BTNH, query_segments_BT, selected_BTS)), index_T.reshape(-1, chunk))
    return jnp.max(jax.lax.map(of_chunk, chunks), axis=0)
