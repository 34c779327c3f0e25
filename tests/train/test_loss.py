"""Cross-entropy against a float64 NumPy implementation: values and gradients, with and without chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.kernels.matmul import widening_einsum
from maxhydra.layers.context import KernelChoice
from maxhydra.train.loss import cross_entropy

B, S, D, V = 3, 12, 8, 17
XLA = KernelChoice("xla", ())


@pytest.fixture
def case() -> dict:
    rng = np.random.default_rng(0)
    return {
        "hidden": rng.normal(size=(B, S, D)).astype(np.float32),
        "head": rng.normal(size=(D, V)).astype(np.float32),
        "targets": rng.integers(0, V, (B, S)).astype(np.int32),
        "weights": rng.integers(0, 2, (B, S)).astype(np.float32),
    }


def sums(case: dict, head: jax.Array, z_loss: float, chunk: int) -> dict:
    return cross_entropy(
        lambda hidden: hidden @ head,
        jnp.asarray(case["hidden"]),
        jnp.asarray(case["targets"]),
        jnp.asarray(case["weights"]),
        z_loss=z_loss,
        chunk=chunk,
        kernel=XLA,
    )


@pytest.mark.parametrize("chunk", [0, 1, 4, 12, 100])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_matches_the_formula(case: dict, chunk: int, z_loss: float) -> None:
    logits = case["hidden"].astype(np.float64) @ case["head"].astype(np.float64)
    normaliser = np.log(np.exp(logits).sum(-1))
    nll = normaliser - np.take_along_axis(logits, case["targets"][..., None], -1)[..., 0]
    got = sums(case, case["head"], z_loss, chunk)
    np.testing.assert_allclose(got["nll"], (nll * case["weights"]).sum(), rtol=1e-5)
    np.testing.assert_allclose(got["loss"], ((nll + z_loss * normaliser**2) * case["weights"]).sum(), rtol=1e-5)
    assert got["weight"] == case["weights"].sum()


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_gradients_match_those_of_the_formula(case: dict, chunk: int, z_loss: float) -> None:
    """With respect to hidden states, the closed-over (soft-capped) head, and token weights."""

    def capped(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return 5 * jnp.tanh(hidden @ head / 5)

    def formula(hidden: jax.Array, head: jax.Array, weights: jax.Array) -> jax.Array:
        logits = capped(hidden, head)
        normaliser = jnp.log(jnp.sum(jnp.exp(logits), -1))
        target = jnp.take_along_axis(logits, case["targets"][..., None], -1)[..., 0]
        return jnp.sum(weights * (normaliser - target + z_loss * normaliser**2)) / jnp.sum(case["weights"])

    def our_loss(hidden: jax.Array, head: jax.Array, weights: jax.Array) -> jax.Array:
        sums = cross_entropy(
            lambda h: capped(h, head),
            hidden,
            jnp.asarray(case["targets"]),
            weights,
            z_loss=z_loss,
            chunk=chunk,
            kernel=XLA,
        )
        return sums["loss"] / jnp.sum(case["weights"])

    inputs = [jnp.asarray(case[name]) for name in ("hidden", "head", "weights")]
    for got, expected in zip(
        jax.grad(our_loss, (0, 1, 2))(*inputs), jax.grad(formula, (0, 1, 2))(*inputs), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bfloat16_matmuls_give_the_gradient_within_rounding(case: dict, dtype: str) -> None:
    """For float32 and bfloat16 logits: the softmax is computed in float32 in both cases."""

    def loss(hidden: jax.Array, head: jax.Array) -> jax.Array:
        def logits_of(h: jax.Array) -> jax.Array:
            return widening_einsum("...D,DV->...V", h, head.astype(h.dtype), dtype=dtype if narrow else "float32")

        targets, weights = jnp.asarray(case["targets"]), jnp.asarray(case["weights"])
        return cross_entropy(logits_of, hidden, targets, weights, z_loss=0.0, chunk=4, kernel=XLA)["loss"]

    narrow = False
    expected = jax.grad(loss, (0, 1))(case["hidden"], case["head"])
    narrow = True
    got = jax.grad(loss, (0, 1))(case["hidden"].astype(jnp.bfloat16), case["head"])
    for g, e in zip(got, expected, strict=True):
        assert np.linalg.norm(g.astype(np.float32) - e) < 1e-2 * np.linalg.norm(e)


@pytest.mark.parametrize("chunk", [0, 4])
def test_logits_are_computed_once(case: dict, chunk: int) -> None:
    """Three matmuls of the head's size: logits, and the gradients with respect to hidden states and head."""
    program = str(jax.make_jaxpr(jax.grad(lambda head: sums(case, head, 0.0, chunk)["loss"]))(case["head"]))
    assert program.count("dot_general") == 3


@pytest.mark.parametrize("chunk", [1, 3, 6])
def test_chunks_do_not_change_the_gradient(case: dict, chunk: int) -> None:
    def gradient(chunk: int) -> jax.Array:
        return jax.grad(lambda head: sums(case, head, 0.1, chunk)["loss"])(jnp.asarray(case["head"]))

    np.testing.assert_allclose(gradient(chunk), gradient(0), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_chunks_never_hold_all_logits(case: dict) -> None:
    """No array of the size of the full logits appears in the chunked program, forward or backward."""

    def largest(chunk: int) -> int:
        jaxpr = jax.make_jaxpr(jax.grad(lambda head: sums(case, head, 0.0, chunk)["loss"]))(case["head"])
        sizes = []

        def visit(jaxpr: jax.extend.core.Jaxpr) -> None:
            for equation in jaxpr.eqns:
                sizes.extend(v.aval.size for v in equation.outvars)
                for value in equation.params.values():
                    for inner in value if isinstance(value, (tuple, list)) else [value]:
                        if isinstance(inner, jax.extend.core.ClosedJaxpr):
                            visit(inner.jaxpr)
                        elif isinstance(inner, jax.extend.core.Jaxpr):
                            visit(inner)

        visit(jaxpr.jaxpr)
        return max(sizes)

    assert largest(0) >= B * S * V
    assert largest(2) < B * S * V
