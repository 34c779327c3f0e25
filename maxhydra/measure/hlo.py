"""Optimized HLO text as data: instructions with their trip counts, collectives with their bytes, kernels, large arrays.

Only what the text states is counted. An instruction in a while loop counts as often as the loop runs (XLA annotates
`known_trip_count`); every branch of a conditional counts once.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator

# The bits of a dtype are in its name, except for pred, which takes a byte.
BITS = re.compile(r"\d+")
SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
NAME = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
OPERAND = re.compile(r"%([\w.\-]+)")
CALLEES = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TRIP_COUNT = re.compile(r'known_trip_count":\{"n":"(\d+)"')
OP_NAME = re.compile(r'op_name="([^"]*)"')
TARGET = re.compile(r'custom_call_target="([^"]*)"')
# A mesh, whose device ids are iota, or iota reshaped and transposed, and the axes that form a group.
MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\))?\s*\{([^}]*)\}"
)
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Instructions that move no bytes of their own: their result is a part or another view of an existing array.
VIEWS = ("parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "constant", "copy-done")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a program, outside of fusions."""

    name: str
    opcode: str
    """Without -start; the -done half of an asynchronous instruction is left out."""
    shape: str
    """Text of the result's shape, a tuple for several results."""
    operands: tuple[str, ...]
    """Shapes of the operands."""
    attributes: str
    count: int
    """How often it runs in one step."""

    @property
    def source(self) -> str:
        """The traced operation that the instruction comes from, without the leading jit(step)."""
        found = OP_NAME.search(self.attributes)
        return "" if found is None else found.group(1).removeprefix("jit(step)/")


@dataclasses.dataclass(frozen=True)
class Program:
    """The instructions of a compiled program that run on a device, in text order."""

    instructions: tuple[Instruction, ...]
    unknown_loops: int
    """While loops without a known trip count, whose bodies are counted once."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """One array that a collective instruction moves."""

    kind: str
    dtype: str
    operand: str
    """Shape of a device's operand."""
    group: int
    """Devices that take part."""
    devices: tuple[int, ...]
    """The first group of devices, by index in the mesh."""
    bytes: int
    """Bytes of the whole array: of an all-gather's result, of every other kind's operand."""
    count: int
    source: str

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in one run of it by the ring algorithm, the lower bound of every other one."""
        if self.kind in ("collective-permute", "collective-broadcast"):
            # XLA writes a change of layout as a permutation of every device to itself: a copy.
            return self.bytes if len(set(self.devices)) != 1 else 0
        passes = 2 if self.kind == "all-reduce" else 1
        # An empty list of groups stands for all devices.
        return passes * self.bytes * ((self.group - 1) / self.group if self.group else 1)


def bytes_of(shape: str) -> int:
    """Bytes of all arrays in the text of a shape."""
    return sum(math.prod(sizes) * max(_bits(dtype), 8) // 8 for dtype, sizes in arrays_of(shape))


def arrays_of(shape: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Dtype and dimensions of each array in the text of a shape."""
    for dtype, sizes in SHAPE.findall(shape):
        yield dtype, tuple(int(size) for size in sizes.split(",") if size)


def _bits(dtype: str) -> int:
    """Bits of an element: 16 of bf16, 8 of f8e4m3fn and pred."""
    found = BITS.search(dtype)
    return 8 if found is None else int(found.group())


def parse_program(text: str) -> Program:
    """Parse `Compiled.as_text()`."""
    computations, entry = _computations(text)
    counts: Counter[str] = Counter()
    unknown = _visit(computations, entry, 1, counts)
    instructions = []
    for name, lines in computations.items():
        if counts[name]:
            shapes = {line.name: line.shape for line in lines}
            instructions += [_instruction(line, shapes, counts[name]) for line in lines if line.is_counted]
    return Program(tuple(instructions), unknown)


@dataclasses.dataclass(frozen=True)
class _Line:
    """An instruction as written."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def is_counted(self) -> bool:
        return not self.opcode.endswith("-done")


def _instruction(line: _Line, shapes: dict[str, str], count: int) -> Instruction:
    operands = tuple(shapes.get(name, "") for name in line.operands)
    return Instruction(
        line.name, line.opcode.removesuffix("-start"), line.shape, operands, line.attributes, count=count
    )


def _computations(text: str) -> tuple[dict[str, list[_Line]], str]:
    """Instructions by computation, and the name of the entry computation."""
    computations: dict[str, list[_Line]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if not line.startswith((" ", "}")):
            header = HEADER.match(line)
            if header is not None and not line.startswith("HloModule"):
                current = computations.setdefault(header.group(2), [])
                entry = header.group(2) if header.group(1) else entry
        elif current is not None and (found := NAME.match(line)) is not None:
            current.append(_parse(*found.groups()))
    return computations, entry


def _parse(name: str, rest: str) -> _Line:
    """Split `SHAPE opcode(operands), attributes`."""
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, call = rest[:end], rest[end:].lstrip()
    start = call.index("(")
    end = _closing(call, start)
    return _Line(name, shape, call[:start], tuple(OPERAND.findall(call[start:end])), call[end + 1 :])


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise ValueError(f"unbalanced parentheses in HLO text: {text[:100]}")


def _visit(computations: dict[str, list[_Line]], name: str, count: int, counts: Counter[str]) -> int:
    """Add `count` runs of a computation and of all that it calls; returns the number of loops of unknown length."""
    counts[name] += count
    unknown = 0
    for line in computations.get(name, ()):
        # The computations of fusions and reductions describe one kernel, not instructions that run on their own.
        if line.opcode not in ("while", "conditional", "call", "async-start"):
            continue
        runs = count
        if line.opcode == "while":
            trips = TRIP_COUNT.search(line.attributes)
            unknown += trips is None
            runs *= 1 if trips is None else int(trips.group(1))
        branches = BRANCHES.search(line.attributes)
        called = CALLEES.findall(line.attributes) + ([] if branches is None else OPERAND.findall(branches.group(1)))
        unknown += sum(_visit(computations, callee, runs, counts) for callee in called)
    return unknown


def collectives(program: Program) -> list[Collective]:
    """The collectives of a program, one entry per array."""
    found = []
    for instruction in program.instructions:
        if instruction.opcode not in COLLECTIVES:
            continue
        group = first_group(instruction.attributes)
        # The operands of a ragged all-to-all are input and output, of which the rows fill at most the smaller, offsets
        # and sizes.
        is_ragged = instruction.opcode == "ragged-all-to-all"
        moved = [min(instruction.operands[:2], key=bytes_of)] if is_ragged else instruction.operands
        size = 1 if instruction.opcode == "all-gather" else 0
        for operand in moved:
            dtype = next(arrays_of(operand), ("", ()))[0]
            total = bytes_of(operand) * (len(group) if size else 1)
            found.append(
                Collective(
                    instruction.opcode,
                    dtype,
                    operand.partition("{")[0],
                    group=len(group),
                    devices=group,
                    bytes=total,
                    count=instruction.count,
                    source=instruction.source,
                )
            )
    return found


def first_group(attributes: str) -> tuple[int, ...]:
    """Devices of the first replica group, in any of XLA's notations; both ends of a permute's first move."""
    if listed := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes):
        pairs = [tuple(sorted(map(int, pair))) for pair in re.findall(r"\{(\d+),(\d+)\}", listed.group(1))]
        # A device may keep its own part.
        return next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return tuple(int(index) for index in listed.group(1).split(","))
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        sizes, order = _numbers(iota.group(3)), _numbers(iota.group(4) or "")
        return _transposed(sizes, order or tuple(range(len(sizes))))[: int(iota.group(2))]
    if mesh := MESH_GROUPS.search(attributes):
        axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh.group(1))}
        positions = _along(axes, tuple(re.findall(r"'([^']+)'", mesh.group(4))))
        if mesh.group(2) is None:
            return positions
        devices = _transposed(_numbers(mesh.group(2)), _numbers(mesh.group(3)))
        return tuple(devices[position] for position in positions)
    return ()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _transposed(sizes: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """iota(prod(sizes)) reshaped to `sizes`, transposed by `order`, flattened."""
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    indices = [0]
    for axis in order:
        indices = [index + step * strides[axis] for index in indices for step in range(sizes[axis])]
    return tuple(indices)


def _along(axes: dict[str, int], names: tuple[str, ...]) -> tuple[int, ...]:
    """Devices at the origin of a mesh that differ only along the named axes."""
    sizes, order = tuple(axes.values()), list(axes)
    strides = {name: math.prod(sizes[order.index(name) + 1 :]) for name in order}
    indices = [0]
    for name in names:
        indices = [index + step * strides[name] for index in indices for step in range(axes[name])]
    return tuple(indices)


def axes_of(devices: tuple[int, ...], mesh: dict[str, int]) -> str:
    """Mesh axes along which a group of devices extends: `fsdp`, `fsdp+tensor`; empty for a single device."""
    sizes = list(mesh.values())
    first, spans = devices[0] if devices else 0, []
    for position, name in enumerate(mesh):
        stride = math.prod(sizes[position + 1 :])
        coordinates = {index // stride % sizes[position] for index in (*devices, first)}
        spans += [name] if len(coordinates) > 1 else []
    return "+".join(spans)


def kernel_calls(program: Program) -> dict[str, int]:
    """Runs of each custom kernel in a step: library calls by target, Pallas kernels by their name."""
    counts: Counter[str] = Counter()
    for instruction in program.instructions:
        found = TARGET.search(instruction.attributes)
        if instruction.opcode == "custom-call" and found is not None:
            counts[_kernel_name(found.group(1), instruction)] += instruction.count
    return dict(counts)


def _kernel_name(target: str, instruction: Instruction) -> str:
    if target == "tpu_custom_call":
        return re.sub(r"[.\d]+$", "", instruction.name)
    pallas = re.search(r'name="?([\w.\-]+)', instruction.attributes.partition("backend_config=")[2])
    is_pallas = "mosaic" in target or "triton" in target
    name = pallas.group(1) if pallas else instruction.source.rpartition("/")[2]
    return f"{target}:{name}" if is_pallas and name else target


def largest_arrays(program: Program, number: int = 12) -> list[tuple[str, int, str]]:
    """The largest arrays that instructions write: (shape, bytes, source), each shape once."""
    found: dict[str, tuple[int, str]] = {}
    for instruction in program.instructions:
        if instruction.opcode in VIEWS:
            continue
        # Asynchronous instructions repeat their operands in the shape; a fusion may have several results.
        for dtype, sizes in arrays_of(instruction.shape):
            shape = f"{dtype}[{','.join(map(str, sizes))}]"
            found.setdefault(shape, (bytes_of(shape), instruction.source))
    ranked = sorted(found.items(), key=lambda item: -item[1][0])
    return [(shape, size, source) for shape, (size, source) in ranked[:number]]
