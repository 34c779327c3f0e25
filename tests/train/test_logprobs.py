"""Token log-probs against jax.nn.log_softmax: values and gradients, with and without chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.train.loss import token_logprobs

B, S, D, V = 3, 12, 8, 17
RNG = np.random.default_rng(0)
HIDDEN, HEAD, COTANGENT = (RNG.normal(size=size).astype(np.float32) for size in ((B, S, D), (D, V), (B, S)))
TARGETS = jnp.asarray(RNG.integers(0, V, (B, S)).astype(np.int32))


def capped(hidden: jax.Array, head: jax.Array) -> jax.Array:
    return 5 * jnp.tanh(hidden @ head / 5)


def chunked_logprobs(hidden: jax.Array, head: jax.Array, chunk: int) -> jax.Array:
    return token_logprobs(lambda h: capped(h, head), hidden, TARGETS, chunk=chunk)


def expected_logprobs(hidden: jax.Array, head: jax.Array) -> jax.Array:
    return jnp.take_along_axis(jax.nn.log_softmax(capped(hidden, head)), TARGETS[..., None], -1)[..., 0]


@pytest.mark.slow
@pytest.mark.default_cases("0", "4", "12", "100")
@pytest.mark.parametrize("chunk", [0, 1, 4, 12, 100])
def test_values_and_gradients(chunk: int) -> None:
    """With a nonlinear function of the log-probs that weights every token differently."""
    np.testing.assert_allclose(
        chunked_logprobs(HIDDEN, HEAD, chunk), expected_logprobs(HIDDEN, HEAD), rtol=1e-5, atol=1e-6
    )
    got = jax.grad(lambda *x: jnp.sum(COTANGENT * jnp.square(chunked_logprobs(*x, chunk))), (0, 1))(HIDDEN, HEAD)
    expected = jax.grad(lambda *x: jnp.sum(COTANGENT * jnp.square(expected_logprobs(*x))), (0, 1))(HIDDEN, HEAD)
    for g, e in zip(got, expected, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-4)


def test_chunks_never_hold_all_logits() -> None:
    def largest(chunk: int) -> int:
        step = jax.jit(jax.grad(lambda *x: jnp.sum(chunked_logprobs(*x, chunk) ** 2), (0, 1)))
        text = step.lower(HIDDEN, HEAD).as_text()
        return max(size for size in (1, 2, 3, 4, 6, 12) if f"tensor<{B}x{size}x{V}x" in text)

    assert largest(0) == S
    assert largest(3) == 3


def test_bfloat16_logits_are_normalized_in_float32() -> None:
    narrow = jnp.asarray(HIDDEN, jnp.bfloat16)
    got = token_logprobs(lambda h: h @ HEAD.astype(jnp.bfloat16), narrow, TARGETS, chunk=4)
    assert got.dtype == jnp.float32
    wide = (narrow @ HEAD.astype(jnp.bfloat16)).astype(jnp.float32)
    expected = jnp.take_along_axis(jax.nn.log_softmax(wide), TARGETS[..., None], -1)[..., 0]
    np.testing.assert_allclose(got, expected, rtol=1e-5)
