"""Sizes by which a kernel cuts its work: those that were measured, and those that are asked for in their place.

A kernel's tile is a NamedTuple of sizes, or a NamedTuple of such where an operation has several kernels.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

# By name, such as rows or forward.rows, of a tile; those that are not there stay as they were measured.
Sizes: TypeAlias = tuple[tuple[str, int], ...]
# Name of a kernel of an operation, empty where it has but one -> tiles that are worth a trial.
Tried: TypeAlias = Mapping[str, Sequence[Any]]
Tile = TypeVar("Tile", bound=tuple)
Result = TypeVar("Result")
Call = TypeVar("Call", bound="Asking")


def resized(measured: Tile, sizes: Sizes) -> Tile:
    """The tile with the sizes that are asked for."""
    for name, size in sizes:
        measured = _placed(measured, name.split("."), size)
    return measured


def sized(run: Callable[..., Result], sizes: Sizes) -> Callable[..., Result]:
    """A kernel that is given the sizes, if there are any."""
    return partial(run, sizes=sizes) if sizes else run


def _placed(tile: Any, path: list[str], size: int) -> Any:
    name, *below = path
    return tile._replace(**{name: _placed(getattr(tile, name), below, size) if below else size})


class Asking(Protocol):
    """A call that may ask for sizes."""

    @property
    def sizes(self) -> Sizes: ...


def misfits(call: Call, cut: Callable[[Call], Mapping[str, int]] | None) -> tuple[str, ...]:
    """Why the sizes that a call asks for cannot be had. `cut`: by name, what a size must divide; None: it has no tile.

    What was measured is cut down to what divides; what is asked for is had as it is or not at all.
    """
    if not call.sizes:
        return ()
    if cut is None:
        return ("has no tile whose sizes can be chosen",)
    uneven = _uneven(call.sizes, cut(call))
    return tuple(f"cannot cut {whole} by {name}={size}, which does not divide it" for name, size, whole in uneven)


def _uneven(sizes: Sizes, cut: Mapping[str, int]) -> list[tuple[str, int, int]]:
    return [(name, size, cut[name]) for name, size in sizes if name in cut and cut[name] % size]


def candidates(tried: Tried, measured: Any, cut: Mapping[str, int]) -> dict[str, list[dict[str, int]]]:
    """Of each kernel of an operation, the sizes that are worth a trial beside those that were measured, and can be
    had."""
    found: dict[str, list[dict[str, int]]] = {}
    for kernel, tiles in tried.items():
        own = {name.rpartition(".")[2]: whole for name, whole in cut.items() if name.rpartition(".")[0] == kernel}
        known = getattr(measured, kernel) if kernel else measured
        sizes = [tile._asdict() for tile in tiles if tile != known]
        found[kernel] = [one for one in sizes if not _uneven(tuple(one.items()), own)]
    return found
