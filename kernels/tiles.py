"""Tile sizes of kernels: the measured defaults, overrides from the config, and candidates for tuning.

A kernel's tile is a NamedTuple of sizes, or a NamedTuple of tiles if an operation has several kernels.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

# Overrides by name, such as rows or forward.rows; sizes that are not listed keep their measured defaults.
Sizes: TypeAlias = tuple[tuple[str, int], ...]
# Kernel of an operation (empty if it has only one) -> tiles worth timing.
Candidates: TypeAlias = Mapping[str, Sequence[Any]]
Tile = TypeVar("Tile", bound=tuple)
Result = TypeVar("Result")
Call = TypeVar("Call", bound="HasSizes")


def override_sizes(measured: Tile, sizes: Sizes) -> Tile:
    """Return the measured tile with the requested sizes replaced."""
    for name, size in sizes:
        measured = _replace(measured, name.split("."), size)
    return measured


def with_sizes(run: Callable[..., Result], sizes: Sizes) -> Callable[..., Result]:
    """Bind the requested tile sizes to a kernel, if there are any; backends without a tile have no such argument."""
    return partial(run, sizes=sizes) if sizes else run


def _replace(tile: Any, path: list[str], size: int) -> Any:
    name, *rest = path
    return tile._replace(**{name: _replace(getattr(tile, name), rest, size) if rest else size})


class HasSizes(Protocol):
    """A call that may request tile sizes."""

    @property
    def sizes(self) -> Sizes: ...


def tile_size_problems(call: Call, extents: Callable[[Call], Mapping[str, int]] | None) -> tuple[str, ...]:
    """Why the requested tile sizes are unsupported; empty if they are supported.

    `extents`: the array extent that each size must divide, by name; None if the backend has no tile. Measured defaults
    are reduced to a divisor of the extent; requested sizes are used unchanged or rejected.
    """
    if not call.sizes:
        return ()
    if extents is None:
        return ("has no configurable tile sizes",)
    misfits = _indivisible(call.sizes, extents(call))
    return tuple(
        f"needs a tile size that divides {extent}, which {name}={size} does not" for name, size, extent in misfits
    )


def _indivisible(sizes: Sizes, extents: Mapping[str, int]) -> list[tuple[str, int, int]]:
    return [(name, size, extents[name]) for name, size in sizes if name in extents and extents[name] % size]


def candidates(tiles: Candidates, measured: Any, extents: Mapping[str, int]) -> dict[str, list[dict[str, int]]]:
    """For each kernel, the sizes worth timing: tiles other than the measured one that divide the extents."""
    sizes_by_kernel: dict[str, list[dict[str, int]]] = {}
    for kernel, kernel_tiles in tiles.items():
        limits = {
            name.rpartition(".")[2]: extent for name, extent in extents.items() if name.rpartition(".")[0] == kernel
        }
        default = getattr(measured, kernel) if kernel else measured
        sizes = [tile._asdict() for tile in kernel_tiles if tile != default]
        sizes_by_kernel[kernel] = [tile for tile in sizes if not _indivisible(tuple(tile.items()), limits)]
    return sizes_by_kernel


def power_of_two_divisor(size: int) -> int:
    """The largest power of two that divides the size."""
    return math.gcd(size, 1 << 30)
