"""Layers with one residual branch of another width (latent_dim): FLOPs and rejected settings.

test_simple_mechanisms.py compares them with NumPy.
"""

import pytest

from maxhydra.config.compose.composer import compose
from maxhydra.config.errors import ConfigError
from maxhydra.config.schema import model as config
from maxhydra.model import flops_per_token

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
