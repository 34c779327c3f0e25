"""Mixtures of experts: routing, dispatch and balance, against dense evaluation of every expert."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config.schema import model as config
from maxhydra.config.schema.hardware import Mesh
from maxhydra.kernels.grouped_matmul import BACKENDS, UnsupportedError, few_rows, grouped_matmul
from maxhydra.layers import with_aux_losses
from maxhydra.sharding import Sharder, build_mesh
from tests.support.mixtures import Mixture, expert, softmax_top_k
from tests.support.skips import import_optional

SIX = config.Moe(experts=6, top_k=2)


def densely(weights, x, shares):
    """Evaluate every expert on every token."""
    return sum(shares[..., index, None] * expert(weights, index, x) for index in range(shares.shape[-1]))


def gradients(function, weights, x):
    """Gradients of a fixed random projection of the output, by weights and tokens."""
    towards = np.random.default_rng(0).normal(size=x.shape)
    return jax.jit(jax.value_and_grad(lambda w, x: jnp.sum(function(w, x) * towards), (0, 1)))(weights, x)


def assert_close(found, expected, tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), found, expected)


@pytest.mark.parametrize("backend", [name for name, row in BACKENDS.items() if "cpu" in row.platforms])
def test_grouped_matmuls_equal_numpy(backend):
    random = np.random.default_rng(0)
    sizes = np.array([3, 0, 5, 2])
    x, w = random.normal(size=(10, 4)).astype(np.float32), random.normal(size=(4, 4, 3)).astype(np.float32)
    groups = np.repeat(np.arange(4), sizes)
    out, pull_back = jax.vjp(lambda x, w: grouped_matmul(x, w, jnp.asarray(sizes), backend=backend), x, w)
    np.testing.assert_allclose(out, np.stack([row @ w[g] for row, g in zip(x, groups, strict=True)]), rtol=1e-5)
    dx, dw = pull_back(jnp.ones_like(out))
    np.testing.assert_allclose(dx, w[groups].sum(-1), rtol=1e-5)
    by_hand = np.stack([np.repeat(x[groups == g].sum(0)[:, None], 3, axis=1) for g in range(4)])
    np.testing.assert_allclose(dw, by_hand, rtol=1e-5, atol=1e-6)


def test_unsupported_backend_is_an_error():
    with pytest.raises(UnsupportedError, match="takes float32 or bfloat16 or float16, not float64"), jax.enable_x64():
        grouped_matmul(jnp.ones((2, 2), "float64"), jnp.ones((1, 2, 2), "float64"), jnp.array([2]), backend="xla")


@pytest.mark.slow
def test_dropless_equals_dense_evaluation_of_the_selected_experts():
    mixture = Mixture(SIX)
    x = mixture.inputs(2, 9)
    found = gradients(lambda w, x: mixture(w, x).out_BTD, mixture.weights, x)
    dense = gradients(lambda w, x: densely(w, x, softmax_top_k(w, x, 2)), mixture.weights, x)
    assert_close(found, dense, 2e-5)


@pytest.mark.exhaustive
def test_clamped_experts_with_biases_equal_dense_evaluation():
    """Those of GPT-OSS: (clip(up) + 1) * min(gate) * sigmoid(slope * min(gate)), with a bias of every projection."""
    mixture = Mixture(config.Moe(experts=5, top_k=2, bias=True, clamp=0.5, clamp_slope=1.5))
    x = mixture.inputs(2, 9)

    def by_hand(weights, x):
        def project(name, index, x):
            return x @ weights["experts"][name]["kernel"][index] + weights["experts"][name]["bias"][index]

        def clamped(index):
            gate, up = jnp.minimum(project("gate", index, x), 0.5), jnp.clip(project("up", index, x), -0.5, 0.5)
            return project("down", index, (up + 1) * gate / (1 + jnp.exp(-1.5 * gate)))

        shares = softmax_top_k(weights, x, 2)
        return sum(shares[..., index, None] * clamped(index) for index in range(5))

    found = gradients(lambda w, x: mixture(w, x).out_BTD, mixture.weights, x)
    assert_close(found, gradients(by_hand, mixture.weights, x), 2e-5)


@pytest.mark.slow
def test_eps_is_added_to_the_sum_of_the_scores():
    """The softmax of all experts has a sum of 1, so that an eps of 1 halves the output."""
    plain, halved = (
        Mixture(config.Moe(experts=2, top_k=2, router=config.Router(**fields)))
        for fields in ({}, {"normalize_eps": 1.0})
    )
    x = plain.inputs(1, 3)
    found, expected = (mixture(plain.weights, x).out_BTD for mixture in (halved, plain))
    np.testing.assert_allclose(found, 0.5 * np.asarray(expected), rtol=1e-5)


@pytest.mark.slow
def test_capacity_drops_only_overflow_in_token_order():
    """Capacity six for twelve tokens: an expert drops its seventh and later tokens. Padding uses no capacity."""
    mixture = Mixture(config.Moe(experts=4, top_k=2, capacity_factor=1.0))
    x = mixture.inputs(2, 12)
    segments = np.ones((2, 12), np.int32)
    segments[1, :5] = 0
    chosen = np.array(softmax_top_k(mixture.weights, x, 2)) > 0
    before = np.cumsum(chosen & (segments[..., None] > 0), axis=1) - chosen
    routed = chosen & (before < 6) & (segments[..., None] > 0)
    assert 0 < np.sum(chosen[segments > 0]) - np.sum(routed) < np.sum(routed)

    def by_hand(weights, x):
        return densely(weights, x, jnp.where(routed, softmax_top_k(weights, x, 2), 0))

    found = gradients(lambda w, x: mixture(w, x, segments=jnp.asarray(segments)).out_BTD, mixture.weights, x)
    assert_close(found, gradients(by_hand, mixture.weights, x), 2e-5)


@pytest.mark.slow
def test_balance_loss_equals_its_formula():
    """Experts times the sum over them of share of choices and mean probability. The last third is padding."""
    mixture = Mixture(config.Moe(experts=6, top_k=2, balance_weight=1.0))
    x, real = mixture.inputs(2, 12), np.ones((2, 12), np.int32)
    real[:, 8:] = 0
    run = jax.jit(lambda weights, x: with_aux_losses(mixture(weights, x, segments=jnp.asarray(real)).aux)["loss"])
    chosen = np.asarray(softmax_top_k(mixture.weights, x, 2))[real > 0] > 0
    shares = np.asarray(jax.nn.softmax(x @ mixture.weights["router"]["kernel"]))[real > 0]
    expected = 6 * np.sum(chosen.mean(0) / 2 * shares.mean(0))
    np.testing.assert_allclose(run(mixture.weights, x), expected, rtol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parity
def test_balance_loss_equals_transformers():
    """transformers counts a token once per expert, we once: a factor of top_k. The last third is padding."""
    torch = import_optional("torch", extra="parity")
    expected = import_optional("transformers.models.mixtral.modeling_mixtral", extra="parity")
    mixture = Mixture(config.Moe(experts=6, top_k=2, balance_weight=1.0))
    x, real = mixture.inputs(2, 12), np.ones((2, 12), np.int64)
    real[:, 8:] = 0
    logits = torch.tensor(np.array(x @ mixture.weights["router"]["kernel"]).reshape(-1, 6))
    loss = expected.load_balancing_loss_func((logits,), 6, 2, torch.tensor(real)) / 2
    found = with_aux_losses(mixture(mixture.weights, x, segments=jnp.asarray(real)).aux)
    np.testing.assert_allclose(found["loss"], loss.item(), rtol=1e-5)
    assert found["load"].sum() == real.sum() * 2


FULL = {"experts": 8, "top_k": 3, "bias": True, "clamp": 2.0, "shared": config.Shared(dim=8, gate=config.Gate.sigmoid)}
PLAIN = {"experts": 8, "top_k": 3, "kind": config.MlpKind.plain, "activation": config.Activation.relu_squared}
SHARED = config.Shared(dim=8)
LATENT = {**PLAIN, "bias": True, "latent_dim": 64, "shared": SHARED}


@pytest.mark.slow
def test_plain_experts_on_a_projection_equal_dense_evaluation():
    """Each expert and the shared one are down(relu(up(x))^2); only the experts work on the projection."""
    mixture = Mixture(config.Moe(**PLAIN, latent_dim=5, shared=config.Shared(dim=8)))
    assert mixture.weights["experts"]["up"]["kernel"].shape == (8, 5, 12) and "gate" not in mixture.weights["experts"]
    x = mixture.inputs(2, 9)

    def plain(weights, x, *index):
        up, down = (weights[name]["kernel"][index] for name in ("up", "down"))
        return jnp.square(jnp.maximum(x @ up, 0)) @ down

    def by_hand(weights, x):
        latent, shares = x @ weights["latent_down"]["kernel"], softmax_top_k(weights, x, 3)
        routed = sum(shares[..., index, None] * plain(weights["experts"], latent, index) for index in range(8))
        return routed @ weights["latent_up"]["kernel"] + plain(weights["shared"], x)

    found = gradients(lambda w, x: mixture(w, x).out_BTD, mixture.weights, x)
    assert_close(found, gradients(by_hand, mixture.weights, x), 2e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("fields", [FULL, LATENT], ids=["gated", "plain"])
def test_kernels_of_few_tokens_equal_the_grouped_matmuls(fields, batch, monkeypatch):
    """The last of several tokens is padding."""
    mixture = Mixture(config.Moe(**fields), emb=64, hidden=128)
    x, is_real = mixture.inputs(batch, 1), jnp.arange(batch)[:, None] < max(batch - 1, 1)
    run = jax.jit(lambda weights, x: mixture(weights, x, segments=is_real.astype(int), cache=()).out_BTD)
    expected = run(mixture.weights, x)
    monkeypatch.setattr(few_rows, "is_supported", lambda *_: True)
    monkeypatch.setattr(few_rows, "apply_experts", partial(few_rows.apply_experts, interpret=True))
    jax.clear_caches()
    found = run(mixture.weights, x)
    assert "few_row_experts" in str(run.trace(mixture.weights, x).jaxpr)
    np.testing.assert_allclose(found[is_real], expected[is_real], rtol=1e-5, atol=1e-5)


SPLIT = [(None, {"expert": 2, "sequence": 2, "tensor": 2}), (1.0, {"fsdp": 2, "expert": 2, "tensor": 2})]


@pytest.mark.slow
@pytest.mark.parametrize(("capacity", "axes"), SPLIT, ids=["dropless", "capacity"])
@pytest.mark.default_cases("gated-capacity", "latent-dropless")
@pytest.mark.parametrize(
    "fields", [FULL, {**PLAIN, "shared": SHARED}, {**LATENT, "latent_dim": 8}], ids=["gated", "plain", "latent"]
)
def test_expert_parallelism_equals_one_device(fields, capacity, axes):
    mixture = Mixture(config.Moe(**fields, capacity_factor=capacity, balance_weight=0.1))
    x = mixture.inputs(8, 6)
    sharder = Sharder(build_mesh(Mesh(**axes), jax.devices()), Mesh().rules)

    def both(w, x, sharder=None):
        output = mixture(w, x, sharder=sharder)
        return output.out_BTD + with_aux_losses(output.aux)["loss"]

    found = gradients(lambda w, x: both(w, x, sharder), mixture.weights, x)
    assert_close(found, gradients(both, mixture.weights, x), 1e-5)
