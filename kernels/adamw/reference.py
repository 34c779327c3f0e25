"""AdamW (Loshchilov and Hutter, 2019) as it is written down."""

import jax
import jax.numpy as jnp

from maxhydra.kernels.adamw.rule import Held, Now, Rule


def adamw(held: Held, grads: list[jax.Array], now: Now, rule: Rule) -> Held:
    grad = jnp.stack(grads).reshape(held.weight.shape).astype(jnp.float32) * now.scale
    weight, mu, nu = (x.astype(jnp.float32) for x in held)
    mu = rule.b1 * mu + (1 - rule.b1) * grad
    nu = rule.b2 * nu + (1 - rule.b2) * jnp.square(grad)
    direction = (mu * now.mu_scale) / (jnp.sqrt(nu * now.nu_scale) + rule.eps)
    weight = weight - now.rate * (direction + rule.decay * weight)
    new = (x.astype(old.dtype) for x, old in zip((weight, mu, nu), held, strict=True))
    return Held(*(jnp.where(now.apply > 0, x, old) for x, old in zip(new, held, strict=True)))
