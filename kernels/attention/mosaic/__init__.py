"""Flash attention 3 (Shah et al., 2024) for Hopper GPUs, in Pallas Mosaic GPU: matmuls overlap with loads and softmax.

Logits are in units of log 2, since GPUs compute 2^x in hardware but not e^x. Both kernels are jitted, so that unrolled
layers of a model share one compiled kernel each.

Shapes as in spec.py; C queries and D keys of a block.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxhydra.kernels.attention.blocks import Inputs, Rows
from maxhydra.kernels.attention.spec import Request, TokenInfo
from maxhydra.kernels.placement import num_multiprocessors
from maxhydra.kernels.tiles import Sizes, candidates, override_sizes


class Tile(NamedTuple):
    """Keys (forward) or queries (backward) of a step, and the number of steps in flight."""

    size: int
    stages: int


class Tiles(NamedTuple):
    """The tiles of the two kernels."""

    forward: Tile
    backward: Tile


@dataclasses.dataclass(frozen=True)
class KernelParams:
    """Static parameters of the kernels."""

    request: Request
    tiles: Tiles
    programs: int
    """The most programs that run at a time: the GPU's multiprocessors."""


# Sequence lengths must be multiples of this: the rows of two warpgroups.
LENGTH_MULTIPLE = 128
# By head size: keys of a forward step and queries of a backward step.
TILES = {
    64: Tiles(Tile(128, 3), Tile(128, 2)),
    128: Tiles(Tile(128, 2), Tile(64, 2)),
    256: Tiles(Tile(64, 2), Tile(64, 2)),
}
# Candidates of the forward kernel for other masks and lengths; heads of 256 leave no shared memory for others. The
# backward kernel has no choice because of its registers and layouts.
CANDIDATE_TILES = {64: (Tile(128, 2), Tile(64, 3), Tile(64, 4)), 128: (Tile(64, 3), Tile(64, 4)), 256: ()}


def tile_extents(length: int) -> dict[str, int]:
    """The extent that each tile size must divide, by name."""
    return {"forward.size": length}


def candidate_tiles(head_dim: int, length: int) -> dict[str, list[dict[str, int]]]:
    """Candidate tile sizes; empty for unsupported head sizes."""
    if head_dim not in TILES:
        return {}
    return candidates({"forward": CANDIDATE_TILES[head_dim]}, TILES[head_dim], tile_extents(length))


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    request: Request,
    tokens: TokenInfo,
    sinks_N: jax.Array | None,
    *,
    tiles: Tiles | None = None,
    sizes: Sizes = (),
) -> jax.Array:
    # Importing Mosaic takes half a second, which hosts without such a GPU should not pay.
    from maxhydra.kernels.attention.mosaic.backward import attend  # noqa: PLC0415

    # Zeros change neither the logits nor the outputs that are kept.
    q_BTNH, k_BSKH, padded_BSKH = _pad_heads(q_BTNH, k_BSKH, v_BSKH)
    inputs = Inputs(q_BTNH, k_BSKH, padded_BSKH, sinks_N, tokens.q_segments_BT, tokens.kv_segments_BS)
    out_BTNH = attend(_params(request, inputs, sizes, tiles), inputs)
    return out_BTNH[..., : v_BSKH.shape[3]]


def _pad_heads(*arrays: jax.Array) -> list[jax.Array]:
    """Queries, keys and values with heads of the next size that the kernel has tiles for."""
    largest = max(x.shape[3] for x in arrays)
    size = min(size for size in TILES if size >= largest)
    return [x if x.shape[3] == size else jnp.pad(x, [(0, 0)] * 3 + [(0, size - x.shape[3])]) for x in arrays]


def block_forward(request: Request, inputs: Inputs, *, sizes: Sizes = ()) -> tuple[jax.Array, jax.Array]:
    """`BlockKernel.forward`."""
    from maxhydra.kernels.attention.mosaic.forward import forward  # noqa: PLC0415

    out_BTNH, total_BNT = forward(_params(request, inputs, sizes), inputs)
    return out_BTNH, total_BNT


def block_backward(
    request: Request, inputs: Inputs, rows: Rows, *, sizes: Sizes = ()
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`BlockKernel.backward`."""
    from maxhydra.kernels.attention.mosaic.backward import backward  # noqa: PLC0415

    d_q_BTNH, d_k_BSKH, d_v_BSKH = backward(_params(request, inputs, sizes), inputs, rows)
    return d_q_BTNH, d_k_BSKH, d_v_BSKH


def _params(request: Request, inputs: Inputs, sizes: Sizes, tiles: Tiles | None = None) -> KernelParams:
    measured = tiles or TILES[inputs.q_BTNH.shape[3]]
    return KernelParams(request, override_sizes(measured, sizes), num_multiprocessors())
