"""What a training run carries from step to step, and how it is laid out on the mesh."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from maxhydra import model, optim
from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.adapter import AdapterKind
from maxhydra.config.schema.quantization import QAT, TO_KEEP, TO_TRAIN
from maxhydra.model import ModelDef, merge_trees, remembered, split_trainable
from maxhydra.optim import Optimizer, state_axes
from maxhydra.sharding import Sharder

Tree = Any
# A program that runs once is worth little optimisation: it compiles in half the time.
RUN_ONCE = {"xla_backend_optimization_level": 1}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Guard:
    """Running statistics of (loss, gradient norm), and whether the run has come to a halt.

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """One tree: everything a checkpoint holds besides the data position, and the weights that stay as they are.

    Those a checkpoint need not hold: they come from where they came from before.
    """

    step: jax.Array
    params: Tree
    """What is trained."""
    frozen: Tree
    """What is not: the model under an adapter, and what a task has beside it, such as a teacher."""
    opt_state: Tree
    key: jax.Array
    guard: Guard
    history: Tree = dataclasses.field(default_factory=dict)
    """What layers remember of earlier steps (layers/quant/amax_history.py)."""

    @property
    def weights(self) -> Tree:
        """All that a loss sees."""
        return merge_trees(merge_trees(self.params, self.frozen), self.history)


@dataclasses.dataclass(frozen=True)
class StateFactory:
    """How a state is made, and its shapes and shardings, known before anything is allocated."""

    model: ModelDef
    optimizer: Optimizer
    """Of what is trained: `split_trainable(model.shapes)[0]`."""
    sharder: Sharder
    beside: Mapping[str, Tree] = dataclasses.field(default_factory=dict)
    """Weights by name that a loss sees beside the model's own."""

    def _around(self, weights: Tree, beside: Tree, seed: jax.Array) -> TrainState:
        rest = jax.random.split(jax.random.key(seed))[1]
        params, frozen = split_trainable(weights)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            frozen={**frozen, **beside},
            opt_state=self.optimizer.transform.init(params),
            key=jax.random.key_data(rest),
            guard=Guard.fresh(),
            history=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), remembered(self.model.shapes)),
        )

    def _weights(self, seed: jax.Array) -> Tree:
        return self.model.init(jax.random.split(jax.random.key(seed))[0])

    def shardings(self) -> TrainState:
        params, frozen = split_trainable(self.model.axes)
        axes = TrainState(
            step=(),  # type: ignore[arg-type]
            params=params,
            frozen=frozen,
            opt_state=state_axes(self.optimizer, split_trainable(self.model.shapes)[0], params),
            key=(None,),  # type: ignore[arg-type]
            guard=Guard(mean=(None,), variance=(None,), seen=(), skipped=(), halted=()),  # type: ignore[arg-type]
            history=remembered(self.model.axes),
        )
        own = self.sharder.tree(axes)
        beside = jax.tree.map(lambda leaf: leaf.sharding, self.beside)
        return dataclasses.replace(own, frozen={**own.frozen, **beside})

    def abstract(self) -> TrainState:
        """Shapes, types and shardings of the state: what a checkpoint is restored onto."""
        beside = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), dict(self.beside))
        shapes = jax.eval_shape(lambda seed: self._around(self._weights(seed), beside, seed), jnp.uint32(0))
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            self.shardings(),
        )

    def create(self, seed: int) -> TrainState:
        """Initialise straight into shards: no device ever holds a whole weight."""
        build = jax.jit(
            lambda beside, seed: self._around(self._weights(seed), beside, seed),
            out_shardings=self.shardings(),
            donate_argnums=0,
            compiler_options=RUN_ONCE,
        )
        return build(dict(self.beside), jnp.uint32(seed))

    def fresh_base(self, seed: int) -> Tree:
        """The weights of the model alone that `create` gives."""
        build = jax.jit(
            lambda seed: self.model.base.init(jax.random.split(jax.random.key(seed))[0]),
            out_shardings=self.sharder.tree(self.model.base.axes),
            compiler_options=RUN_ONCE,
        )
        return build(jnp.uint32(seed))

    def create_around(self, base: Tree, seed: int) -> TrainState:
        """A fresh state with the model's weights, which it takes over; those of an adapter begin as they do."""

        def build(base: Tree, beside: Tree, seed: jax.Array) -> TrainState:
            trained, frozen = split_trainable(self._weights(seed))
            return self._around(merge_trees(trained, base) if frozen else base, beside, seed)

        made = jax.jit(build, out_shardings=self.shardings(), donate_argnums=(0, 1))
        return made(base, dict(self.beside), jnp.uint32(seed))


def plan_states(config: Config, sharder: Sharder, *, beside: Mapping[str, Tree] | None = None) -> StateFactory:
    """The states of a config: its model with its adapter, and the optimizer of what is trained of them."""
    if not config.quantization.kinds.isdisjoint(TO_KEEP):
        accepted, hint = ", ".join(kind.value for kind in TO_TRAIN), "adapter=qlora trains over four bits"
        reason = "is a way to decode, not to train"
        value = config.quantization.kind
        raise ConfigError(Problem("quantization.kind", reason, value=value, accepted=accepted, hint=hint))
    if not config.quantization.kinds.isdisjoint(QAT) and config.adapter.kind is not AdapterKind.none:
        reason = "trains weights to be rounded, and those under an adapter are not trained"
        value, accepted = config.quantization.kind, "none, fp8 or int8 with an adapter"
        raise ConfigError(Problem("quantization.kind", reason, value=value, accepted=accepted, hint="try adapter=none"))
    decoder = model.build(config.model, config.adapter, config.quantization)
    sharder.check(decoder.axes, decoder.shapes)
    shapes, axes = split_trainable(decoder.shapes)[0], split_trainable(decoder.axes)[0]
    optimizer = optim.build(
        config.optimizer,
        steps=config.train.steps,
        shapes=shapes,
        axes=axes,
        # Micro-batches are a loop, which adds up whole stacks.
        is_written_out=decoder.is_written_out and config.train.grad_accum == 1,
    )
    return StateFactory(decoder, optimizer, sharder, beside or {})
