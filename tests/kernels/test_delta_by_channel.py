"""The delta rule with a decay per channel: chunks and single steps equal the paper's formula in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.kernels.gated_delta.by_channel import Tokens, gated_delta_by_channel
from tests.support.recurrences import check_gradients, check_outputs

B, N, K, V = 2, 2, 4, 3
# Longer than two chunks, with changes of segment inside of chunks and at their ends, and padding on both sides.
SEGMENTS = np.stack([np.repeat([1, 2, 3, 0], [32, 11, 25, 5]), np.repeat([0, 4, 5], [7, 50, 16])])


def inputs(length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(length)
    key = rng.normal(size=(B, length, N, K))
    return {
        "query": rng.normal(size=(B, length, N, K)),
        "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "value": rng.normal(size=(B, length, N, V)),
        "log_decay": -rng.exponential(0.3, size=(B, length, N, K)),
        "rate": rng.uniform(size=(B, length, N)),
        "state": rng.normal(size=(B, N, K, V)),
    }


def recurrence(arrays: dict[str, np.ndarray], segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One row, head and token at a time, in float64, skipping padding; a segment after another starts from zero."""
    out, last = np.zeros((*segments.shape, N, V)), arrays["state"].copy()
    for row, head in np.ndindex(B, N):
        segment, state = None, last[row, head]
        for token in np.flatnonzero(segments[row]):
            if segment not in (None, segments[row, token]):
                state = np.zeros((K, V))
            segment = segments[row, token]
            query, key, value, log_decay, rate = (
                arrays[name][row, token, head] for name in ("query", "key", "value", "log_decay", "rate")
            )
            state = np.exp(log_decay)[:, None] * state
            state = state + rate * np.outer(key, value - state.T @ key)
            out[row, token, head] = state.T @ query
        last[row, head] = state
    return out, last


def run(arrays: dict[str, jax.Array], segments: np.ndarray) -> tuple[jax.Array, jax.Array]:
    tokens = Tokens(*(arrays[name] for name in ("query", "key", "value", "log_decay", "rate")))
    return gated_delta_by_channel(tokens, state_BNKV=arrays["state"], segments_BT=jnp.asarray(segments))


@pytest.mark.parametrize("segments", [SEGMENTS, np.ones((B, 1), int)], ids=["chunks", "one_token"])
def test_outputs_and_state_equal_the_recurrence(segments):
    check_outputs(run, recurrence, inputs(segments.shape[1]), segments)


@pytest.mark.slow
def test_gradients_equal_differences_of_the_recurrence():
    check_gradients(run, recurrence, inputs(SEGMENTS.shape[1]), SEGMENTS)
