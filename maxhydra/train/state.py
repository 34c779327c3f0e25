"""What a training run carries from step to step, and how it is laid out on the mesh."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from maxhydra.model import ModelDef
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
    """One tree: everything a checkpoint holds besides the data position."""

    step: jax.Array
    params: Tree
    opt_state: Tree
    key: jax.Array
    guard: Guard


@dataclasses.dataclass(frozen=True)
class StateDef:
    """How a state is made, and its shapes and shardings, known before anything is allocated."""

    model: ModelDef
    optimizer: Optimizer
    sharder: Sharder

    def init(self, seed: jax.Array) -> TrainState:
        return self._around(self.model.init(jax.random.split(jax.random.key(seed))[0]), seed)

    def _around(self, params: Tree, seed: jax.Array) -> TrainState:
        rest = jax.random.split(jax.random.key(seed))[1]
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=self.optimizer.transform.init(params),
            key=jax.random.key_data(rest),
            guard=Guard.fresh(),
        )

    def axes(self) -> TrainState:
        """Logical axes of every leaf."""
        return TrainState(
            step=(),  # type: ignore[arg-type]
            params=self.model.axes,
            opt_state=state_axes(self.optimizer, self.model.shapes, self.model.axes),
            key=(None,),  # type: ignore[arg-type]
            guard=Guard(mean=(None,), variance=(None,), seen=(), skipped=(), halted=()),  # type: ignore[arg-type]
        )

    def shardings(self) -> TrainState:
        return self.sharder.tree(self.axes())

    def abstract(self) -> TrainState:
        """Shapes, types and shardings of the state: what a checkpoint is restored onto."""
        shapes = jax.eval_shape(self.init, jnp.uint32(0))
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            self.shardings(),
        )

    def create(self, seed: int) -> TrainState:
        """Initialise straight into shards: no device ever holds a whole weight."""
        build = jax.jit(self.init, out_shardings=self.shardings(), compiler_options=RUN_ONCE)
        return build(jnp.uint32(seed))

    def create_around(self, params: Tree, seed: int) -> TrainState:
        """A fresh state with weights that are there already, which it takes over."""
        build = jax.jit(self._around, out_shardings=self.shardings(), donate_argnums=0)
        return build(params, jnp.uint32(seed))
