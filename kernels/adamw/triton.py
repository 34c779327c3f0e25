"""AdamW for GPUs, in Pallas for Triton: weight, moments and gradient are read once, and written where they lie.

Gradients of stacked layers that were made one by one stay arrays of their own: a call updates one layer of the stack in
its place. Which layer is a number in memory, so that all calls are one kernel.

Shapes: L layers of a stack, N numbers of a layer.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxhydra.kernels.adamw.rule import Held, Now, Rule


class Tile(NamedTuple):
    """What a program does, and how."""

    size: int
    warps: int


# The fastest of those measured on an H200: 16 bytes of a float32 array, and 8 of a bfloat16 one, for each thread.
MEASURED = Tile(512, 4)
# Numbers of a layer come in multiples of this, so that a program reads whole lines of memory.
MULTIPLE = 256
# Of a stack: places in it are counted in 32 bits.
LARGEST = 2**31 - 1
# Smaller weights are left to XLA, which joins their updates.
FEWEST = 2**20


def adamw(
    held: Held, grads: list[jax.Array], now: Now, rule: Rule, *, tile: Tile = MEASURED, interpret: bool = False
) -> Held:
    """The update of a stack whose gradients are those of its parts, in order."""
    shape, numbers = held.weight.shape, now.vector()
    held = Held(*(x.reshape(len(grads), -1) for x in held))
    size = math.gcd(held.weight.shape[1], tile.size)
    update = pl.pallas_call(
        partial(_kernel, rule=rule, size=size),
        grid=(held.weight.shape[1] // size,),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in held],
        input_output_aliases={3: 0, 4: 1, 5: 2},
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=interpret,
        name="adamw",
    )
    for layer, grad in enumerate(grads):
        held = Held(*update(numbers, jnp.full((1,), layer, jnp.int32), grad.reshape(-1), *held))
    return Held(*(x.reshape(shape) for x in held))


def _kernel(
    now_ref: Any,
    layer_ref: Any,
    grad_ref: Any,
    old_weight_ref: Any,
    old_mu_ref: Any,
    old_nu_ref: Any,
    weight_ref: Any,
    mu_ref: Any,
    nu_ref: Any,
    *,
    rule: Rule,
    size: int,
) -> None:
    """What is old and what is new are the same memory."""
    place = pl.ds(pl.program_id(0) * size, size)
    layer = layer_ref[0]
    scale, rate, mu_scale, nu_scale, apply = (now_ref[i] for i in range(len(Now._fields)))
    grad = grad_ref[place].astype(jnp.float32) * scale
    old = tuple(ref[layer, place].astype(jnp.float32) for ref in (old_weight_ref, old_mu_ref, old_nu_ref))
    weight, mu, nu = old
    mu = rule.b1 * mu + (1 - rule.b1) * grad
    nu = rule.b2 * nu + (1 - rule.b2) * grad * grad
    direction = (mu * mu_scale) / (jnp.sqrt(nu * nu_scale) + rule.eps)
    weight = weight - rate * (direction + rule.decay * weight)
    for ref, new, was in zip((weight_ref, mu_ref, nu_ref), (weight, mu, nu), old, strict=True):
        ref[layer, place] = jnp.where(apply > 0, new, was).astype(ref.dtype)
