"""Flash attention (Shah et al., 2024) for Hopper GPUs, in Pallas for Mosaic: products run while memory moves and the
softmax is made. Logits are in units of log 2, since the processors have 2^x and no e^x. Both kernels are jitted, so
that the layers of a model that are written out share one of each.

Shapes as in request.py; C queries and D keys of a block.
"""

import jax

from maxhydra.kernels.attention.blocks import Inputs
from maxhydra.kernels.attention.mosaic.params import How, Tile, Tiles
from maxhydra.kernels.attention.spec import Request, TokenInfo
from maxhydra.kernels.placement import processors
from maxhydra.kernels.tiles import Sizes, candidates, resized

# Of the sequence length: two warpgroups' rows.
LENGTH_MULTIPLE = 128
# By head size, keys of a step forward and queries of a step backward.
TILES = {
    64: Tiles(Tile(128, 3), Tile(128, 2)),
    128: Tiles(Tile(128, 2), Tile(64, 2)),
    256: Tiles(Tile(64, 2), Tile(64, 2)),
}
# Forward, worth a trial for other masks and lengths; of heads of 256, shared memory holds no more. Backward, registers
# and layouts leave no choice.
TRIED = {64: (Tile(128, 2), Tile(64, 3), Tile(64, 4)), 128: (Tile(64, 3), Tile(64, 4)), 256: ()}


def cut(length: int) -> dict[str, int]:
    """What the sizes of the tiles must divide, by name."""
    return {"forward.size": length}


def tried(head_dim: int, length: int) -> dict[str, list[dict[str, int]]]:
    """Sizes to try; none for heads that it does not take."""
    if head_dim not in TILES:
        return {}
    return candidates({"forward": TRIED[head_dim]}, TILES[head_dim], cut(length))


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
    # Mosaic takes half a second to import, which no machine without such a GPU should wait for.
    from maxhydra.kernels.attention.mosaic.vjp import attend  # noqa: PLC0415

    how = How(request, resized(tiles or TILES[q_BTNH.shape[3]], sizes), processors())
    inputs = Inputs(q_BTNH, k_BSKH, v_BSKH, sinks_N, tokens.q_segments_BT, tokens.kv_segments_BS)
    return attend(how, inputs)
