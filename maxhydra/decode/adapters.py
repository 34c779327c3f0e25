"""LoRA adapters by request: the adapters that an engine holds, and the weights that its programs read.

The matrices of all adapters are stacked on the devices, and a program gathers those of each row (Punica, Chen et al.,
2023): sequences with different adapters are decoded in one batch. Slot 0 is zero, for sequences without an adapter.
Loading an adapter replaces one slot of the stacks, so that nothing is compiled.

B rows, N batch slots.
"""

import dataclasses
import itertools
import threading
import weakref
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.quantization import Adapter, AdapterKind
from maxhydra.convert.load import load_adapter
from maxhydra.decode.request import AdapterError, LoadedAdapter, UnknownAdapterError
from maxhydra.decode.weight_layout import WeightLayout
from maxhydra.layers import LoraSpec
from maxhydra.model import ModelDef, merge_trees, split_trainable
from maxhydra.model.lora import ADAPTER
from maxhydra.sharding import Sharder

Tree = Any


class StepWeights(NamedTuple):
    """The weights that a program reads: in the engine's layout, and with adapters their stacks."""

    params: Tree
    stacks: Tree = None
    """Matrices of all adapters, in the structure of the layout's model."""
    adapter_N: jax.Array | None = None
    """Adapter of the sequence in each batch slot."""
    draft: Tree = None
    """Weights of the draft model, in its own layout."""

    def used(self, layout: WeightLayout) -> Tree:
        """The weights that the layout's model takes; called inside a program."""
        params = layout.use(self.params)
        return params if self.stacks is None else merge_trees(self.stacks, params)

    def adapters_of(self, slots_B: jax.Array) -> jax.Array | None:
        """The adapter of each row; None without adapters."""
        return None if self.adapter_N is None else self.adapter_N[slots_B]


@dataclasses.dataclass(frozen=True)
class AdapterLimits:
    """What the stacks have room for: number of adapters, their rank, and the projections that they may change."""

    slots: int
    rank: int
    targets: tuple[str, ...]

    def model(self, base: ModelDef) -> ModelDef:
        """The model with stacks of adapters, whose scale is part of their matrices."""
        sizes: dict[str, Any] = {"rank": self.rank, "alpha": float(self.rank), "targets": list(self.targets)}
        adapter = Adapter(kind=AdapterKind.lora, dropout=0.0, b_rate_ratio=1.0, **sizes)
        return dataclasses.replace(base, adapter=adapter, adapter_slots=self.slots + 1)


class _User(Protocol):
    is_finished: bool


class AdapterTable:
    """Names and slots of the loaded adapters. Thread-safe.

    A slot whose adapter was unloaded is free once the sequences that use it have finished.
    """

    def __init__(self, slots: int):
        self._slots, self._numbers, self._lock = slots, itertools.count(1), threading.Lock()
        self._loaded: dict[str, LoadedAdapter] = {}
        self._users: dict[int, weakref.WeakSet[Any]] = {slot: weakref.WeakSet() for slot in range(1, slots + 1)}

    @property
    def loaded(self) -> Mapping[str, LoadedAdapter]:
        """By name, in the order in which they were loaded."""
        return dict(self._loaded)

    def use(self, name: str) -> LoadedAdapter:
        """The adapter of a new sequence; UnknownAdapterError if it is not loaded."""
        adapter = self._loaded.get(name)
        if adapter is None:
            names = ", ".join(self._loaded) or "none"
            raise UnknownAdapterError(f"adapter {name[:100]!r} is not loaded; loaded adapters: {names}")
        return adapter

    def add_user(self, adapter: LoadedAdapter, sequence: _User) -> None:
        """Keep the slot of an adapter until the sequence has finished; UnknownAdapterError if it was unloaded."""
        with self._lock:
            if self.use(adapter.name) != adapter:
                raise UnknownAdapterError(f"adapter {adapter.name!r} was replaced; send the request again")
            self._users[adapter.slot].add(sequence)

    def reserve(self, name: str, location: str) -> LoadedAdapter:
        """A free slot for an adapter that `add` makes available; AdapterError if there is none."""
        with self._lock:
            if name in self._loaded:
                raise AdapterError(f"adapter {name!r} is already loaded; unload it first")
            taken = {adapter.slot for adapter in self._loaded.values()}
            free = [slot for slot in self._users if slot not in taken and not self._is_used(slot)]
            if not free:
                state = f"{len(taken)} of {self._slots} slots have an adapter, and running requests use the others"
                raise AdapterError(f"no slot is free: {state}; unload an adapter, or raise task.lora.slots")
            return LoadedAdapter(name, location, free[0], next(self._numbers))

    def add(self, adapter: LoadedAdapter) -> None:
        with self._lock:
            self._loaded[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Make an adapter unavailable to new requests; UnknownAdapterError if it is not loaded."""
        with self._lock:
            self.use(name)
            del self._loaded[name]

    def _is_used(self, slot: int) -> bool:
        return any(not sequence.is_finished for sequence in self._users[slot])


class AdapterStacks:
    """The stacked adapters of one runner, and the adapter of each of its batch slots."""

    def __init__(self, limits: AdapterLimits, layout: WeightLayout, sharder: Sharder, *, num_slots: int):
        """`num_slots`: batch slots, to which the padding slot is added."""
        self.layout = dataclasses.replace(layout, model=limits.model(layout.model))
        self._replicated = sharder.sharding(())
        shapes = split_trainable(self.layout.model.shapes)[0]
        zeros = jax.jit(
            lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes),
            out_shardings=self._replicated,
        )
        self.stacks: Tree = zeros()
        self._adapters = np.zeros(num_slots + 1, np.int32)
        self.adapter_N = jax.device_put(self._adapters, self._replicated)

    def replaced(self, slot: int, weights: Tree) -> Tree:
        """The stacks with other weights in one slot, given as `AdapterReader.read` returns them."""
        weights = jax.device_put(self.layout.unstack(weights), self._replicated)
        return self._replace(self.stacks, np.int32(slot), weights)

    @cached_property
    def _replace(self) -> Any:
        return jax.jit(_replace_slot, out_shardings=self._replicated)

    def assign(self, adapters: Mapping[int, int]) -> None:
        """Set the adapters of batch slots, for the calls that are dispatched from now on."""
        changed = {slot: adapter for slot, adapter in adapters.items() if self._adapters[slot] != adapter}
        if changed:
            # A copy: the device may still read the array of an earlier call.
            self._adapters = self._adapters.copy()
            self._adapters[list(changed)] = list(changed.values())
            self.adapter_N = jax.device_put(self._adapters, self._replicated)


def _replace_slot(stacks: Tree, slot: jax.Array, weights: Tree) -> Tree:
    def put(path: jax.tree_util.KeyPath, stack: jax.Array, own: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, own.astype(stack.dtype), slot, int(_is_stacked(path[0])))

    return jax.tree_util.tree_map_with_path(put, stacks, weights)


def _is_stacked(key: Any) -> bool:
    """Whether the weights below a top-level key have a leading axis of layers."""
    return getattr(key, "key", key) == "pattern"


@dataclasses.dataclass(frozen=True)
class AdapterReader:
    """Reads adapters of a model as weights of one slot: scaled, and padded with zeros to the rank of the stacks."""

    base: ModelDef
    limits: AdapterLimits

    def read(self, key: str, location: str) -> Tree:
        """The weights of a PEFT folder or a run; ConfigError if they do not fit. `key`: config field, for errors."""
        adapter, trained = load_adapter(key, location, self.base)
        spec = LoraSpec.of(adapter)
        assert spec is not None
        if spec.has_magnitude:
            hint = f"merge it into its base: task=convert checkpoint.load_parameters={location}"
            reason = "is a DoRA adapter, which rescales the weights of its base and cannot share a batch with others"
            raise ConfigError(Problem(key, reason, value=location, accepted="LoRA, rsLoRA or PiSSA", hint=hint))
        if spec.parameters:
            names = ", ".join(name.strip("^$").replace("\\", "") for name in spec.parameters)
            hint = f"merge it into its base: task=convert checkpoint.load_parameters={location}"
            reason = f"changes {names}; adapters of requests are for linear projections"
            accepted = "an adapter of projections alone (adapter.parameters=[])"
            raise ConfigError(Problem(key, reason, value=location, accepted=accepted, hint=hint))
        rank = spec.rank * (2 if spec.has_start else 1)
        if rank > self.limits.rank:
            reason = f"has rank {rank}, more than task.lora.max_rank={self.limits.rank}"
            raise ConfigError(Problem(key, reason, value=location, hint=f"set task.lora.max_rank={rank}"))
        shapes = split_trainable(self.limits.model(self.base).shapes)[0]
        return self._walk(shapes, jax.tree.map(np.asarray, trained), (), key, location, spec.scale)

    def _walk(self, shapes: Tree, weights: Tree, keys: tuple[str, ...], key: str, location: str, scale: float) -> Tree:
        if ADAPTER in shapes:
            return {ADAPTER: _slot_weights(shapes[ADAPTER], weights.get(ADAPTER), scale, int(_is_stacked(keys[0])))}
        if extra := sorted(set(weights) - set(shapes)):
            reason = f"changes {'/'.join((*keys, extra[0]))}, which task.lora.targets does not include"
            raise ConfigError(Problem(key, reason, value=location, accepted=", ".join(self.limits.targets)))
        return {
            name: self._walk(below, weights.get(name, {}), (*keys, name), key, location, scale)
            for name, below in shapes.items()
        }


def _slot_weights(shapes: Tree, weights: Tree | None, scale: float, stacked: int) -> Tree:
    """Matrices of one projection, without the axis of slots; zeros without weights."""
    sizes = {name: (*leaf.shape[:stacked], *leaf.shape[stacked + 1 :]) for name, leaf in shapes.items()}
    found = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
    if weights is None:
        return found
    a, b = weights["a"], weights["b"]
    if "start_a" in weights:
        # [a, start_a] @ [b, -start_b] is the update less its value at the start.
        a = np.concatenate([a, weights["start_a"]], axis=-1)
        b = np.concatenate([b, -weights["start_b"]], axis=stacked)
    found["a"][..., : a.shape[-1]] = a
    found["b"][(slice(None),) * stacked + (slice(b.shape[stacked]),)] = scale * b
    return found
