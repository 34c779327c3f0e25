"""The router's choice of experts and its matmul, against top_k and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.layers import router


@pytest.mark.slow
@pytest.mark.parametrize("method", [router._best_by_rank, router._best_in_turn], ids=["rank", "turn"])
def test_experts_are_chosen_as_by_top_k(method):
    """With ties, infinite scores, and without a number, whose order is that of top_k."""
    scores = jnp.round(2 * jax.random.normal(jax.random.key(0), (2, 3, 16)))
    scores = scores.at[0, 1, 5].set(jnp.nan).at[1, 2, 3:].set(-jnp.inf).at[1, 1, 7].set(jnp.inf).at[0, 0, 0].set(-0.0)
    np.testing.assert_array_equal(method(scores, 5), jax.lax.top_k(scores + 0.0, 5)[1])


@pytest.mark.slow
def test_scores_and_gradients_are_those_at_the_indices():
    scores, d_out = jax.random.normal(jax.random.key(0), (2, 3, 16)), jax.random.normal(jax.random.key(1), (2, 3, 4))
    ids = jax.lax.top_k(scores, 4)[1]
    found, pull_back = jax.vjp(lambda scores: router.scores_of(ids, scores), scores)
    expected, pull_back_expected = jax.vjp(lambda scores: jnp.take_along_axis(scores, ids, axis=-1), scores)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(*(pull_back(d_out) for pull_back in (pull_back, pull_back_expected)))


@pytest.mark.slow
def test_the_matmul_of_bfloat16_is_as_exact_as_in_float32():
    """Error of logits and of both gradients relative to float64; that of x is rounded to bfloat16."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (1, router.MIN_TOKENS, 96), jnp.bfloat16)
    kernel, d_out = jax.random.normal(keys[1], (96, 24)), jax.random.normal(keys[2], (1, router.MIN_TOKENS, 24))

    @jax.jit
    def run(x, kernel, d_out):
        out, pull_back = jax.vjp(router.wide_matmul, x, kernel)
        return out, *pull_back(d_out)

    x_64, kernel_64, d_64 = (np.asarray(array, np.float64) for array in (x, kernel, d_out))
    expected = x_64 @ kernel_64, d_64 @ kernel_64.T, np.einsum("BTD,BTE->DE", x_64, d_64)
    for found, exact, bound in zip(run(x, kernel, d_out), expected, (5e-7, 2**-8, 5e-7), strict=True):
        error = np.abs(np.asarray(found, np.float64) - exact)
        assert np.max(error / np.maximum(np.abs(exact), np.sqrt(np.mean(exact**2)))) < bound
