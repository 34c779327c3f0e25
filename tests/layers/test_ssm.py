"""The state space recurrence by chunks and by single steps, against the paper's formula in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.kernels.gated_delta.spec import segment_starts
from maxhydra.layers.ssm import state_space
from tests.support.recurrences import check_gradients, check_outputs

B, G, N, S, P = 2, 2, 4, 5, 3
# Longer than two chunks, with a change of segment inside of a chunk and one at its end, and padding on both sides.
SEGMENTS = np.stack([np.repeat([1, 2, 3, 0], [64, 21, 50, 5]), np.repeat([0, 4, 5], [7, 100, 33])])


def inputs(length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(length)
    return {
        "query": rng.normal(size=(B, length, G, S)),
        "key": rng.normal(size=(B, length, G, S)),
        "value": rng.normal(size=(B, length, N, P)),
        "log_decay": -rng.exponential(0.1, size=(B, length, N)),
        "state": rng.normal(size=(B, N, S, P)),
    }


def recurrence(arrays: dict[str, np.ndarray], segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One row, head and token at a time, in float64, skipping padding; a segment after another starts from zero."""
    out, last = np.zeros((*segments.shape, N, P)), arrays["state"].copy()
    for row in range(B):
        for head in range(N):
            group, segment = head // (N // G), None
            for token in np.flatnonzero(segments[row]):
                if segment not in (None, segments[row, token]):
                    last[row, head] = 0
                segment = segments[row, token]
                key, value = arrays["key"][row, token, group], arrays["value"][row, token, head]
                decayed = np.exp(arrays["log_decay"][row, token, head]) * last[row, head]
                last[row, head] = decayed + np.outer(key, value)
                out[row, token, head] = last[row, head].T @ arrays["query"][row, token, group]
    return out, last


def run(arrays: dict[str, jax.Array], segments: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """The layer's function, with padding as the layer passes it: no decay, and nothing added."""
    is_real = jnp.asarray(segments != 0)
    return state_space(
        arrays["query"],
        arrays["key"],
        jnp.where(is_real[..., None, None], arrays["value"], 0),
        log_decay_BTN=jnp.where(is_real[..., None], arrays["log_decay"], 0),
        state_BNSP=arrays["state"],
        starts_BT=segment_starts(jnp.asarray(segments)),
    )


@pytest.mark.parametrize("segments", [SEGMENTS, np.ones((B, 1), int)], ids=["chunks", "one_token"])
def test_outputs_and_state_equal_the_recurrence(segments):
    check_outputs(run, recurrence, inputs(segments.shape[1]), segments)


@pytest.mark.slow
def test_gradients_equal_differences_of_the_recurrence():
    check_gradients(run, recurrence, inputs(SEGMENTS.shape[1]), SEGMENTS)


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (
            ["model.kinds.layer.mixer=ssm", "model.kinds.layer.ssm.num_heads=4", "model.kinds.layer.ssm.num_groups=3"],
            "num_groups",
        ),
        (["model.kinds.layer.mixer=none", "model.kinds.layer.feed_forward=none"], "feed_forward"),
        (["model.kinds.layer.mixer=none"], "gives no layer a mixer"),
        (["model.mtp.depth=1", "model.multipliers.logit_divisor=2"], "logit_divisor"),
        (["model.kinds.layer.latent_dim=8", "model.kinds.layer.feed_forward=none"], "feed_forward"),
    ],
    ids=["groups", "empty_layer", "no_mixer", "mtp", "latent"],
)
def test_impossible_layers_are_rejected(overrides, path):
    with pytest.raises(ConfigError, match=path):
        compose(["model=tiny", *overrides])
