"""Context parallelism: attention over sequences that are sharded along their length (`mesh.sequence`).

ring        keys and values travel around the devices (ring.py); causal work is balanced by zigzag order
ulysses     an all-to-all gives every device whole sequences of some of the heads (Jacobs et al., 2023)
all_gather  keys and values are gathered; with a window only those of the devices just before, as far as it reaches

`auto` takes all_gather for windows, chunks and selections of keys, otherwise ulysses if the heads can be divided, and
otherwise ring. No strategy allocates logits of all queries by all keys.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from maxhydra.kernels.attention.blocks import Inputs
from maxhydra.kernels.attention.partials import BlockKernel
from maxhydra.kernels.attention.ring import Ring, attend, from_zigzag, to_zigzag, zigzag_blocks
from maxhydra.kernels.attention.spec import EXCHANGE_NAME, Request, TokenInfo
from maxhydra.kernels.dispatch import UnsupportedError
from maxhydra.kernels.halo import with_previous_tokens
from maxhydra.kernels.placement import Entry, Placement
from maxhydra.kernels.sharded_vjp import axes_of

Run = Callable[[jax.Array, jax.Array, jax.Array, Request, TokenInfo, Any], jax.Array]

STRATEGIES = ("ring", "ulysses", "all_gather")
# Neighbours' tokens are fetched in multiples of this, which every kernel takes.
HALO_MULTIPLE = 128

logger = logging.getLogger("maxhydra")


def choose_strategy(place: Placement, request: Request, *, num_heads: int, has_selection: bool) -> str:
    """The strategy of this call, or UnsupportedError if the requested one cannot serve it."""
    ways = place.num_shards("length") * place.num_shards("heads")
    reasons: dict[str, tuple[str, ...]] = dict.fromkeys(STRATEGIES, ())
    if num_heads % ways:
        reasons["ulysses"] = (
            f"needs a number of query heads that mesh.sequence x tensor = {ways} divides, not {num_heads}",
        )
    if has_selection:
        for name in ("ring", "ulysses"):
            reasons[name] = (*reasons[name], "does not support a selection of keys (sparse indexer)")
    supported = tuple(name for name in STRATEGIES if not reasons[name])
    if place.context != "auto":
        if reasons[place.context]:
            raise UnsupportedError("context", place.context, reasons[place.context], supported)
        return place.context
    is_local = has_selection or request.window is not None or request.chunk is not None
    strategy = "all_gather" if is_local else "ulysses" if "ulysses" in supported else "ring"
    _log_choice(strategy)
    return strategy


@functools.cache
def _log_choice(strategy: str) -> None:
    logger.info("attention over mesh.sequence by %s", strategy)


def local_request(request: Request) -> Request:
    """The request with chunks as windows; `_chunk_segments` adds the segments that separate them."""
    if request.chunk is None:
        return request
    return dataclasses.replace(request, window=request.chunk, chunk=None)


def halo(request: Request, length: int, devices: int) -> int:
    """Tokens of the devices before that the queries of a device see, rounded up."""
    assert request.window is not None
    tokens = request.window - 1
    if tokens > length:
        return min(-(-tokens // length), devices - 1) * length
    multiple = HALO_MULTIPLE if length % HALO_MULTIPLE == 0 else 1
    return -(-tokens // multiple) * multiple


def align_heads(k_BSKH: jax.Array, v_BSKH: jax.Array, place: Placement) -> tuple[jax.Array, jax.Array]:
    """Keys and values with heads that can be split like those of the queries, each with the query heads that share it.

    Heads that the axes do not divide are repeated until they can be; `key_spec` replicates a single one.
    """
    K, ways = k_BSKH.shape[2], place.num_shards("heads")
    repeats = 1 if K == 1 else math.lcm(K, ways) // K
    return repeat_heads(k_BSKH, repeats), repeat_heads(v_BSKH, repeats)


def repeat_heads(x_BSKH: jax.Array, repeats: int) -> jax.Array:
    return x_BSKH if repeats == 1 else jnp.repeat(x_BSKH, repeats, axis=2)


def key_spec(place: Placement, k_BSKH: jax.Array, length: str | None) -> PartitionSpec:
    """The sharding of aligned keys and values."""
    return place.spec("batch", length, None if k_BSKH.shape[2] == 1 else "heads")


def whole_key_spec(place: Placement) -> PartitionSpec:
    """The sharding of keys and values that `by_ulysses` takes if they are given for whole sequences."""
    heads = (*axes_of(place.spec("heads")[0]), *axes_of(place.spec("length")[0]))
    return PartitionSpec(place.spec("batch")[0], None, heads)


def by_ulysses(run: Run, place: Placement, *, has_whole_keys: bool) -> Run:
    """Run a single-device kernel on whole sequences of some heads."""
    axis, ways = place.spec("length")[0], place.num_shards("length")

    def exchange(x: jax.Array, name: str) -> jax.Array:
        split, concat = (1, 2) if name == "context" else (2, 1)
        received = jax.lax.all_to_all(x, axis, split_axis=split, concat_axis=concat, tiled=True)
        # Also saved under the names that the layers use, instead of the sent arrays.
        return checkpoint_name(checkpoint_name(received, name), EXCHANGE_NAME)

    def run_sharded(q: jax.Array, k: jax.Array, v: jax.Array, request: Request, tokens: TokenInfo, sinks: Any) -> Any:
        def on_device(q: jax.Array, k: jax.Array, v: jax.Array, tokens: TokenInfo, sinks: Any) -> jax.Array:
            if not has_whole_keys:
                repeats = math.lcm(k.shape[2], ways) // k.shape[2]
                k, v = exchange(repeat_heads(k, repeats), "key"), exchange(repeat_heads(v, repeats), "value")
            whole = jax.tree.map(lambda x: jax.lax.all_gather(x, axis, axis=1, tiled=True), tokens)
            return exchange(run(exchange(q, "query"), k, v, request, whole, sinks), "context")

        k, v = align_heads(k, v, place)
        keys = key_spec(place, k, "length")
        if has_whole_keys:
            repeats = math.lcm(k.shape[2], ways * place.num_shards("heads")) // k.shape[2]
            k, v = (repeat_heads(x, repeats) for x in (k, v))
            keys = whole_key_spec(place)
        queries, of_tokens = place.spec("batch", "length", "heads"), place.spec("batch", "length")
        specs = (queries, keys, keys, of_tokens, PartitionSpec(whole_key_spec(place)[2]))
        return place.shard_map(on_device, specs, queries)(q, k, v, tokens, sinks)

    return run_sharded


def by_neighbours(run: Run, place: Placement, *, tokens_before: int) -> Run:
    """Run a single-device kernel on the keys of a device and the tokens before them, for windows."""
    axis, ways = place.spec("length")[0], place.num_shards("length")

    def run_sharded(q: jax.Array, k: jax.Array, v: jax.Array, request: Request, tokens: TokenInfo, sinks: Any) -> Any:
        own_request = dataclasses.replace(local_request(request), offset=tokens_before)

        def on_device(q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, sinks: Any) -> jax.Array:
            segments = jnp.ones(q.shape[:2], jnp.int32) if segments is None else segments
            if request.chunk is not None:
                segments = _chunk_segments(segments, request.chunk, axis, ways)
            k, v, kv_segments = (with_previous_tokens(x, tokens_before, axis, ways) for x in (k, v, segments))
            return run(q, k, v, own_request, TokenInfo(segments, kv_segments, None, None), sinks)

        k, v = align_heads(k, v, place)
        queries, keys = place.spec("batch", "length", "heads"), key_spec(place, k, "length")
        specs = (queries, keys, keys, place.spec("batch", "length"), place.spec("heads"))
        return place.shard_map(on_device, specs, queries)(q, k, v, tokens.q_segments_BT, sinks)

    return run_sharded


def by_ring(kernel: BlockKernel, place: Placement, *, is_gathered: bool, has_whole_keys: bool) -> Run:
    """Run a kernel of one block on the keys of each device in turn."""
    axis, ways = place.spec("length")[0], place.num_shards("length")

    def run_sharded(q: jax.Array, k: jax.Array, v: jax.Array, request: Request, tokens: TokenInfo, sinks: Any) -> Any:
        half = zigzag_part(q.shape[1], request, place)
        ring = Ring(request, kernel, axis, ways, half, is_gathered, has_whole_keys)

        def on_device(inputs: Inputs) -> jax.Array:
            q, k, v, sinks, q_segments, kv_segments = inputs
            q, q_segments = jax.tree.map(ordered, (q, q_segments))
            k, v, kv_segments = jax.tree.map(in_blocks if has_whole_keys else ordered, (k, v, kv_segments))
            out = attend(ring, Inputs(q, k, v, sinks, q_segments, kv_segments))
            return from_zigzag(out, axis, ways) if half else out

        def ordered(x_BT: jax.Array) -> jax.Array:
            return to_zigzag(x_BT, axis, ways) if half else x_BT

        def in_blocks(x_BS: jax.Array) -> jax.Array:
            if half:
                return zigzag_blocks(x_BS, ways)
            return x_BS.reshape(x_BS.shape[0], ways, -1, *x_BS.shape[2:]).swapaxes(0, 1)

        k, v = align_heads(k, v, place)
        queries, length = place.spec("batch", "length", "heads"), None if has_whole_keys else "length"
        keys, of_tokens, of_keys = (
            key_spec(place, k, length),
            place.spec("batch", "length"),
            place.spec("batch", length),
        )
        specs = (Inputs(queries, keys, keys, place.spec("heads"), of_tokens, of_keys),)
        inputs = Inputs(q, k, v, sinks, tokens.q_segments_BT, tokens.kv_segments_BS)
        return place.shard_map(on_device, specs, queries)(inputs)

    return run_sharded


def zigzag_part(length: int, request: Request, place: Placement) -> int | None:
    """Tokens of a part in zigzag order; None if the mask needs no balance or a device's tokens are not even."""
    own = length // place.num_shards("length")
    return own // 2 if request.causal and own % 2 == 0 else None


def by_position(run: Run, place: Placement) -> Run:
    """Run a kernel that takes positions on a device's queries and all keys, for selections of keys."""
    axis = place.spec("length")[0]

    def run_sharded(q: jax.Array, k: jax.Array, v: jax.Array, request: Request, tokens: TokenInfo, sinks: Any) -> Any:
        def on_device(q: jax.Array, k: jax.Array, v: jax.Array, tokens: TokenInfo, sinks: Any) -> jax.Array:
            (B, T), S = q.shape[:2], k.shape[1]
            q_positions_BT = jnp.broadcast_to(jax.lax.axis_index(axis) * T + jnp.arange(T), (B, T))
            kv_positions_BS = jnp.broadcast_to(jnp.arange(S), (B, S))
            tokens = tokens._replace(q_positions_BT=q_positions_BT, kv_positions_BS=kv_positions_BS)
            return run(q, k, v, request, tokens, sinks)

        k, v = align_heads(k, v, place)
        queries, keys = place.spec("batch", "length", "heads"), key_spec(place, k, None)
        of_tokens, of_keys = place.spec("batch", "length"), place.spec("batch")
        of_info: Any = TokenInfo(of_tokens, of_keys, None, None, of_tokens)  # type: ignore[arg-type]
        specs = (queries, keys, keys, of_info, place.spec("heads"))
        return place.shard_map(on_device, specs, queries)(q, k, v, tokens, sinks)

    return run_sharded


def _chunk_segments(segments_BT: jax.Array, chunk: int, axis: Entry, ways: int) -> jax.Array:
    """Segments that also separate the chunks of the sequence, counted by index."""
    length = segments_BT.shape[1]
    numbers_T = (jax.lax.axis_index(axis) * length + jnp.arange(length)) // chunk
    chunks = -(-length * ways // chunk)
    return jnp.where(segments_BT == 0, 0, segments_BT * chunks + numbers_T)
