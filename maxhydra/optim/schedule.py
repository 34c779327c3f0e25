"""Learning-rate schedules.

Steps count from 0. Warm-up is linear from zero at step -1: with `warmup_steps` = w, step s has (s + 1) / (w + 1) of the
peak, so the first step has a nonzero rate and step w is the first at the peak. The last step, steps - 1, has exactly
`final_fraction` of the peak; later steps (a run extended beyond its schedule) stay at that value.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from maxhydra.config.schema.optimizer import DecayStyle, ScheduleKind
from maxhydra.config.schema.optimizer import Schedule as ScheduleConfig

# A step (a Python int, or traced inside a jit) -> float32 scalar.
Schedule: TypeAlias = Callable[[int | jax.Array], jax.Array]


def schedule(config: ScheduleConfig, *, peak: float, steps: int) -> Schedule:
    """Build the schedule: peak x warm-up x shape of the kind."""
    after_warmup = _SHAPES[config.kind](config, steps)

    def learning_rate(step: int | jax.Array) -> jax.Array:
        step_f32 = jnp.asarray(step, jnp.float32)
        warmup = jnp.minimum(1.0, (step_f32 + 1) / (config.warmup_steps + 1))
        return peak * warmup * after_warmup(step_f32)

    return learning_rate


Shape: TypeAlias = Callable[[jax.Array], jax.Array]


def _constant(config: ScheduleConfig, steps: int) -> Shape:
    return jnp.ones_like


def _inverse_sqrt(config: ScheduleConfig, steps: int) -> Shape:
    """sqrt((w + 1) / (s + 1)): 1 at the end of the warm-up (Vaswani et al., 2017, with an arbitrary peak)."""
    first = config.warmup_steps + 1
    return lambda step: jnp.sqrt(first / jnp.maximum(step + 1, first))


def _linear(config: ScheduleConfig, steps: int) -> Shape:
    return _decay(DecayStyle.linear, _final(config), start=config.warmup_steps, end=steps - 1)


def _cosine(config: ScheduleConfig, steps: int) -> Shape:
    return _decay(DecayStyle.cosine, _final(config), start=config.warmup_steps, end=steps - 1)


def _wsd(config: ScheduleConfig, steps: int) -> Shape:
    """Warmup-stable-decay (Hu et al., 2024): the last `decay_steps` steps are below the peak."""
    assert config.decay_steps is not None and config.decay_style is not None
    return _decay(config.decay_style, _final(config), start=steps - 1 - config.decay_steps, end=steps - 1)


def _final(config: ScheduleConfig) -> float:
    assert config.final_fraction is not None
    return config.final_fraction


def _decay(style: DecayStyle, final: float, *, start: int, end: int) -> Shape:
    """1 until step `start`, `final` from step `end` on."""

    def shape(step: jax.Array) -> jax.Array:
        progress = jnp.clip((step - start) / max(end - start, 1), 0.0, 1.0)
        remaining = 1 - progress if style is DecayStyle.linear else 0.5 * (1 + jnp.cos(math.pi * progress))
        return final + (1 - final) * remaining

    return shape


_SHAPES: dict[ScheduleKind, Callable[[ScheduleConfig, int], Shape]] = {
    ScheduleKind.constant: _constant,
    ScheduleKind.inverse_sqrt: _inverse_sqrt,
    ScheduleKind.linear: _linear,
    ScheduleKind.cosine: _cosine,
    ScheduleKind.wsd: _wsd,
}
