"""Layers with one residual branch of another width (latent_dim), against a NumPy reference."""

import pytest

from maxhydra.config.compose.composer import compose
from maxhydra.config.errors import ConfigError
from maxhydra.config.schema import model as config
from maxhydra.config.schema.hardware import Mesh
from maxhydra.model import flops_per_token
from tests.support import mechanism_checks as checks

MOE = config.Moe(experts=4, top_k=2, dim=16)
NARROW = config.Model(
    num_layers=2,
    emb_dim=16,
    mlp_dim=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=32,
    context_length=64,
    pattern=["layer"],
    kinds={"layer": config.Kind(latent_dim=8, feed_forward=config.FeedForward.moe, moe=MOE)},
    dtypes=config.Dtypes(compute=config.Dtype.float32),
)


@pytest.mark.slow
def test_latent_layers_match_numpy_and_each_other_in_decoding_and_on_a_mesh() -> None:
    checked = checks.check(NARROW)
    checks.assert_matches_reference(checked)
    checks.assert_decodes_alike(checked)
    checks.assert_shards_alike(checked, Mesh(fsdp=2, tensor=2))


def test_flops_of_a_latent_layer_count_its_widths() -> None:
    weights = 16 * 8 * (4 + 2 * 2) + 4 * 8 * 8 + 8 * 4 + 2 * 3 * 8 * 16 + 8 * 16
    attention = 12 * 2 * 4 * 8 * 4.5
    assert flops_per_token(NARROW, 8) == 6 * (2 * weights + 16 * 32) + attention


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("model.kinds.layer.norms=sandwich", "model.kinds.layer.norms"),
        ("model.kinds.layer.mixer=delta", "model.kinds.layer.mixer"),
        ("model.mtp.depth=1", "model.mtp.depth"),
    ],
)
def test_unsupported_combinations_are_rejected(override: str, path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        compose(["model=tiny", "model.kinds.layer.latent_dim=16", override])
