"""LoRA adapters of stacked experts in PEFT's format, as it adapts parameters of transformers (`target_parameters`).

transformers stores the matrices of all experts of a layer in two parameters, gate_up_proj and down_proj. PEFT wraps
their module once for each: `experts.base_layer.lora_A` belongs to gate_up_proj and `experts.lora_A` to down_proj. A of
all experts is [experts * rank, inputs], B is [outputs, rank * experts]. Gate and up share their A; two different ones
need twice the rank, with B in two blocks.

E experts, D residual stream, F hidden, r rank.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from maxhydra.convert.name_table import Join, Table
from maxhydra.convert.param_map import Keys, ParamMapping, Shape, map_params
from maxhydra.model import ModelDef
from maxhydra.model.lora import ADAPTER

Tree = Any
Arrays = Mapping[str, np.ndarray]
GATE_UP, DOWN = ("gate", "up"), "down"
# PEFT's settings of adapters whose gate and up have different A.
PATTERNS = ("rank_pattern", "alpha_pattern")
FUSED = r".*\.gate_up_proj"


def is_expert_kernel(mapping: ParamMapping) -> bool:
    """Whether a mapping is that of an expert's matrices."""
    return mapping.keys[0][-3:-2] == ("experts",) and mapping.keys[0][-1] == "kernel"


@dataclasses.dataclass(frozen=True)
class ExpertStack:
    """The experts of one stack of layers, and the modules that hold them in transformers."""

    keys: Keys
    """Path of the experts in the tree of parameters."""
    modules: Mapping[str, tuple[int, ...]]
    """Name of the module of each layer -> its index in the parameters."""
    shape: Shape
    """[*layers, E, D, F] of the up projection."""
    gate_up: tuple[str, ...]
    """gate and up, or up alone."""
    join: Join
    is_by_expert: bool
    """Whether the weights of the family have one tensor per expert."""

    def read(self, tensors: Arrays, rank: int, problem: Callable[[str], Exception]) -> tuple[Tree, set[str]]:
        """The adapter of these experts, and the tensors it was read from; layers without one get zeros."""
        E, D, F = self.shape[-3:]
        tree: Tree = {}
        used: set[str] = set()
        for module, index in self.modules.items():
            stems = list(_wrappers(module, tensors))
            for stem in stems:
                names = [f"{stem}.lora_{matrix}.weight" for matrix in "AB"]
                used.update(names)
                a, b = (tensors[name] for name in names)
                sizes = (a.shape[1], b.shape[0])
                if sizes not in ((D, len(self.gate_up) * F), (F, D)) or len(a) % E or b.shape[1] != len(a):
                    raise problem(f"{names[0]} has shape {list(a.shape)}, which does not fit the experts of the model")
                a_EDr = a.reshape(E, -1, sizes[0]).transpose(0, 2, 1)
                b_ErF = b.reshape(sizes[1], -1, E).transpose(2, 1, 0)
                is_down = sizes == (F, D)
                if is_down and sizes == (D, len(self.gate_up) * F):
                    if len(stems) == 1:
                        raise problem(f"{names[0]} has the shape of both up_proj and down_proj, and may be of either")
                    is_down = stem == module
                parts = {DOWN: (a_EDr, b_ErF)} if is_down else self._split(a_EDr, b_ErF, rank)
                for name, (own_a, own_b) in parts.items():
                    if own_a.shape[-1] != rank:
                        raise problem(f"{names[0]} has rank {own_a.shape[-1]}, but the adapter has r={rank}")
                    node = tree.setdefault(name, {ADAPTER: self._zeros(name, rank)})[ADAPTER]
                    node["a"][index], node["b"][index] = own_a, own_b
        return tree, used

    def _split(self, a_EDr: np.ndarray, b_ErF: np.ndarray, rank: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The adapters of gate and up, from those of gate_up_proj; blocks of B if it has twice the rank."""
        if len(self.gate_up) == 1:
            return {self.gate_up[0]: (a_EDr, b_ErF)}
        if self.join is Join.interleaved:
            parts = dict(zip(self.gate_up, (b_ErF[..., ::2], b_ErF[..., 1::2]), strict=True))
        else:
            parts = dict(zip(self.gate_up, np.split(b_ErF, 2, axis=-1), strict=True))
        gate, up = (parts[name] for name in self.gate_up)
        if a_EDr.shape[-1] == 2 * rank and not gate[:, rank:].any() and not up[:, :rank].any():
            blocks = (a_EDr[..., :rank], gate[:, :rank]), (a_EDr[..., rank:], up[:, rank:])
            return dict(zip(self.gate_up, blocks, strict=True))
        return {name: (a_EDr, part) for name, part in parts.items()}

    def _zeros(self, name: str, rank: int) -> dict[str, np.ndarray]:
        *leading, D, F = self.shape
        inputs, outputs = (F, D) if name == DOWN else (D, F)
        shapes = {"a": (*leading, inputs, rank), "b": (*leading, rank, outputs)}
        return {key: np.zeros(shape, np.float32) for key, shape in shapes.items()}

    def adapters(self, trained: Tree) -> dict[str, Arrays]:
        """The arrays of the adapted projections, by name."""
        node = trained
        for key in self.keys:
            node = node.get(key, {})
        return {name: with_start(below[ADAPTER]) for name, below in node.items()}

    def shares_a(self, trained: Tree) -> bool:
        """Whether gate and up are both adapted with the same A, as PEFT trains gate_up_proj."""
        found = self.adapters(trained)
        return set(GATE_UP) <= set(found) and np.array_equal(found[GATE_UP[0]]["a"], found[GATE_UP[1]]["a"])

    def differs_in_a(self, trained: Tree) -> bool:
        """Whether gate and up are both adapted, with different A."""
        return set(GATE_UP) <= set(self.adapters(trained)) and not self.shares_a(trained)

    def write(self, trained: Tree, *, in_blocks: bool) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
        """Yield the names of each layer's parameter and wrapper, and A and B. `in_blocks`: A of gate and up differ."""
        found = self.adapters(trained)
        for module, index in self.modules.items():
            own = {name: (arrays["a"][index], arrays["b"][index]) for name, arrays in found.items()}
            if set(own) & set(self.gate_up):
                stem = f"{module}.base_layer" if DOWN in own else module
                name = "gate_up_proj" if len(self.gate_up) > 1 else "up_proj"
                yield f"{module}.{name}", stem, *_matrices(*self._fuse(own, in_blocks=in_blocks))
            if DOWN in own:
                yield f"{module}.down_proj", module, *_matrices(*own[DOWN])

    def _fuse(
        self, own: Mapping[str, tuple[np.ndarray, np.ndarray]], *, in_blocks: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """A and B of gate_up_proj; a projection without an adapter has zeros in B."""
        if len(self.gate_up) == 1:
            return own[self.gate_up[0]]
        a_s = {name: own[name][0] for name in self.gate_up if name in own}
        first, rank = next(iter(a_s.values())), next(iter(a_s.values())).shape[-1]
        a_EDr = np.concatenate([a_s.get(name, first) for name in self.gate_up], axis=-1) if in_blocks else first
        E, F = self.shape[-3], self.shape[-1]
        b_ErPF = np.zeros((E, a_EDr.shape[-1], 2, F), np.float32)
        for position, name in enumerate(self.gate_up):
            if name in own:
                start = position * rank if in_blocks else 0
                b_ErPF[:, start : start + rank, position] = own[name][1]
        b_ErPF = b_ErPF.swapaxes(-1, -2) if self.join is Join.interleaved else b_ErPF
        return a_EDr, b_ErPF.reshape(E, a_EDr.shape[-1], 2 * F)


def with_start(arrays: Arrays) -> dict[str, np.ndarray]:
    """Arrays of an adapter, with PiSSA's start as the second half of the rank: [a, start_a] @ [b, -start_b]."""
    own = {name: np.asarray(array) for name, array in arrays.items()}
    if "start_a" in own:
        own["a"] = np.concatenate([own["a"], own.pop("start_a")], axis=-1)
        own["b"] = np.concatenate([own["b"], -own.pop("start_b")], axis=-2)
    return own


def _matrices(a_EDr: np.ndarray, b_ErF: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A [E * r, D] and B [F, r * E] of PEFT."""
    E, D, rank = a_EDr.shape
    a = a_EDr.transpose(0, 2, 1).reshape(E * rank, D)
    return a, b_ErF.transpose(2, 1, 0).reshape(-1, rank * E)


def _wrappers(module: str, tensors: Arrays) -> Iterator[str]:
    """Names of the wrappers of a module that have an adapter, from outside to inside."""
    stem = module
    while f"{stem}.lora_A.weight" in tensors:
        yield stem
        stem += ".base_layer"


def expert_stacks(table: Table, model: ModelDef, *, prefix: str) -> list[ExpertStack]:
    """The experts of all layers, with the names that PEFT gives their modules. `prefix`: of all names."""
    stacks = []
    for mapping in map_params(table, model):
        names = [keys[-2] for keys in mapping.keys]
        if not is_expert_kernel(mapping) or "up" not in names:
            continue
        keys = mapping.keys[names.index("up")]
        shapes = model.shapes
        for key in keys[:-2]:
            shapes = shapes[key]
        modules = {}
        for position, layer in enumerate(mapping.layers):
            name = mapping.row.hf.partition(".{expert}")[0] if mapping.row.is_by_expert else mapping.row.hf
            name = name if mapping.row.is_by_expert else name.rpartition(".")[0]
            # transformers has renamed Mixtral's module, but not its tensors.
            name = name.replace(".block_sparse_moe.", ".mlp.").format(layer=layer)
            modules[prefix + name] = (position,) if mapping.is_stacked else ()
        stacks.append(
            ExpertStack(
                keys=keys[:-2],
                modules=modules,
                shape=shapes["up"]["kernel"].shape,
                gate_up=tuple(name for name in GATE_UP if name in shapes),
                join=mapping.row.join,
                is_by_expert=mapping.row.is_by_expert,
            )
        )
    return stacks


def fused_patterns(rank: int, alpha: float, *, is_rank_stabilized: bool) -> dict[str, dict[str, float]]:
    """PEFT's settings for gate and up with different A: twice the rank, with the same scale."""
    growth = math.sqrt(2) if is_rank_stabilized else 2
    return {"rank_pattern": {FUSED: 2 * rank}, "alpha_pattern": {FUSED: growth * alpha}}


def has_fused_patterns(settings: Mapping[str, Any]) -> bool:
    """Whether the patterns of an adapter are those of `fused_patterns`."""
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, (int, float)):
        return False
    expected = fused_patterns(rank, alpha, is_rank_stabilized=bool(settings.get("use_rslora")))
    for name in PATTERNS:
        found = settings.get(name) or {}
        if set(found) != {FUSED} or not math.isclose(found[FUSED], expected[name][FUSED]):
            return False
    return True
