"""Manifold-constrained hyper-connections: Sinkhorn and rejected settings. test_engram.py compares them with NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config.compose.composer import compose
from maxhydra.config.errors import ConfigError
from maxhydra.layers.hyper_connections import sinkhorn


def test_sinkhorn_gives_a_doubly_stochastic_matrix() -> None:
    matrix = sinkhorn(jnp.asarray(np.random.default_rng(0).normal(size=(5, 4, 4), scale=2)), 50)
    np.testing.assert_allclose(matrix.sum(axis=-1), 1, atol=1e-5)
    np.testing.assert_allclose(matrix.sum(axis=-2), 1, atol=1e-3)
    assert np.all(np.isfinite(sinkhorn(jnp.asarray([[200.0, -200.0], [0.0, 0.0]]), 20)))


@pytest.mark.parametrize("override", ["model.mtp.depth=1", "model.per_layer.dim=4", "model.kinds.layer.is_scaled=true"])
def test_unsupported_combinations_are_rejected(override: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.hyper_connections\.streams"):
        compose(["model=tiny", "model.hyper_connections.streams=2", override])
