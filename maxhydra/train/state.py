"""The training state, and the factory that creates it sharded over the mesh."""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from maxhydra import model, optim
from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.quantization import QAT, STORED_KINDS, TRAINING_KINDS
from maxhydra.model import ModelDef, amax_histories, fit_adapter, merge_trees, split_trainable
from maxhydra.optim import Optimizer, OptimizerState, exchange, state_axes
from maxhydra.sharding import LogicalAxes, Sharder, is_axes
from maxhydra.train.loss import Tree
from maxhydra.train.path_rules import path_rules

# Memory kind in which offloaded optimizer state is stored.
OFFLOAD_MEMORY = "pinned_host"
DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host
_OPTIMIZATION_LEVEL = re.compile(r"--xla_backend_optimization_level=(\d)")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Guard:
    """Running statistics of (loss, gradient norm), the number of skipped steps, and whether the run is halted.

    `halted` is sticky: after a non-finite step no further update is applied, however late the host reads the metrics.
    """

    mean: jax.Array
    variance: jax.Array
    seen: jax.Array
    skipped: jax.Array
    halted: jax.Array

    @classmethod
    def fresh(cls) -> "Guard":
        return cls(
            mean=jnp.zeros(2, jnp.float32),
            variance=jnp.zeros(2, jnp.float32),
            seen=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
            halted=jnp.zeros((), jnp.bool_),
        )


GUARD_AXES = Guard(mean=(None,), variance=(None,), seen=(), skipped=(), halted=())  # type: ignore[arg-type]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step reads and updates, as one pytree.

    A checkpoint stores all of it except `frozen`, which is loaded again from its original source.
    """

    step: jax.Array
    params: Tree
    """Trainable parameters."""
    frozen: Tree
    """Frozen weights: the base model under an adapter, and extra weights of the task such as a teacher."""
    opt_state: Tree
    key: jax.Array
    guard: Guard
    history: Tree = dataclasses.field(default_factory=dict)
    """Amax history of the quantized layers over the last steps (layers/quant/training.py)."""

    @property
    def weights(self) -> Tree:
        """All weights that a loss reads, as one tree. Parameters in host memory are copied to the devices."""
        return merge_trees(merge_trees(jax.tree.map(_on_device, self.params), self.frozen), self.history)

    def exchange_average(self) -> "TrainState":
        """Exchange the trained weights and their average, if there is one, which is evaluated and saved."""
        optimizer = self.opt_state
        if not isinstance(optimizer, OptimizerState) or optimizer.average is None:
            return self
        params, average = exchange(optimizer.average, self.params)
        return dataclasses.replace(self, params=params, opt_state=optimizer._replace(average=average))


class Replica(NamedTuple):
    """What each DiLoCo replica has for itself, stacked over the replicas."""

    params: Tree
    opt_state: Tree
    guard: Guard
    history: Tree


class DilocoState(NamedTuple):
    """The optimizer state of DiLoCo: the replicas, and the momentum of the outer step."""

    replicas: Replica
    momentum: Tree


def unchanged(tree: Tree) -> Tree:
    return tree


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """How a step moves gradients and optimizer state between the layouts of the forward pass and of the state."""

    shard_gradients: Callable[[Tree], Tree] = unchanged
    """Constrains gradients to the sharding in which the optimizer reads them."""
    load: Callable[[Tree], Tree] = unchanged
    """Optimizer state from where it is stored to device memory."""
    store: Callable[[Tree], Tree] = unchanged
    load_params: Callable[[Tree], Tree] = unchanged
    """Trainable parameters likewise."""
    store_params: Callable[[Tree], Tree] = unchanged
    replicate: Callable[[Tree], Tree] = unchanged
    """Statistics from the devices of their layers to all devices."""


DEFAULT_LAYOUT = StateLayout()


@dataclasses.dataclass(frozen=True)
class StateFactory:
    """Creates states, and knows their shapes and shardings before anything is allocated."""

    model: ModelDef
    optimizer: Optimizer
    """Optimizer of the trainable parameters, `split_trainable(model.shapes)[0]`."""
    sharder: Sharder
    extra_weights: Mapping[str, Tree] = dataclasses.field(default_factory=dict)
    """Extra frozen weights by name that the loss reads in addition to the model's, such as a teacher's."""
    shards_over_data: bool = False
    """Whether trainable parameters and optimizer state are sharded over the mesh axis `data` too (ZeRO-1)."""
    offloads_moments: bool = False
    """Whether the optimizer state is stored in pinned host memory."""
    offloads_params: bool = False
    """Whether the trainable parameters are."""
    weights_seed: int | None = None
    """Seed of the initial weights; None: that of the run."""

    def spec(self, axes: LogicalAxes, shape: Sequence[int]) -> PartitionSpec:
        """The PartitionSpec of a trainable parameter or an array of the optimizer state.

        Mesh axes divide every parameter and moment, but maybe not the number of blocks of a quantized moment.
        """
        spec_of = self.sharder.spec_over_data if self.shards_over_data else self.sharder.dividing_spec
        return spec_of(axes, shape)

    def cast(self, params: Tree) -> Tree:
        """Trainable parameters as the forward pass reads them: in the compute dtype, gathered over `data`."""
        weights = self.model.cast(params)
        if not self.shards_over_data:
            return weights
        # The first constraint keeps the cast before the gather: the compiler would gather float32.
        return self._constrain(self._constrain(weights, self.spec), lambda axes, shape: self.sharder.spec(axes))

    def layout(self) -> StateLayout:
        """Where a step reads and writes gradients, optimizer state and parameters."""
        return StateLayout(
            shard_gradients=self._shard_gradients,
            load=lambda opt_state: _moved(opt_state, DEVICE) if self.offloads_moments else opt_state,
            store=lambda opt_state: _moved(opt_state, HOST) if self.offloads_moments else opt_state,
            load_params=self._load_params,
            store_params=lambda params: _moved(params, HOST) if self.offloads_params else params,
            replicate=self.sharder.replicate,
        )

    def _shard_gradients(self, grads: Tree) -> Tree:
        """Gradients in the sharding of the optimizer state: a sum over `data` becomes a reduce-scatter."""
        return self._constrain(grads, self.spec) if self.shards_over_data else grads

    def _load_params(self, params: Tree) -> Tree:
        """The trainable parameters in device memory; every call copies them again.

        The barrier keeps the compiler from merging the copies of a step, and so from keeping the parameters in device
        memory from the forward pass to the update.
        """
        return _moved(jax.lax.optimization_barrier(params), DEVICE) if self.offloads_params else params

    def _constrain(self, tree: Tree, spec_of: Callable[[LogicalAxes, Sequence[int]], PartitionSpec]) -> Tree:
        def constrain(axes: LogicalAxes, leaf: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(leaf, NamedSharding(self.sharder.mesh, spec_of(axes, leaf.shape)))

        return jax.tree.map(constrain, split_trainable(self.model.axes)[0], tree, is_leaf=is_axes)

    def _build(self, weights: Tree, extra_weights: Tree, seed: jax.Array) -> TrainState:
        training_key = jax.random.split(jax.random.key(seed))[1]
        params, frozen = split_trainable(fit_adapter(self.model, weights))
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            frozen={**frozen, **extra_weights},
            opt_state=self._optimizer_state(params),
            key=jax.random.key_data(training_key),
            guard=Guard.fresh(),
            history=self._empty_history(),
        )

    def _empty_history(self) -> Tree:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), amax_histories(self.model.shapes))

    def _optimizer_state(self, params: Tree) -> Tree:
        opt_state, replicas = self.optimizer.transform.init(params), self.sharder.num_shards("replicas")
        if replicas == 1:
            return opt_state
        replica = Replica(params, opt_state, Guard.fresh(), self._empty_history())
        stacked = jax.tree.map(lambda x: jnp.broadcast_to(x, (replicas, *x.shape)), replica)
        return DilocoState(stacked, jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params))

    def optimizer_shapes(self) -> Tree:
        """Shapes of the optimizer state, which holds the replicas of DiLoCo."""
        return jax.eval_shape(self._optimizer_state, split_trainable(self.model.shapes)[0])

    def optimizer_axes(self) -> Tree:
        """Logical axes of the optimizer state."""
        params = split_trainable(self.model.axes)[0]
        opt_state = state_axes(self.optimizer, split_trainable(self.model.shapes)[0], params)
        if self.sharder.num_shards("replicas") == 1:
            return opt_state
        replica = Replica(params, opt_state, GUARD_AXES, amax_histories(self.model.axes))
        return DilocoState(jax.tree.map(lambda axes: ("replicas", *axes), replica, is_leaf=is_axes), params)

    def _init_weights(self, seed: jax.Array) -> Tree:
        return self.model.init(self._weights_key(seed))

    def _weights_key(self, seed: jax.Array) -> jax.Array:
        return jax.random.split(jax.random.key(seed if self.weights_seed is None else jnp.uint32(self.weights_seed)))[0]

    def shardings(self) -> TrainState:
        params, frozen = split_trainable(self.model.axes)
        opt_state = self.optimizer_axes()
        axes = TrainState(
            step=(),  # type: ignore[arg-type]
            params=params,
            frozen=frozen,
            opt_state=opt_state,
            key=(None,),  # type: ignore[arg-type]
            guard=GUARD_AXES,
            history=amax_histories(self.model.axes),
        )
        shardings = self.sharder.tree(axes)
        shapes = split_trainable(self.model.shapes)[0]
        shardings = dataclasses.replace(
            shardings,
            params=jax.tree.map(self._param_sharding, params, shapes, is_leaf=is_axes),
            opt_state=jax.tree.map(self._moment_sharding, opt_state, self.optimizer_shapes(), is_leaf=is_axes),
        )
        extra = jax.tree.map(lambda leaf: leaf.sharding, self.extra_weights)
        return dataclasses.replace(shardings, frozen={**shardings.frozen, **extra})

    def _stored_sharding(self, axes: LogicalAxes, leaf: Any) -> NamedSharding:
        return NamedSharding(self.sharder.mesh, self.spec(axes, leaf.shape))

    def _param_sharding(self, axes: LogicalAxes, leaf: Any) -> NamedSharding:
        return _in_memory(self._stored_sharding(axes, leaf), is_offloaded=self.offloads_params and bool(leaf.shape))

    def _moment_sharding(self, axes: LogicalAxes, leaf: Any) -> NamedSharding:
        return _in_memory(self._stored_sharding(axes, leaf), is_offloaded=self.offloads_moments and bool(leaf.shape))

    def abstract(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, onto which a checkpoint is restored."""
        extra = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), dict(self.extra_weights))
        seed = jax.ShapeDtypeStruct((), jnp.uint32)
        shapes = jax.eval_shape(self._build, self.model.shapes, extra, seed)
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            self.shardings(),
        )

    def create(self, seed: int) -> TrainState:
        """Initialize each weight directly into its shards: no device ever holds a whole one, except of the smallest."""
        build = jax.jit(
            lambda extra_weights, seed: self._build(self._init_weights(seed), extra_weights, seed),
            out_shardings=self.shardings(),
            donate_argnums=0,
            compiler_options=_run_once_options(),
        )
        return build(dict(self.extra_weights), jnp.uint32(seed))

    def init_base(self, seed: int) -> Tree:
        """The base model weights that `create` gives for the seed, without adapter or optimizer."""
        build = jax.jit(
            lambda seed: self.model.base.init(self._weights_key(seed)),
            out_shardings=self.sharder.tree(self.model.base.axes),
            compiler_options=_run_once_options(),
        )
        return build(jnp.uint32(seed))

    def create_from_base(self, base: Tree, seed: int) -> TrainState:
        """A fresh state with the given base weights, which are donated; adapter and value head are initialized."""

        def build(base: Tree, extra_weights: Tree, seed: jax.Array) -> TrainState:
            initial = self._init_weights(seed)
            trainable, frozen = split_trainable(initial)
            heads = {name: weights for name, weights in initial.items() if name not in base}
            return self._build(merge_trees(base, trainable if frozen else heads), extra_weights, seed)

        create = jax.jit(build, out_shardings=self.shardings(), donate_argnums=(0, 1))
        return create(base, dict(self.extra_weights), jnp.uint32(seed))


def _run_once_options() -> dict[str, int]:
    """Compiler options of programs that run once: at a lower optimization level they compile in half the time.

    A level in XLA_FLAGS that is even lower is kept.
    """
    levels = _OPTIMIZATION_LEVEL.findall(os.environ.get("XLA_FLAGS", ""))
    return {"xla_backend_optimization_level": min([1, *map(int, levels[-1:])])}


def _in_memory(sharding: NamedSharding, *, is_offloaded: bool) -> NamedSharding:
    return sharding.with_memory_kind(OFFLOAD_MEMORY) if is_offloaded else sharding


def _on_device(leaf: Any) -> Any:
    """An array of the state in device memory; shapes and shardings unchanged."""
    if not isinstance(leaf, jax.Array) or leaf.sharding.memory_kind != OFFLOAD_MEMORY:
        return leaf
    return jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))


def _moved(tree: Tree, memory: Any) -> Tree:
    """Arrays of the state in another memory, with their shardings; scalars stay on the device."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, memory) if leaf.ndim else leaf, tree)


def plan_states(config: Config, sharder: Sharder, *, extra_weights: Mapping[str, Tree] | None = None) -> StateFactory:
    """The state factory of a config: its model with its adapter, and the optimizer of the trainable parameters."""
    if not config.quantization.kinds.isdisjoint(STORED_KINDS):
        accepted, hint = ", ".join(kind.value for kind in TRAINING_KINDS), "adapter=qlora trains over quantized weights"
        reason = "is for inference only; it cannot be trained"
        value = config.quantization.kind
        raise ConfigError(Problem("quantization.kind", reason, value=value, accepted=accepted, hint=hint))
    if not config.quantization.kinds.isdisjoint(QAT) and config.adapter.is_enabled:
        reason, hint = (
            "is quantization-aware training of the base weights, which an adapter freezes",
            "set adapter=none",
        )
        value, accepted = config.quantization.kind, "none, fp8 or int8 with an adapter"
        raise ConfigError(Problem("quantization.kind", reason, value=value, accepted=accepted, hint=hint))
    for key in ("offload", "offload_weights"):
        if getattr(config.optimizer, key):
            _require_host_memory(sharder, f"optimizer.{key}")
    decoder = model.build(config.model, config.adapter, config.quantization, has_value_head=config.task.has_value_head)
    decoder.check_mesh(sharder)
    shapes, axes = split_trainable(decoder.shapes)[0], split_trainable(decoder.axes)[0]
    optimizer = optim.build(
        config.optimizer,
        steps=config.train.steps,
        shapes=shapes,
        axes=axes,
        # Gradient accumulation is a loop that adds up whole layer stacks.
        is_unrolled=decoder.is_unrolled_on(sharder) and config.train.grad_accum == 1,
        rules=path_rules(config, decoder),
        sharder=sharder,
    )
    return StateFactory(
        decoder,
        optimizer,
        sharder,
        extra_weights or {},
        shards_over_data=config.mesh.shard_state_over_data,
        offloads_moments=config.optimizer.offload,
        offloads_params=config.optimizer.offload_weights,
        weights_seed=config.run.weights_seed,
    )


def _require_host_memory(sharder: Sharder, path: str) -> None:
    """Raise ConfigError if the attached devices have no pinned host memory; absent ones are assumed to have it."""
    if not isinstance(sharder.mesh, jax.sharding.Mesh):
        return
    device = sharder.mesh.devices.flat[0]
    if device.client.runtime_type == "compile_only_runtime":
        return
    kinds = [memory.kind for memory in device.addressable_memories()]
    if OFFLOAD_MEMORY not in kinds:
        reason = f"needs {OFFLOAD_MEMORY} memory; {device.platform} devices here have {', '.join(kinds)}"
        hint = "optimizer.moments=dynamic8 or mesh.shard_state_over_data=true save memory on any device"
        raise ConfigError(Problem(path, reason, value=True, accepted="false", hint=hint))
