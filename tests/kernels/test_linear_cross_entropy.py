"""The cross-entropy kernel in interpret mode against torch, values and gradients; its capability table."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from maxhydra.kernels import linear_cross_entropy
from maxhydra.kernels.linear_cross_entropy import BACKENDS, OPERATION, Call, LinearHead, UnsupportedError, triton
from maxhydra.kernels.linear_cross_entropy.chunks import ChunkedLoss, loss_sums
from maxhydra.kernels.placement import Placement
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")

B, S, D = 2, 4, 8
TILE = triton.Tile(logits=64, unroll=2, warps=4)
KERNEL = partial(triton.per_token, tile=TILE, interpret=True)


def by_torch(case: dict[str, np.ndarray], z_loss: float, cap: float) -> list[np.ndarray]:
    """Loss, nll, and the gradients of the loss with respect to hidden states, head and token weights."""
    hidden, head, weights = (torch.tensor(case[name], requires_grad=True) for name in ("hidden", "head", "weights"))
    logits = cap * torch.tanh(hidden @ head / cap)
    targets = torch.tensor(case["targets"]).long()
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(B, S)
    loss = torch.sum(weights * (nll + z_loss * torch.logsumexp(logits, -1) ** 2))
    loss.backward()
    results = (loss.detach(), torch.sum(weights * nll).detach(), hidden.grad, head.grad, weights.grad)
    return [array.numpy() for array in results]


# A vocabulary of full pieces, and one whose last piece is half full.
@pytest.mark.slow
@pytest.mark.default_cases("float32-352-2", "bfloat16-256-4")
@pytest.mark.parametrize(("vocabulary", "chunk"), [(256, 4), (352, 2)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_kernel_equals_torch(vocabulary: int, chunk: int, dtype: jnp.dtype) -> None:
    """With a soft-cap and a z-loss, in one chunk and in several."""
    rng, z_loss, cap = np.random.default_rng(vocabulary), 0.1, 3.0
    case = {
        "hidden": np.asarray(rng.normal(size=(B, S, D))),
        "head": np.asarray(rng.normal(size=(D, vocabulary))),
        "targets": rng.integers(0, vocabulary, (B, S)).astype(np.int32),
        "weights": rng.uniform(0, 1, (B, S)),
    }
    hidden, head = (jnp.asarray(case[name], dtype) for name in ("hidden", "head"))
    weights, targets = jnp.asarray(case["weights"], jnp.float32), jnp.asarray(case["targets"])

    @jax.jit
    def run(hidden: jax.Array, head: jax.Array, weights: jax.Array) -> tuple:
        def loss(hidden: jax.Array, head: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
            def logits_of(hidden: jax.Array, head: jax.Array) -> jax.Array:
                return (cap * jnp.tanh((hidden @ head) / cap)).astype(dtype)

            return loss_sums(ChunkedLoss(logits_of, KERNEL, z_loss, chunk), (hidden, weights, [head]), targets)

        (value, nll), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(hidden, head, weights)
        return value, nll, *gradients

    tolerance = 1e-5 if dtype == jnp.float32 else 3e-2
    for got, expected in zip(run(hidden, head, weights), by_torch(case, z_loss, cap), strict=True):
        error = np.linalg.norm(np.asarray(got, np.float64) - expected)
        assert error <= tolerance * np.linalg.norm(expected)


@pytest.mark.slow
def test_a_target_outside_the_vocabulary_selects_no_logit() -> None:
    """Such as the target of padding, whose weight is zero."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 256)), jnp.float32)
    _, nll, d_logits = KERNEL(logits, jnp.asarray([-1, 256]), jnp.zeros(2), z_loss=0.0, dtype=logits.dtype)
    np.testing.assert_allclose(nll, torch.logsumexp(torch.tensor(np.asarray(logits)), -1), rtol=1e-6)
    assert not np.any(d_logits)


@pytest.mark.parametrize("level", [1e4, -1e4])
def test_logits_far_from_zero_do_not_overflow(level: float) -> None:
    logits = jnp.full((1, 256), level - 100).at[0, 200].set(level).at[0, 201].set(level - 1)
    losses, _, d_logits = KERNEL(logits, jnp.asarray([201]), jnp.ones(1), z_loss=0.0, dtype=logits.dtype)
    p = 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(losses, [-np.log(1 - p)], rtol=1e-3)
    np.testing.assert_allclose(d_logits[0, 199:203], [0, p, -p, 0], rtol=1e-3, atol=1e-6)


def test_the_kernel_serves_one_gpu_and_gives_the_reason_otherwise() -> None:
    defaults = {"platform": "gpu", "dtype": "bfloat16", "vocabulary": 128256, "is_chunked": True}
    assert OPERATION.choose("auto", Call(**defaults)) == "triton"
    for change, reason in (
        ({"platform": "cpu"}, "runs on gpu, not cpu"),
        ({"vocabulary": 50257}, "takes a vocabulary in multiples of 16, not 50257"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            OPERATION.choose("triton", Call(**{**defaults, **change}))
        assert OPERATION.choose("auto", Call(**{**defaults, **change})) == "xla"
    with pytest.raises(UnsupportedError, match="computes all logits at once"):
        OPERATION.choose("reference", Call(**defaults))


@pytest.mark.slow
@pytest.mark.parametrize("backend", [name for name, row in BACKENDS.items() if "cpu" in row.platforms])
def test_backends_for_all_platforms_agree(backend: str) -> None:
    rng = np.random.default_rng(1)
    hidden, head = jnp.asarray(rng.normal(size=(B, S, D))), jnp.asarray(rng.normal(size=(D, 17)))
    targets, weights = jnp.asarray(rng.integers(0, 17, (B, S))), jnp.asarray(rng.uniform(0, 1, (B, S)))

    def loss(head: jax.Array) -> jax.Array:
        return linear_cross_entropy.linear_cross_entropy(
            lambda hidden: hidden @ head, hidden, targets, weights, z_loss=0.0, chunk=0, backend=backend
        )[0]

    got, gradient = jax.value_and_grad(loss)(head)
    torch_head = torch.tensor(np.asarray(head), requires_grad=True)
    logits = (torch.tensor(np.asarray(hidden)) @ torch_head).flatten(0, 1)
    nll = torch.nn.functional.cross_entropy(
        logits, torch.tensor(np.asarray(targets)).long().flatten(), reduction="none"
    )
    expected = torch.sum(torch.tensor(np.asarray(weights)).flatten() * nll)
    expected.backward()
    np.testing.assert_allclose(got, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, torch_head.grad.numpy(), rtol=1e-4, atol=1e-5)


MESHES = {
    "tokens": {"batch": ("data", "fsdp"), "length": "tensor", "stream_length": "tensor"},
    "vocabulary": {"batch": ("data", "fsdp"), "vocab": "tensor"},
    "vocabulary_and_stream": {
        "batch": "fsdp",
        "length": "data",
        "stream_length": ("data", "tensor"),
        "vocab": "tensor",
    },
}


@pytest.mark.slow
@pytest.mark.default_cases("4-vocabulary-xla", "4-vocabulary_and_stream-triton")
@pytest.mark.parametrize("backend", ["triton", "xla"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("chunk", [0, 4])
def test_the_loss_over_a_mesh_equals_one_device(
    mesh: str, backend: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soft-capped logits with a z-loss, targets in every part of the vocabulary and outside; all gradients."""
    devices = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    place = Placement("cpu", devices, **MESHES[mesh])
    row, kernels = BACKENDS[backend], (triton.per_token, triton.statistics, triton.gradient)
    if backend == "triton":
        run, *halves = (partial(kernel, tile=TILE, interpret=True) for kernel in kernels)
        split_vocabulary = linear_cross_entropy.SplitVocabulary(*halves)
        row = dataclasses.replace(row, run=run, split_vocabulary=split_vocabulary, platforms=("cpu",))
        monkeypatch.setitem(BACKENDS, "triton", row)
    rng, V = np.random.default_rng(0), 256
    hidden, head = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((4, 8, D), (D, V)))
    targets = jnp.asarray(rng.integers(-1, V, (4, 8)), jnp.int32).at[0, 0].set(-1)
    weights = jnp.asarray(rng.uniform(0, 1, (4, 8)), jnp.float32)

    def value_and_grads(backend: str, place: Placement | None) -> tuple:
        def loss(hidden: jax.Array, head: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
            lm_head = LinearHead(
                lambda weights, hidden: 5 * jnp.tanh(hidden @ weights["kernel"] / 5),
                {"kernel": head},
                {"kernel": P(("fsdp", "data"), None if place is None else place.vocab)},
            )
            return linear_cross_entropy.linear_cross_entropy(
                lm_head, hidden, targets, weights, z_loss=0.1, chunk=chunk, backend=backend, place=place
            )

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(hidden, head, weights), jax.jit(loss)(
            hidden, head, weights
        )

    expected = jax.tree.leaves(value_and_grads("xla", None))
    for got, want in zip(jax.tree.leaves(value_and_grads(backend, place)), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)
