"""Adam with 8-bit moments by block-wise dynamic quantization (Dettmers et al., 2021).

Each block of a moment is scaled to its largest magnitude, and each value rounded to the nearest of 256 numbers that
span seven orders of magnitude. The arithmetic is float32: moments are dequantized, updated, used, and quantized again.
The codes have the shape of the parameter and blocks run along its last dimension, so that both are sharded like it.

Vectors and tables of vectors (embedding, head) keep float32 moments, as in the paper: their gradients are less uniform,
and vectors are small.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxhydra.optim.parameters import is_table, path_of, unstacked_dims
from maxhydra.sharding import LogicalAxes

Tree = Any

# Values of a block share one scale. The largest power of two from LARGEST to SMALLEST that divides the last dimension.
LARGEST_BLOCK, SMALLEST_BLOCK = 256, 32
EXPONENTS = 7


class Quantized(NamedTuple):
    """A moment as 8-bit codes [..., N] and the scale of each block [..., N / block]."""

    codes: jax.Array
    scales: jax.Array


def dynamic_values(*, is_signed: bool) -> np.ndarray:
    """The 256 numbers of the dynamic data type in [-1, 1] or [0, 1], in order.

    For each power of ten from 1e-6 to 1 there are twice as many equally spaced numbers as for the one below it.
    """
    values = [0.0, 1.0]
    for exponent in range(EXPONENTS):
        boundaries = np.linspace(0.1, 1, 2 ** (exponent + (not is_signed)) + 1)
        means = 10.0 ** (exponent - EXPONENTS + 1) * (boundaries[:-1] + boundaries[1:]) / 2
        values += [*means, *(-means if is_signed else [])]
    return np.sort(np.array(values, np.float32))


SIGNED, UNSIGNED = dynamic_values(is_signed=True), dynamic_values(is_signed=False)


def block_size(axes: LogicalAxes, shape: tuple[int, ...]) -> int | None:
    """Values per block of a parameter's moments; None if they are kept in float32."""
    if len(unstacked_dims(axes)) < 2 or is_table(axes):
        return None
    sizes = [LARGEST_BLOCK >> n for n in range(LARGEST_BLOCK.bit_length()) if LARGEST_BLOCK >> n >= SMALLEST_BLOCK]
    return next((size for size in sizes if shape[-1] % size == 0), None)


def quantize(x: jax.Array, values: np.ndarray, block: int) -> Quantized:
    """The nearest value of each number, relative to the largest magnitude of its block."""
    blocks = x.reshape(*x.shape[:-1], -1, block)
    scales = jnp.max(jnp.abs(blocks), axis=-1)
    # A block of zeros has the code of zero, whatever its scale.
    relative = blocks / jnp.where(scales == 0, 1, scales)[..., None]
    return Quantized(_nearest(relative, values).astype(jnp.uint8).reshape(x.shape), scales)


def _nearest(x: jax.Array, values: np.ndarray) -> jax.Array:
    """Index of the nearest of 256 ascending values by binary search.

    `jnp.searchsorted` compares with all of them, which on a CPU takes 40 times as long, or folds constants of the size
    of `x` when it compiles.
    """
    middles = jnp.asarray((values[:-1] + values[1:]) / 2)
    codes = jnp.where(x > middles[127], 128, 0)
    for step in (64, 32, 16, 8, 4, 2, 1):
        codes = jnp.where(x > middles[codes + step - 1], codes + step, codes)
    return codes


def dequantize(moment: Quantized, values: np.ndarray) -> jax.Array:
    """The float32 values of a quantized moment."""
    codes, scales = moment
    blocks = jnp.asarray(values)[codes.reshape(*scales.shape, -1).astype(jnp.int32)]
    return (blocks * scales[..., None]).reshape(codes.shape)


def scale_by_adam8(
    axes: dict[str, LogicalAxes], *, b1: float, b2: float, eps: float, eps_root: float = 0.0
) -> optax.GradientTransformation:
    """`optax.scale_by_adam` with quantized moments, its state with a `Quantized` in place of each quantized moment."""

    def block_of(path: str, shape: tuple[int, ...]) -> int | None:
        return block_size(axes[path], shape)

    def init(params: Tree) -> optax.ScaleByAdamState:
        def zeros(values: np.ndarray) -> Tree:
            def moment(keys: jax.tree_util.KeyPath, param: jax.Array) -> jax.Array | Quantized:
                block, zero = block_of(path_of(keys), param.shape), jnp.zeros(param.shape, jnp.float32)
                return zero if block is None else quantize(zero, values, block)

            return jax.tree_util.tree_map_with_path(moment, params)

        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), mu=zeros(SIGNED), nu=zeros(UNSIGNED))

    def update(grads: Tree, state: optax.ScaleByAdamState, params: Tree = None) -> tuple[Tree, optax.ScaleByAdamState]:
        count = optax.safe_increment(state.count)
        leaves, structure = jax.tree_util.tree_flatten_with_path(grads)
        moments = (jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Quantized)) for tree in state[1:])
        updates, new_mu, new_nu = [], [], []
        for (keys, grad), mu, nu in zip(leaves, *moments, strict=True):
            block = block_of(path_of(keys), grad.shape)
            mean = b1 * _dense(mu, SIGNED) + (1 - b1) * grad
            square = b2 * _dense(nu, UNSIGNED) + (1 - b2) * jnp.square(grad)
            corrected = mean / (1 - b1**count), square / (1 - b2**count)
            updates.append(corrected[0] / (jnp.sqrt(corrected[1] + eps_root) + eps))
            new_mu.append(mean if block is None else quantize(mean, SIGNED, block))
            new_nu.append(square if block is None else quantize(square, UNSIGNED, block))
        new = (jax.tree.unflatten(structure, tree) for tree in (updates, new_mu, new_nu))
        update_tree, mu_tree, nu_tree = new
        return update_tree, optax.ScaleByAdamState(count, mu_tree, nu_tree)

    return optax.GradientTransformation(init, update)


def _dense(moment: jax.Array | Quantized, values: np.ndarray) -> jax.Array:
    return dequantize(moment, values) if isinstance(moment, Quantized) else moment
