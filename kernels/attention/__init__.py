"""Attention: softmax(scale * q k^T) v over the keys that each query may see.

`attention` is the one way in. BACKENDS says what serves what, fastest first: `auto` takes the first that serves the
call whole, and a backend that was asked for by name and cannot is an error. No request is weakened to fit a backend.
"""

import dataclasses
import math
from collections.abc import Callable

import jax

from maxhydra.kernels.attention import cudnn, mosaic, reference, splash, triton, xla
from maxhydra.kernels.attention.shard_map import over_devices
from maxhydra.kernels.attention.spec import Request, TokenInfo
from maxhydra.kernels.call_recorder import watched
from maxhydra.kernels.capability import CallSpec, Capability
from maxhydra.kernels.dispatch import UnsupportedError, chosen, either
from maxhydra.kernels.placement import Placement, capability
from maxhydra.kernels.tiles import Sizes, sized

__all__ = ["BACKENDS", "Backend", "Call", "Request", "UnsupportedError", "attention", "choose"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(CallSpec):
    """A request over tokens of such a length, with heads of such a size."""

    request: Request
    head_dim: int
    value_dim: int
    length: int
    """Of queries and keys; what divides both, where they differ."""
    has_segments: bool
    has_positions: bool
    has_chosen: bool
    has_sinks: bool
    has_split_groups: bool = False
    """Query heads lie on other devices than the key heads they share."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend(Capability[Call]):
    """One row of the capability table. Without `devices`, the compiler can split it over any number."""

    run: Callable[..., jax.Array]
    head_dims: tuple[int, ...] | None = None
    """None: any, within what the next two say."""
    max_head_dim: int | None = None
    """None: any."""
    head_dim_multiple: int = 1
    length_multiple: int = 1
    """Of the sequence length."""
    segment_length_multiple: int = 1
    """With segments, the sequence length must be a multiple of this."""
    softcap: bool = True
    chunk: bool = True
    sinks: bool = True
    positions: bool = True
    chosen: bool = True
    value_dim: bool = True
    """Whether values may have another size than keys."""
    split_length: bool = True
    by_device: bool = False
    """A kernel of one device, which is given the rows and heads that lie there."""

    def needs(self, call: Call) -> tuple[tuple[bool, str], ...]:
        largest = max(call.head_dim, call.value_dim)
        length_fits = not call.has_segments or call.length % self.segment_length_multiple == 0
        return (
            (
                largest <= (self.max_head_dim or largest) and call.head_dim % self.head_dim_multiple == 0,
                f"takes heads in multiples of {self.head_dim_multiple} up to {self.max_head_dim}, not {largest}",
            ),
            (
                self.head_dims is None or call.head_dim in self.head_dims,
                f"takes heads of {either(self.head_dims or ())}, not {call.head_dim}",
            ),
            (
                call.length % self.length_multiple == 0,
                f"takes lengths in multiples of {self.length_multiple}, not {call.length}",
            ),
            (length_fits, f"takes segments in multiples of {self.segment_length_multiple} tokens, not {call.length}"),
            (self.softcap or call.request.softcap is None, "has no soft-cap"),
            (self.chunk or call.request.chunk is None, "has no chunks"),
            (self.sinks or not call.has_sinks, "has no sinks"),
            (self.positions or not call.has_positions, "has no positions, which a cache needs"),
            (self.chosen or not call.has_chosen, "has no choice of keys"),
            (
                self.value_dim or call.value_dim == call.head_dim,
                f"takes values of the size of keys, not {call.value_dim} and {call.head_dim}",
            ),
            (self.split_length or not call.request.is_length_split, "needs whole sequences on each device"),
            (not (self.by_device and call.has_split_groups), "needs query and key heads split alike"),
        )


# Fastest first. cuDNN: heads up to 256 exist on Hopper only; 128 holds on every GPU from Ampere on. Its masks, which
# carry the segments, need even lengths in training. Mosaic's warpgroups and their products exist on Hopper alone.
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
        chosen=False,
        value_dim=False,
        split_length=False,
    ),
    "mosaic": Backend(
        run=mosaic.attention,
        platforms=("gpu",),
        capabilities=("9.0",),
        dtypes=("bfloat16", "float16"),
        head_dims=tuple(mosaic.TILES),
        length_multiple=mosaic.LENGTH_MULTIPLE,
        positions=False,
        chosen=False,
        value_dim=False,
        split_length=False,
        devices=1,
        cut=lambda call: mosaic.cut(call.length),
    ),
    "triton": Backend(
        run=triton.attention,
        platforms=("gpu",),
        dtypes=("bfloat16", "float16"),
        max_head_dim=triton.LARGE,
        length_multiple=triton.LENGTH_MULTIPLE,
        positions=False,
        chosen=False,
        split_length=False,
        devices=1,
        cut=lambda call: triton.cut(call.length),
    ),
    "splash": Backend(
        run=splash.attention,
        platforms=("tpu",),
        dtypes=("float32", "bfloat16"),
        length_multiple=splash.LENGTH_MULTIPLE,
        positions=False,
        chosen=False,
        split_length=False,
        by_device=True,
    ),
    "xla": Backend(run=xla.attention),
    "reference": Backend(run=reference.attention),
}


# Windows of a block leave Mosaic's few programs little to overlap: of 128 tokens, 64 heads of 64, forward 0.17 ms with
# Triton and 0.23 with Mosaic, and 0.64 and 0.78 with gradients.
SHORT_WINDOW = 128
# Rows of a block, as prompts may be: 64 of 64 tokens, 32 heads over 8 of 64, take Triton 24 us and cuDNN 56, forward.
SHORT_ROW = 64


def choose(backend: str, call: Call) -> str:
    """The backend that serves the call: the one asked for, or under `auto` the fastest that can."""
    return chosen("attention", backend, {name: BACKENDS[name].refusals(call) for name in _fastest_first(call)})


def _fastest_first(call: Call) -> list[str]:
    """The table's order, but where measurement says otherwise of a call.

    With gradients, causal, batch 8, 4,096 tokens: 32 heads over 8 of 64 take 5.02 ms with Mosaic and 5.41 with cuDNN,
    24 over 8 of 128 take 5.86 and, on another card, 6.31. Forward alone 1.57 and 1.46, 1.49 and 1.59. Heads that Triton
    fills up with zeros are left to XLA: 16 of 192, values of 128, batch 2, take it 4.8 ms; Triton was not timed there.
    """
    names, request = [name for name in BACKENDS if name != "mosaic"], call.request
    if call.head_dim not in triton.BLOCKS or call.value_dim != call.head_dim:
        names.remove("triton")
        names.append("triton")
    elif call.length <= SHORT_ROW:
        names.remove("triton")
        names.insert(0, "triton")
    if request.window is not None and request.window <= SHORT_WINDOW:
        place = names.index("triton") + 1
    else:
        place = names.index("cudnn") + (request.window is not None or not request.causal)
    return [*names[:place], "mosaic", *names[place:]]


@watched
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
    chosen_BTS: jax.Array | None = None,
    sinks_N: jax.Array | None = None,
    sizes: Sizes = (),
    place: Placement | None = None,
) -> jax.Array:
    """Values [B, T, N, H] that the queries gather; `TokenInfo` says what segments, positions and a choice of keys mean.

    sizes: asked of the kernel's tile. place: None is one device of the platform that JAX runs on.
    sinks: a logit for each query head that joins the sum by which its weights are divided, and gathers nothing.
    """
    tokens = TokenInfo(q_segments_BT, kv_segments_BS, q_positions_BT, kv_positions_BS, chosen_BTS)
    _check_shapes(q_BTNH, k_BSKH, v_BSKH, request, tokens, sinks_N)
    place = place or Placement.here()
    call = Call(
        request=request,
        platform=place.platform,
        capability=capability(),
        devices=place.devices,
        dtype=q_BTNH.dtype.name,
        head_dim=q_BTNH.shape[3],
        value_dim=v_BSKH.shape[3],
        length=math.gcd(q_BTNH.shape[1], k_BSKH.shape[1]),
        has_segments=q_segments_BT is not None,
        has_positions=q_positions_BT is not None,
        has_chosen=chosen_BTS is not None,
        has_sinks=sinks_N is not None,
        has_split_groups=place.heads != place.kv_heads and k_BSKH.shape[2] > 1,
        sizes=sizes,
    )
    chosen_one = BACKENDS[choose(backend, call)]
    run = sized(chosen_one.run, sizes)
    run = over_devices(run, place) if chosen_one.by_device else run
    return run(q_BTNH, k_BSKH, v_BSKH, request, tokens, sinks_N)


def _check_shapes(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    request: Request,
    tokens: TokenInfo,
    sinks_N: jax.Array | None,
) -> None:
    """Refuse calls that have no meaning on any backend; these are mistakes in code, not in a config."""
    (B, T, N, H), (_, S, K, _) = q_BTNH.shape, k_BSKH.shape
    if k_BSKH.shape != (B, S, K, H) or v_BSKH.shape[:3] != (B, S, K) or N % K:
        raise ValueError(f"queries {q_BTNH.shape}, keys {k_BSKH.shape} and values {v_BSKH.shape} do not fit together")
    if sinks_N is not None and sinks_N.shape != (N,):
        raise ValueError(f"sinks {sinks_N.shape} for {N} query heads")
    if not q_BTNH.dtype == k_BSKH.dtype == v_BSKH.dtype:
        raise ValueError(f"queries {q_BTNH.dtype}, keys {k_BSKH.dtype}, values {v_BSKH.dtype}: not one type")
    for of_queries, of_keys in (
        (tokens.q_segments_BT, tokens.kv_segments_BS),
        (tokens.q_positions_BT, tokens.kv_positions_BS),
    ):
        if (of_queries is None) != (of_keys is None):
            raise ValueError("segments and positions are given for both queries and keys, or for neither")
        if of_queries is not None and of_keys is not None and (of_queries.shape, of_keys.shape) != ((B, T), (B, S)):
            raise ValueError(f"segments or positions {of_queries.shape}, {of_keys.shape} for {(B, T)}, {(B, S)}")
    if tokens.chosen_BTS is not None and tokens.chosen_BTS.shape != (B, T, S):
        raise ValueError(f"a choice {tokens.chosen_BTS.shape} for {(B, T, S)}")
    if request.causal and tokens.q_positions_BT is None and T != S:
        raise ValueError(f"{T} queries and {S} keys: which is later than which needs positions")
