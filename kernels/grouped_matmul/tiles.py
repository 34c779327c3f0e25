"""Which tiles of rows are whose: tables that the kernels read. M rows, E groups, K inputs, T tiles."""

import jax
import jax.numpy as jnp


def tile_table(sizes_E: jax.Array, M: int, rows: int) -> jax.Array:
    """[tiles, 4]: group, number among the tiles of rows, first row, end; a group more holds the rows of no group."""
    sizes_E = sizes_E.astype(jnp.int32)
    sizes_G = jnp.append(sizes_E, M - jnp.sum(sizes_E))
    end_G = jnp.cumsum(sizes_G)
    start_G = end_G - sizes_G
    count_G = jnp.where(sizes_G > 0, -(-end_G // rows) - start_G // rows, 0)
    below_G = jnp.cumsum(count_G)
    tile_T = jnp.arange(M // rows + len(sizes_E))
    group_T = jnp.sum(tile_T[:, None] >= below_G[None, :], axis=1)
    is_used_T, own_T = group_T < len(sizes_G), jnp.minimum(group_T, len(sizes_E))
    block_T = start_G[own_T] // rows + tile_T - (below_G - count_G)[own_T]
    first_T, end_T = jnp.maximum(start_G[own_T], block_T * rows), jnp.minimum(end_G[own_T], (block_T + 1) * rows)
    found = jnp.stack([own_T, block_T, first_T, end_T], axis=1)
    return jnp.where(is_used_T[:, None], found, jnp.array([len(sizes_E), 0, 0, 0]))


def spans(sizes_E: jax.Array, rows: int) -> jax.Array:
    """[E, 2]: the first tile that holds rows of a group, and how many do."""
    end_E = jnp.cumsum(sizes_E.astype(jnp.int32))
    first_E = (end_E - sizes_E) // rows
    return jnp.stack([first_E, jnp.where(sizes_E > 0, -(-end_E // rows) - first_E, 0)], axis=1)


def edges(x_MK: jax.Array, sizes_E: jax.Array, rows: int) -> jax.Array:
    """The first and the last tile of each group, one after the other, rows of other groups zero."""
    M, K = x_MK.shape
    end_E = jnp.cumsum(sizes_E.astype(jnp.int32))
    start_E = end_E - sizes_E
    tile_T = jnp.stack([start_E // rows, jnp.maximum(end_E - 1, 0) // rows], axis=1).reshape(-1)
    at_TR = (tile_T * rows)[:, None] + jnp.arange(rows)
    is_own_TR = (at_TR >= jnp.repeat(start_E, 2)[:, None]) & (at_TR < jnp.repeat(end_E, 2)[:, None])
    tiles_TRK = jnp.take(x_MK.reshape(M // rows, rows, K), tile_T, axis=0, mode="clip")
    return jnp.where(is_own_TR[..., None], tiles_TRK, 0).reshape(-1, K)


def place(number: jax.Array, rows: int | jax.Array, columns: int, band: int) -> tuple[jax.Array, jax.Array]:
    """Row and column of a program: down the rows of a band, then on to the next column."""
    size = band * columns
    first = jax.lax.div(number, size) * band
    height = jnp.minimum(rows - first, band)
    within = jax.lax.rem(number, size)
    return first + jax.lax.rem(within, height), jax.lax.div(within, height)
