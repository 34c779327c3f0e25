"""Exchange of rows between devices, each of which sends slices of different lengths to every other.

`jax.lax.ragged_all_to_all` on GPUs and TPUs. XLA does not compile it for CPUs, where a dense all-to-all of padded
slices has the same result; it is for tests, because its arrays grow with the number of devices.

D columns, S slices, W rows of the longest possible slice. Slices are in the order of the devices that they go to.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Slices(NamedTuple):
    """Slices of rows that a device sends."""

    starts: jax.Array
    """First row of each slice at its sender."""
    sizes: jax.Array
    targets: jax.Array
    """First row of each slice at its receiver."""


class Link(NamedTuple):
    """The devices that exchange rows."""

    axes: tuple[str, ...]
    """Mesh axes, all manual (shard_map)."""
    platform: str
    slice_rows: int
    """Rows of the longest possible slice."""
    sent: int
    """Rows of the array that each device sends slices of."""
    received: int
    """Rows of the array that each device receives slices into."""

    def reversed(self) -> "Link":
        """The link in the other direction."""
        return self._replace(sent=self.received, received=self.sent)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def exchange(x_RD: jax.Array, there: Slices, back: Slices, link: Link) -> jax.Array:
    """The received rows; zero where none arrived.

    `back` are the slices that return the received rows to where they came from, which is how the gradient travels.
    """
    there, back = (Slices(*(x.reshape(-1) for x in slices)) for slices in (there, back))
    out_RD = jnp.zeros((link.received, x_RD.shape[1]), x_RD.dtype)
    if link.platform == "cpu":
        return _dense_exchange(x_RD, out_RD, there, back, link)
    return jax.lax.ragged_all_to_all(x_RD, out_RD, *there, back.sizes, axis_name=link.axes)


def _dense_exchange(x_RD: jax.Array, out_RD: jax.Array, there: Slices, back: Slices, link: Link) -> jax.Array:
    within_W = jnp.arange(link.slice_rows)
    sent_SWD = x_RD.at[there.starts[:, None] + within_W].get(mode="clip")
    received_SWD = jax.lax.all_to_all(sent_SWD, link.axes, 0, 0, tiled=True)
    index_SW = jnp.where(within_W < back.sizes[:, None], back.starts[:, None] + within_W, out_RD.shape[0])
    return out_RD.at[index_SW].set(received_SWD, mode="drop")


def _exchange_forward(
    x_RD: jax.Array, there: Slices, back: Slices, link: Link
) -> tuple[jax.Array, tuple[Slices, Slices]]:
    return exchange(x_RD, there, back, link), (there, back)


def _exchange_backward(link: Link, slices: tuple[Slices, Slices], d_RD: jax.Array) -> tuple[jax.Array, None, None]:
    there, back = slices
    return exchange(d_RD, back, there, link.reversed()), None, None


exchange.defvjp(_exchange_forward, _exchange_backward)
