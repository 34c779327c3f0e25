"""shard_map with a gradient that sums only over the axes that split something.

Without its replication check, which Pallas kernels do not support, the gradient of `jax.shard_map` divides the
cotangents of outputs, and sums those of inputs, over every mesh axis that their specs do not mention: for a norm under
tensor parallelism an all-reduce of the residual stream. Here axes that no spec mentions are left alone: all devices
along them compute the same. An input that is replicated over an axis that splits other arrays still gets the sum over
it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

R = TypeVar("R")


def differentiable_shard_map(
    mapped: Callable[..., Any], run: Callable[..., R], in_specs: tuple[Any, ...], out_specs: Any
) -> Callable[..., R]:
    """Apply `mapped`, a shard_map without replication check, to `run`, which must not close over arrays."""
    function = _ShardedFunction(mapped, run, in_specs, out_specs)
    call: Any = jax.custom_vjp(function.primal)
    call.defvjp(function.forward, function.backward)
    return call


def axes_of(entry: Any) -> tuple[str, ...]:
    """Mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Argument:
    """A residual that is an argument of the function, which need not be stored twice."""

    index: int


@dataclasses.dataclass(frozen=True)
class _ShardedFunction:
    """The three functions of a custom_vjp, each under its own shard_map."""

    mapped: Callable[..., Any]
    run: Callable[..., Any]
    in_specs: tuple[Any, ...]
    out_specs: Any

    @property
    def split_axes(self) -> tuple[str, ...]:
        """Mesh axes that split any input or output."""
        specs = jax.tree.leaves((self.in_specs, self.out_specs), is_leaf=_is_spec)
        return tuple(dict.fromkeys(axis for spec in specs for axis in _spec_axes(spec)))

    @property
    def residual_spec(self) -> PartitionSpec:
        """Residuals differ between all shards: they are stacked along a new dimension."""
        return PartitionSpec(self.split_axes or None)

    def primal(self, *arguments: Any) -> Any:
        return self.mapped(self.run, in_specs=self.in_specs, out_specs=self.out_specs)(*arguments)

    def forward(self, *arguments: Any) -> tuple[Any, Any]:
        """The outputs, and as residuals the arguments and the function that computes local gradients."""

        def on_device(*arguments: Any) -> tuple[Any, Any]:
            leaves, tree = _flatten(arguments)

            def run_on_floats(*floats: jax.Array) -> Any:
                remaining = iter(floats)
                return self.run(*tree.unflatten(next(remaining) if _is_float(leaf) else leaf for leaf in leaves))

            out, pull_back = jax.vjp(run_on_floats, *filter(_is_float, leaves))
            indices = {id(leaf): index for index, leaf in enumerate(leaves)}
            return out, jax.tree.map(
                lambda leaf: _Argument(indices[id(leaf)]) if id(leaf) in indices else leaf[None], pull_back
            )

        specs = self.out_specs, self.residual_spec
        out, pull_back = self.mapped(on_device, in_specs=self.in_specs, out_specs=specs)(*arguments)
        return out, (arguments, pull_back)

    def backward(self, residuals: tuple[Any, Any], d_out: Any) -> Any:
        """The gradients of the inexact arguments; others have none."""
        arguments, pull_back = residuals
        leaves, tree = _flatten(arguments)
        specs = jax.tree.leaves(_full_specs(self.in_specs, arguments), is_leaf=_is_spec)
        float_specs = tuple(spec for spec, leaf in zip(specs, leaves, strict=True) if _is_float(leaf))

        def on_device(leaves: list[jax.Array], pull_back: Any, d_out: Any) -> tuple[jax.Array, ...]:
            def restore(leaf: Any) -> jax.Array:
                return leaves[leaf.index] if isinstance(leaf, _Argument) else leaf[0]

            gradients = jax.tree.map(restore, pull_back, is_leaf=lambda leaf: isinstance(leaf, _Argument))(d_out)
            return tuple(self._sum_replicas(spec, d) for spec, d in zip(float_specs, gradients, strict=True))

        run = self.mapped(on_device, in_specs=(specs, self.residual_spec, self.out_specs), out_specs=float_specs)
        gradients = iter(run(leaves, pull_back, d_out))
        zeros = (np.zeros(leaf.shape, jax.dtypes.float0) for leaf in leaves if not _is_float(leaf))
        return tree.unflatten(next(gradients if _is_float(leaf) else zeros) for leaf in leaves)

    def _sum_replicas(self, spec: PartitionSpec, gradient: jax.Array) -> jax.Array:
        """Sum the gradient of an input over the axes that split other arrays but not this one."""
        axes = tuple(axis for axis in self.split_axes if axis not in _spec_axes(spec))
        return jax.lax.psum(gradient, axes) if axes else gradient


def _is_float(array: jax.Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


def _spec_axes(spec: PartitionSpec) -> tuple[str, ...]:
    return tuple(axis for entry in spec for axis in axes_of(entry))


def _full_specs(prefix: Any, tree: Any) -> Any:
    """The specs of a tree prefix, repeated for every array below."""
    return jax.tree.map(lambda spec, below: jax.tree.map(lambda _: spec, below), prefix, tree, is_leaf=_is_spec)


def _flatten(tree: Any) -> tuple[list[jax.Array], Any]:
    return jax.tree.flatten(tree)
