"""How weights are made and used: initial values, logical axes, and the number format of each role."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxhydra.config import model as config
from maxhydra.sharding import LogicalAxes


@dataclasses.dataclass(frozen=True)
class Dtypes:
    """Number formats by role, as `config.Dtypes` documents them."""

    weights: np.dtype
    compute: np.dtype
    softmax: np.dtype
    logits: np.dtype

    @classmethod
    def of(cls, dtypes: config.Dtypes) -> "Dtypes":
        return cls(**{field.name: jnp.dtype(getattr(dtypes, field.name).value) for field in dataclasses.fields(cls)})


class WeightMaker:
    """Makes the weights of modules: initial values and logical axes, alone or stacked over layers.

    A key per weight in the order of making; values do not depend on how the weights are sharded.
    """

    def __init__(self, key: jax.Array, *, dtype: np.dtype, layers: int | None):
        self._key = key
        self._made = 0
        self._dtype = dtype
        self._stack: tuple[int, ...] = () if layers is None else (layers,)
        self._stack_axes: LogicalAxes = () if layers is None else ("layers",)

    def stacked(self, layers: int) -> "WeightMaker":
        """A maker of weights that hold so many layers, on a leading axis `layers`."""
        return WeightMaker(self._next_key(), dtype=self._dtype, layers=layers)

    def ones(self, shape: tuple[int, ...], axes: LogicalAxes) -> nnx.Param:
        return nnx.Param(jnp.ones(self._stack + shape, self._dtype), axes=self._stack_axes + axes)

    def matrix(self, rows: tuple[int, ...], columns: tuple[int, ...], axes: LogicalAxes, *, std: float) -> nnx.Param:
        """Normal values in [*rows, *columns], drawn in float32 whatever format they are kept in.

        Drawn as a plain matrix: random numbers in four dimensions take XLA seconds to compile for a CPU.
        """
        flat = (*self._stack, math.prod(rows), math.prod(columns))
        values = std * jax.random.normal(self._next_key(), flat, jnp.float32)
        shaped = values.astype(self._dtype).reshape(*self._stack, *rows, *columns)
        return nnx.Param(shaped, axes=self._stack_axes + axes)

    def projection(
        self, inputs: tuple[int, ...], outputs: tuple[int, ...], axes: LogicalAxes, *, scale: float
    ) -> nnx.Param:
        """A map from inputs of unit variance to outputs of variance scale^2: its entries have scale^2 / fan-in."""
        return self.matrix(inputs, outputs, axes, std=scale * math.prod(inputs) ** -0.5)

    def _next_key(self) -> jax.Array:
        self._made += 1
        return jax.random.fold_in(self._key, self._made)


def residual_scale(model: config.Model) -> float:
    """Scale of the last projection of each residual branch.

    The stream is a sum of 2 * num_layers branches; at 1 / sqrt(2 * num_layers) each, their sum has the variance of one,
    however deep the model is (Radford et al., 2019).
    """
    return model.init_scale * (2 * model.num_layers) ** -0.5
