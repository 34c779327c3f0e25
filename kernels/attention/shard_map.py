"""Attention over a mesh with a kernel that sees one device: rows and heads need nothing of each other."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from maxhydra.kernels.attention.spec import Request, TokenInfo
from maxhydra.kernels.placement import Placement

Run = Callable[[jax.Array, jax.Array, jax.Array, Request, TokenInfo, Any], jax.Array]


def over_devices(run: Run, place: Placement) -> Run:
    """The kernel on the rows and heads of each device; one key and value head is whole on all of them."""
    if place.mesh is None or place.mesh.size == 1:
        return run

    def split(
        q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, request: Request, tokens: TokenInfo, sinks_N: Any
    ) -> jax.Array:
        queries = PartitionSpec(place.batch, None, place.heads, None)
        keys = PartitionSpec(place.batch, None, place.kv_heads if k_BSKH.shape[2] > 1 else None, None)
        specs: Any = (queries, keys, keys, PartitionSpec(place.batch), PartitionSpec(place.heads))

        def on_device(q: jax.Array, k: jax.Array, v: jax.Array, tokens: TokenInfo, sinks: Any) -> jax.Array:
            return run(q, k, v, request, tokens, sinks)

        mapped = jax.shard_map(on_device, mesh=place.mesh, in_specs=specs, out_specs=queries, check_vma=False)
        return mapped(q_BTNH, k_BSKH, v_BSKH, tokens, sinks_N)

    return split
