"""Mechanisms of single layers in one model against NumPy, and activations against jax.nn."""

import dataclasses

import jax
import numpy as np
import pytest

from maxhydra.config.compose.composer import compose
from maxhydra.config.errors import ConfigError
from maxhydra.config.schema import model as config
from maxhydra.config.schema.hardware import Mesh
from maxhydra.layers.mlp import ACTIVATIONS
from tests.layers.test_latent_block import NARROW
from tests.support import mechanism_checks as checks

SCALED = config.Attention(value_norm=True, value_norm_scale=True, rope=config.Rope(kind=config.RopeKind.none))
BLOCKS = config.Attention(moba=config.Moba(block_size=2, top_k=2))
RELU = config.Mlp(activation=config.Activation.relu, kind=config.MlpKind.plain)
KINDS = {
    "scaled": config.Kind(attention=SCALED, mlp=RELU),
    "blocks": config.Kind(attention=BLOCKS, mlp=config.Mlp(activation=config.Activation.relu_squared)),
    **NARROW.kinds,
}
SINUSOIDAL = config.Embedding(positions=config.Positions.sinusoidal)
MODEL = dataclasses.replace(NARROW, num_layers=3, pattern=list(KINDS), kinds=KINDS, embedding=SINUSOIDAL)


@pytest.mark.slow
def test_layers_match_numpy_and_themselves_in_documents_and_decoding() -> None:
    """Value norms with a scale, block attention, a latent branch with experts, activations, sinusoidal positions."""
    checked = checks.check(MODEL)
    checks.assert_matches_reference(checked)
    checks.assert_decodes_alike(checked)
    checks.assert_documents_do_not_meet(checked)


@pytest.mark.exhaustive
def test_layers_on_a_mesh_equal_one_device() -> None:
    checks.assert_shards_alike(checks.check(MODEL), Mesh(fsdp=2, tensor=2))


@pytest.mark.parametrize("name", ["relu", "sigmoid", "tanh", "identity"])
def test_activations_are_those_of_jax(name: str) -> None:
    x = np.linspace(-3, 3, 7, dtype=np.float32)
    activation = ACTIVATIONS[config.Activation["linear" if name == "identity" else name]]
    expected = getattr(jax.nn, name)
    np.testing.assert_allclose(activation(x), expected(x), atol=1e-6)
    np.testing.assert_allclose(
        jax.vmap(jax.grad(activation))(x), jax.vmap(jax.grad(lambda x: expected(x) * 1.0))(x), atol=1e-6
    )


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["model.kinds.layer.attention.value_norm_scale=true"], "value_norm_scale"),
        (["model.embedding.positions=sinusoidal", "model.emb_dim=33"], "model.emb_dim"),
    ],
)
def test_settings_without_effect_are_rejected(overrides: list[str], path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        compose(["model=tiny", *overrides])
