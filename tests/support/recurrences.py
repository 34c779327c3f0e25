"""Chunked recurrences against NumPy loops in float64: outputs, last states, and derivatives."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

Arrays = dict[str, np.ndarray]
# Outputs [B, T, heads, size] and last states of inputs by name, and segments [B, T] with 0 for padding.
Recurrence = Callable[[Any, np.ndarray], tuple[Any, Any]]


def check_outputs(run: Recurrence, recurrence: Recurrence, arrays: Arrays, segments: np.ndarray) -> None:
    expected_out, expected_state = recurrence(arrays, segments)
    out, state = jax.jit(run)(_in_float32(arrays), segments)
    np.testing.assert_allclose(np.where((segments != 0)[..., None, None], out, 0), expected_out, atol=2e-5)
    np.testing.assert_allclose(state, expected_state, atol=2e-5)


def check_gradients(run: Recurrence, recurrence: Recurrence, arrays: Arrays, segments: np.ndarray) -> None:
    """Along a random direction of each input: the derivative of the recurrence in float64, by differences."""
    rng, (out, state) = np.random.default_rng(0), recurrence(arrays, segments)
    weights = rng.normal(size=out.shape) * (segments != 0)[..., None, None]
    state_weights = rng.normal(size=state.shape)

    def total(arrays: Any, function: Recurrence, xp: Any) -> Any:
        out, state = function(arrays, segments)
        return xp.sum(out * weights) + xp.sum(state * state_weights)

    gradients = jax.jit(jax.grad(lambda arrays: total(arrays, run, jnp)))(_in_float32(arrays))
    for name, gradient in gradients.items():
        direction = rng.normal(size=gradient.shape)
        moved = (total({**arrays, name: arrays[name] + step * direction}, recurrence, np) for step in (1e-5, -1e-5))
        expected = (next(moved) - next(moved)) / 2e-5
        assert np.sum(np.asarray(gradient, np.float64) * direction) == pytest.approx(expected, rel=1e-4), name


def _in_float32(arrays: Arrays) -> dict[str, jax.Array]:
    return {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()}
