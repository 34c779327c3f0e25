"""Collectives of a compiled program: bytes each device sends, by operation and mesh axes, with loops multiplied in.

The compiler's own count, which the model of traffic.py is checked against. Reads the text of an optimized HLO module.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
ITEM_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "f8": 1,
    "s16": 2,
    "u16": 2,
    "f16": 2,
    "bf16": 2,
    "s64": 8,
    "u64": 8,
    "f64": 8,
}

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|to_apply|calls|called_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.-]+))")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]+)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}")
_MESH_AXIS = re.compile(r"'(\w+)'(?:=(\d+)|:\((\d+)\)(\d+))?")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_PAIRS = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a program."""

    kind: str
    axes: tuple[str, ...]
    """Mesh axes along which its devices differ."""
    devices: int
    """Devices of a group."""
    dtype: str
    result_bytes: int
    """Bytes of the result on one device."""
    count: int
    """Executions per step."""

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends per step with ring algorithms, as traffic.py counts them."""
        return self.count * sent_bytes(self.kind, self.result_bytes, self.devices)


def sent_bytes(kind: str, result_bytes: float, devices: int) -> float:
    """Bytes that each of `devices` sends in one collective whose result has `result_bytes` on a device."""
    others = devices - 1
    factors = {
        "all-gather": others / devices,
        "all-reduce": 2 * others / devices,
        "reduce-scatter": others,
        "all-to-all": others / devices,
        "ragged-all-to-all": others / devices,
        "collective-permute": 1,
    }
    return result_bytes * factors[kind]


def collectives(text: str, mesh: Mapping[str, int]) -> list[Collective]:
    """Collectives of an HLO module; `mesh` are the axis sizes, in the order of the device numbers."""
    bodies, entry = _computations(text)
    found: list[Collective] = []

    def visit(name: str, times: int) -> None:
        for line in bodies.get(name, ()):
            if match := _COLLECTIVE.search(line):
                found.append(_collective(match, line, times, mesh))
            for called, trips in _calls(line):
                visit(called, times * trips)

    visit(entry, 1)
    return [item for item in found if item.devices > 1]


def total_bytes(found: list[Collective]) -> dict[tuple[str, tuple[str, ...]], float]:
    """Bytes sent per device and step by kind and mesh axes."""
    totals: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for item in found:
        totals[item.kind, item.axes] += item.sent_bytes  # type: ignore[assignment]
    return dict(totals)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Lines of every computation by name, and the name of the entry."""
    bodies: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name = match.group(1)
            bodies[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif name:
            bodies[name].append(line)
    return bodies, entry


def _calls(line: str) -> Iterator[tuple[str, int]]:
    """Computations that an instruction runs, and how often."""
    trips = int(match.group(1)) if " while(" in line and (match := _TRIPS.search(line)) else 1
    if "to_apply" not in line or " call(" in line:
        for name in _CALLED.findall(line):
            yield name, trips
    for several, single in _BRANCHES.findall(line):
        for name in filter(None, [single, *several.replace("%", "").split(", ")]):
            yield name, 1


def _collective(match: re.Match[str], line: str, times: int, mesh: Mapping[str, int]) -> Collective:
    shapes, kind, is_start = match.groups()
    arrays = [(dtype, _array_bytes(dtype, dims)) for dtype, dims in _ARRAY.findall(shapes)]
    if is_start and kind != "all-reduce":
        # An asynchronous start returns its operands, its results and, for permutes, two flags.
        arrays = arrays[1:2] if kind == "collective-permute" else arrays[len(arrays) // 2 :]
    group = _group(line)
    return Collective(
        kind=kind,
        axes=_axes_of(group, mesh),
        devices=len(group),
        dtype=arrays[0][0],
        result_bytes=sum(size for _, size in arrays),
        count=times,
    )


def _array_bytes(dtype: str, dims: str) -> int:
    item = next((size for name, size in ITEM_BYTES.items() if dtype.startswith(name)), 4)
    return item * math.prod(int(size) for size in dims.split(",") if size)


def _group(line: str) -> list[int]:
    """Device numbers of the first group with more than one device."""
    if match := _IOTA.search(line):
        shape, dims, order = ([int(n) for n in part.split(",")] if part else None for part in match.groups())
        assert shape is not None and dims is not None
        numbers = np.arange(math.prod(dims)).reshape(dims).transpose(order or range(len(dims)))
        return numbers.reshape(shape)[0].tolist()
    if match := _MESH.search(line):
        return _mesh_group(*match.groups())
    if match := _LISTED.search(line):
        return [int(number) for number in match.group(1).split(",")]
    if match := _PAIRS.search(line):
        return [int(number) for number in match.groups()]
    return []


def _mesh_group(axes: str, dims: str | None, order: str | None, split: str) -> list[int]:
    """The first group of `mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a', 'b':(1)2}`: devices along the named axes.

    'b':(1)2 is a part of an axis: after 1 outer shard, 2 shards.
    """
    sizes = {name: int(size) for name, size, _, _ in _MESH_AXIS.findall(axes)}
    numbers = np.arange(math.prod(sizes.values()))
    if dims is not None:
        numbers = numbers.reshape([int(n) for n in dims.split(",")])
        numbers = numbers.transpose([int(n) for n in order.split(",")] if order else None)
    numbers = numbers.reshape(tuple(sizes.values()))
    chosen = {name: (int(outer or 1), int(count or sizes[name])) for name, _, outer, count in _MESH_AXIS.findall(split)}
    index = []
    for name, size in sizes.items():
        outer, count = chosen.get(name, (1, 1))
        index.append([step * (size // (outer * count)) for step in range(count)])
    return numbers[np.ix_(*index)].flatten().tolist()


def _axes_of(group: list[int], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes along which the devices of a group differ."""
    places = np.array(np.unravel_index(group, tuple(mesh.values()))) if group else np.zeros((len(mesh), 1))
    return tuple(axis for axis, place in zip(mesh, places, strict=True) if len(set(place.tolist())) > 1)
