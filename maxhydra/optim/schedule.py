"""Learning-rate schedules.

Steps count from 0. Warm-up is linear from zero at step -1: with `warmup_steps` = w, step s has (s + 1) / (w + 1) of the
peak, so the first step has a nonzero rate and step w is the first at the peak. The last step, steps - 1, has exactly
`final_fraction` of the peak; later steps (a run extended beyond its schedule) stay at that value. After a restart at r
steps, step r is back at the peak, and step r - 1 ended a decay.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

import jax
import jax.numpy as jnp

from maxhydra.config.schema.optimizer import DecayStyle, ScheduleKind
from maxhydra.config.schema.optimizer import Schedule as ScheduleConfig

# A step (a Python int, or traced inside a jit) -> float32 scalar.
Schedule: TypeAlias = Callable[[int | jax.Array], jax.Array]


def schedule(config: ScheduleConfig, *, peak: float, steps: int) -> Schedule:
    """Build the schedule for a run of `steps` steps: peak x warm-up x shape of the kind in each cycle."""
    ends = [*config.restarts, config.length(steps)]
    cycles = [_SHAPES[config.kind](config, max(start, config.warmup_steps), end) for start, end in pairwise([0, *ends])]

    def after_warmup(step: jax.Array) -> jax.Array:
        value = cycles[0](step)
        for restart, shape in zip(config.restarts, cycles[1:], strict=True):
            value = jnp.where(step >= restart, shape(step), value)
        return value

    def learning_rate(step: int | jax.Array) -> jax.Array:
        step_f32 = jnp.asarray(step, jnp.float32)
        warmup = jnp.minimum(1.0, (step_f32 + 1) / (config.warmup_steps + 1))
        return peak * warmup * after_warmup(step_f32)

    return learning_rate


Shape: TypeAlias = Callable[[jax.Array], jax.Array]


def _constant(config: ScheduleConfig, start: int, end: int) -> Shape:
    return jnp.ones_like


def _inverse_sqrt(config: ScheduleConfig, start: int, end: int) -> Shape:
    """sqrt((w + 1) / (s + 1)): 1 at the end of the warm-up (Vaswani et al., 2017, with an arbitrary peak)."""
    first = config.warmup_steps + 1
    return lambda step: jnp.sqrt(first / jnp.maximum(step + 1, first))


def _linear(config: ScheduleConfig, start: int, end: int) -> Shape:
    return _decay(DecayStyle.linear, _final(config), start=start, end=end - 1)


def _cosine(config: ScheduleConfig, start: int, end: int) -> Shape:
    return _decay(DecayStyle.cosine, _final(config), start=start, end=end - 1)


def _wsd(config: ScheduleConfig, start: int, end: int) -> Shape:
    """Warmup-stable-decay (Hu et al., 2024): the last `decay_steps` steps of a cycle are below the peak."""
    assert config.decay_steps is not None and config.decay_style is not None
    return _decay(config.decay_style, _final(config), start=end - 1 - config.decay_steps, end=end - 1)


def _final(config: ScheduleConfig) -> float:
    assert config.final_fraction is not None
    return config.final_fraction


def _decay(style: DecayStyle, final: float, *, start: int, end: int) -> Shape:
    """1 until step `start`, `final` from step `end` on."""

    def shape(step: jax.Array) -> jax.Array:
        progress = jnp.clip((step - start) / max(end - start, 1), 0.0, 1.0)
        return _STYLES[style](progress, final)

    return shape


def _between(remaining: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array, float], jax.Array]:
    """From 1 to `final` as the remaining share falls from 1 to 0."""
    return lambda progress, final: final + (1 - final) * remaining(progress)


# (progress from 0 to 1, final fraction) -> fraction of the peak.
_STYLES: dict[DecayStyle, Callable[[jax.Array, float], jax.Array]] = {
    DecayStyle.linear: _between(lambda progress: 1 - progress),
    DecayStyle.cosine: _between(lambda progress: 0.5 * (1 + jnp.cos(math.pi * progress))),
    DecayStyle.sqrt: _between(lambda progress: 1 - jnp.sqrt(progress)),
    DecayStyle.exponential: lambda progress, final: final**progress,
    DecayStyle.inverse: lambda progress, final: 1 / (1 + progress * (1 / final - 1)),
}


_SHAPES: dict[ScheduleKind, Callable[[ScheduleConfig, int, int], Shape]] = {
    ScheduleKind.constant: _constant,
    ScheduleKind.inverse_sqrt: _inverse_sqrt,
    ScheduleKind.linear: _linear,
    ScheduleKind.cosine: _cosine,
    ScheduleKind.wsd: _wsd,
}
