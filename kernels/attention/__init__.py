"""Attention: softmax(scale * q k^T) v over the keys that each query may attend to.

`attention` is the entry point; BACKENDS is its capability table (kernels/dispatch.py). A backend supports a request
completely or not at all: no request is weakened to fit a backend.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

from maxhydra.kernels.attention import blockwise, context, cudnn, mosaic, reference, splash, triton, xla
from maxhydra.kernels.attention.partials import BlockKernel
from maxhydra.kernels.attention.spec import Request, TokenInfo
from maxhydra.kernels.dispatch import CallSpec, Capability, Operation, UnsupportedError, either
from maxhydra.kernels.placement import Placement
from maxhydra.kernels.tiles import Sizes, with_sizes

__all__ = ["BACKENDS", "OPERATION", "Backend", "Call", "Request", "UnsupportedError", "attention"]

Run = Callable[[jax.Array, jax.Array, jax.Array, Request, TokenInfo, Any], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(CallSpec):
    """A request over sequences of this length with heads of these sizes."""

    request: Request
    head_dim: int
    value_dim: int
    length: int
    """Length of queries and keys; their greatest common divisor if they differ."""
    has_segments: bool
    has_positions: bool
    has_selection: bool
    has_sinks: bool
    is_block: bool = False
    """The keys are one of several blocks, whose results are merged by their log-sum-exp."""
    is_long: bool = False
    """The sequence is sharded along its length, and so long that its logits may not be materialized."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend(Capability[Call]):
    """Capabilities of one backend."""

    run: Run
    head_dims: tuple[int, ...] | None = None
    """None: any, within the next two limits."""
    pads_heads: bool = False
    """Whether heads between the two largest sizes of `head_dims` are padded with zeros, and values like them."""
    max_head_dim: int | None = None
    """None: any."""
    head_dim_multiple: int = 1
    length_multiple: int = 1
    """Sequence lengths must be multiples of this."""
    segment_length_multiple: int = 1
    """With segments, sequence lengths must be multiples of this."""
    softcap: bool = True
    chunk: bool = True
    sinks: bool = True
    positions: bool = True
    selection: bool = True
    """Whether each query may be restricted to a selection of keys."""
    value_dim: bool = True
    """Whether values may have a different size than keys."""
    block: BlockKernel | None = None
    """Kernels that attend to one block of keys at a time, for context parallelism."""
    offset: bool = True
    """Whether keys may start with tokens before the first query."""

    def requirements(self, call: Call) -> tuple[tuple[bool, str], ...]:
        largest = max(call.head_dim, call.value_dim)
        is_padded = self.pads_heads and not call.is_block and self._between_largest(largest)
        length_fits = not call.has_segments or call.length % self.segment_length_multiple == 0
        return (
            (
                largest <= (self.max_head_dim or largest) and call.head_dim % self.head_dim_multiple == 0,
                f"takes heads in multiples of {self.head_dim_multiple} up to {self.max_head_dim}, not {largest}",
            ),
            (
                self.head_dims is None or call.head_dim in self.head_dims or is_padded,
                f"takes heads of {either(self.head_dims or ())}, not {call.head_dim}",
            ),
            (
                call.length % self.length_multiple == 0,
                f"takes lengths in multiples of {self.length_multiple}, not {call.length}",
            ),
            (length_fits, f"takes segments in multiples of {self.segment_length_multiple} tokens, not {call.length}"),
            (self.softcap or call.request.softcap is None, "does not support soft-capping"),
            (self.chunk or call.request.chunk is None, "does not support chunks"),
            (self.sinks or not call.has_sinks, "does not support sinks"),
            (self.positions or not call.has_positions, "does not support positions, which a KV cache needs"),
            (self.selection or not call.has_selection, "does not support a selection of keys"),
            (
                self.value_dim or call.value_dim == call.head_dim or is_padded,
                f"takes values of the size of keys, not {call.value_dim} and {call.head_dim}",
            ),
            (self.block is not None or not call.is_block, "does not attend to blocks of keys (mesh.context=ring)"),
            (self.offset or not call.request.offset, "needs as many keys as queries"),
        )

    def _between_largest(self, size: int) -> bool:
        *_, second, first = sorted(self.head_dims or (0, 0))
        return second < size <= first


# cuDNN: heads up to 256 are supported on Hopper only; 128 holds on every GPU from Ampere on. Its masks, which carry the
# segments, need even lengths in training. Mosaic: warpgroups and wgmma exist on Hopper only.
BACKENDS: dict[str, Backend] = {
    "cudnn": Backend(
        run=cudnn.attention,
        platforms=("gpu",),
        dtypes=("bfloat16", "float16"),
        max_head_dim=128,
        head_dim_multiple=8,
        segment_length_multiple=2,
        softcap=False,
        chunk=False,
        sinks=False,
        positions=False,
        selection=False,
        value_dim=False,
        offset=False,
        splits=("batch", "length", "heads"),
    ),
    "mosaic": Backend(
        run=mosaic.attention,
        platforms=("gpu",),
        capabilities=("9.0",),
        dtypes=("bfloat16", "float16"),
        head_dims=tuple(mosaic.TILES),
        pads_heads=True,
        length_multiple=mosaic.LENGTH_MULTIPLE,
        positions=False,
        selection=False,
        value_dim=False,
        block=BlockKernel(mosaic.block_forward, mosaic.block_backward),
        splits=("batch", "length", "heads"),
        tile_extents=lambda call: mosaic.tile_extents(call.length),
    ),
    "triton": Backend(
        run=triton.attention,
        platforms=("gpu",),
        dtypes=("bfloat16", "float16"),
        max_head_dim=triton.LARGE,
        length_multiple=triton.LENGTH_MULTIPLE,
        positions=False,
        selection=False,
        block=BlockKernel(triton.block_forward, triton.block_backward),
        splits=("batch", "length", "heads"),
        tile_extents=lambda call: triton.tile_extents(call.length),
    ),
    "splash": Backend(
        run=splash.attention,
        platforms=("tpu",),
        dtypes=("float32", "bfloat16"),
        length_multiple=splash.LENGTH_MULTIPLE,
        positions=False,
        selection=False,
        splits=("batch", "length", "heads"),
    ),
    "xla": Backend(run=xla.attention, block=BlockKernel(blockwise.forward, blockwise.backward)),
    "reference": Backend(run=reference.attention),
}


# A window of one block leaves Mosaic's few programs little to overlap: with 128 tokens and 64 heads of 64, the forward
# pass takes 0.17 ms with Triton and 0.23 with Mosaic; with gradients 0.64 and 0.78.
SHORT_WINDOW = 128
# Rows of one block, such as short prompts: 64 rows of 64 tokens, 32 query and 8 key heads of 64, forward, take Triton
# 24 us and cuDNN 56.
SHORT_ROW = 64


def _fastest_first(call: Call) -> list[str]:
    """Backends in the order of the table, except for calls where measurements say otherwise.

    With gradients, causal, batch 8, 4,096 tokens: 32 query and 8 key heads of 64 take 5.02 ms with Mosaic and 5.41 with
    cuDNN; 24 and 8 heads of 128 take 5.86 and, on another card, 6.31. Forward alone: 1.57 and 1.46, 1.49 and 1.59.
    Of the head sizes that Triton would pad with zeros, Mosaic pads those above 128, since XLA takes three times as long
    for heads of 256; XLA takes the others. cuDNN takes segments as a mask of all queries by all keys, 2 GiB a row at
    32,768 tokens, so that it serves them only if no other kernel does.
    """
    names, request = [name for name in BACKENDS if name != "mosaic"], call.request
    if call.head_dim not in triton.BLOCKS or call.value_dim != call.head_dim:
        names.remove("triton")
        names.append("triton")
    elif call.length <= SHORT_ROW:
        names.remove("triton")
        names.insert(0, "triton")
    if request.window is not None and request.window <= SHORT_WINDOW:
        index = names.index("triton") + 1
    else:
        index = names.index("cudnn") + (request.window is not None or not request.causal)
    names.insert(index, "mosaic")
    is_dense = call.is_long or (call.has_segments and call.value_dim == call.head_dim)
    if is_dense and names.index("triton") > names.index("xla"):
        names.remove("triton")
        names.insert(names.index("xla"), "triton")
    if call.has_segments:
        names.remove("cudnn")
        names.insert(names.index("xla"), "cudnn")
    return names


OPERATION: Operation[Call, Backend] = Operation("attention", BACKENDS, order=_fastest_first)


@OPERATION.record_calls
def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    request: Request,
    *,
    backend: str,
    q_segments_BT: jax.Array | None = None,
    kv_segments_BS: jax.Array | None = None,
    q_positions_BT: jax.Array | None = None,
    kv_positions_BS: jax.Array | None = None,
    selected_BTS: jax.Array | None = None,
    sinks_N: jax.Array | None = None,
    sizes: Sizes = (),
    place: Placement | None = None,
    has_whole_keys: bool = False,
) -> jax.Array:
    """Return the attention outputs [B, T, N, H]; `TokenInfo` documents segments, positions and the selection of keys.

    sinks: one logit per query head that is added to the softmax denominator and has no value. sizes: requested tile
    sizes. place: None is one device of the platform that JAX runs on. has_whole_keys: with sequences sharded along
    their length, the keys are not; they come from something smaller that was gathered.
    """
    tokens = TokenInfo(q_segments_BT, kv_segments_BS, q_positions_BT, kv_positions_BS, selected_BTS)
    _check_shapes(q_BTNH, k_BSKH, v_BSKH, request, tokens, sinks_N)
    place = place or Placement.here()
    call = Call(
        request=request,
        platform=place.platform,
        capability=place.capability,
        splits=place.splits("batch", "length", "heads", "kv_heads"),
        dtype=q_BTNH.dtype.name,
        head_dim=q_BTNH.shape[3],
        value_dim=v_BSKH.shape[3],
        length=math.gcd(q_BTNH.shape[1], k_BSKH.shape[1]),
        has_segments=q_segments_BT is not None,
        has_positions=q_positions_BT is not None,
        has_selection=selected_BTS is not None,
        has_sinks=sinks_N is not None,
        sizes=sizes,
    )
    if place.num_shards("length") > 1:
        run = _over_length(backend, call, place, q_BTNH.shape, has_whole_keys=has_whole_keys)
        return run(q_BTNH, k_BSKH, v_BSKH, request, tokens, sinks_N)
    row = OPERATION.select(backend, call)
    run = with_sizes(row.run, sizes)
    if row.splits is not None:
        k_BSKH, v_BSKH = context.align_heads(k_BSKH, v_BSKH, place)
    queries, keys = place.spec("batch", None, "heads"), context.key_spec(place, k_BSKH, None)
    specs = (queries, keys, keys, place.spec("batch"), place.spec("heads"))

    def on_device(q: jax.Array, k: jax.Array, v: jax.Array, tokens: TokenInfo, sinks: jax.Array | None) -> jax.Array:
        return run(q, k, v, request, tokens, sinks)

    mapped = row.map_shards(on_device, place, in_specs=specs, out_specs=queries)
    return mapped(q_BTNH, k_BSKH, v_BSKH, tokens, sinks_N)


def _over_length(backend: str, call: Call, place: Placement, shape: tuple[int, ...], *, has_whole_keys: bool) -> Run:
    """The computation over sequences that are sharded along their length (context.py); queries have this shape."""
    request, (_, T, N, _) = call.request, shape
    strategy = context.choose_strategy(place, request, num_heads=N, has_selection=call.has_selection)
    ways = place.num_shards("length")
    call = dataclasses.replace(call, splits=(), is_long=True)
    if call.has_selection:
        row = OPERATION.select(backend, dataclasses.replace(call, has_positions=True))
        return context.by_position(row.run, place)
    if strategy == "ulysses":
        row = OPERATION.select(backend, call)
        return context.by_ulysses(with_sizes(row.run, call.sizes), place, has_whole_keys=has_whole_keys)
    local = context.local_request(request)
    if local.window is not None:
        before = context.halo(local, T // ways, ways)
        local = dataclasses.replace(local, offset=before)
        length = math.gcd(T // ways, before)
        row = OPERATION.select(backend, dataclasses.replace(call, request=local, length=length, has_segments=True))
        return context.by_neighbours(with_sizes(row.run, call.sizes), place, tokens_before=before)
    length = context.zigzag_part(T, request, place) or T // ways
    row = OPERATION.select(backend, dataclasses.replace(call, length=length, has_sinks=False, is_block=True))
    assert row.block is not None
    kernel = BlockKernel(with_sizes(row.block.forward, call.sizes), with_sizes(row.block.backward, call.sizes))
    return context.by_ring(kernel, place, is_gathered=strategy == "all_gather", has_whole_keys=has_whole_keys)


def _check_shapes(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    request: Request,
    tokens: TokenInfo,
    sinks_N: jax.Array | None,
) -> None:
    """Reject calls that are invalid on any backend; these are mistakes in code, not in a config."""
    (B, T, N, H), (_, S, K, _) = q_BTNH.shape, k_BSKH.shape
    if k_BSKH.shape != (B, S, K, H) or v_BSKH.shape[:3] != (B, S, K) or N % K:
        raise ValueError(
            f"incompatible shapes: queries {q_BTNH.shape}, keys {k_BSKH.shape}, values {v_BSKH.shape}; expected "
            "[B, T, N, H], [B, S, K, H] and [B, S, K, V], with K a divisor of N"
        )
    if sinks_N is not None and sinks_N.shape != (N,):
        raise ValueError(f"sinks have shape {sinks_N.shape}, expected ({N},): one for each query head")
    if not q_BTNH.dtype == k_BSKH.dtype == v_BSKH.dtype:
        raise ValueError(
            f"queries, keys and values must share a dtype, not {q_BTNH.dtype}, {k_BSKH.dtype}, {v_BSKH.dtype}"
        )
    for of_queries, of_keys in (
        (tokens.q_segments_BT, tokens.kv_segments_BS),
        (tokens.q_positions_BT, tokens.kv_positions_BS),
    ):
        if (of_queries is None) != (of_keys is None):
            raise ValueError("segments and positions must be given for both queries and keys, or for neither")
        if of_queries is not None and of_keys is not None and (of_queries.shape, of_keys.shape) != ((B, T), (B, S)):
            raise ValueError(
                f"segments or positions have shapes {of_queries.shape} and {of_keys.shape}, "
                f"expected {(B, T)} and {(B, S)}"
            )
    if tokens.selected_BTS is not None and tokens.selected_BTS.shape != (B, T, S):
        raise ValueError(f"the selection of keys has shape {tokens.selected_BTS.shape}, expected {(B, T, S)}")
    if request.causal and tokens.q_positions_BT is None and T + request.offset != S:
        raise ValueError(f"causal attention of {T} queries over {S} keys needs positions or an offset to order them")
