"""Manifold-constrained hyper-connections against the equations of the paper in NumPy."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config.compose.composer import compose
from maxhydra.config.errors import ConfigError
from maxhydra.config.schema import model as config
from maxhydra.config.schema.hardware import Mesh
from maxhydra.config.schema.residual import HyperConnections
from maxhydra.layers.hyper_connections import sinkhorn
from tests.layers.test_latent_block import NARROW
from tests.support import mechanism_checks as checks

STREAMS = dataclasses.replace(
    NARROW,
    kinds={"layer": config.Kind()},
    hyper_connections=HyperConnections(streams=3, sinkhorn_iterations=5),
)


@pytest.mark.slow
def test_streams_match_numpy_and_each_other_in_decoding_and_on_a_mesh() -> None:
    checked = checks.check(STREAMS)
    checks.assert_matches_reference(checked)
    checks.assert_decodes_alike(checked)
    checks.assert_shards_alike(checked, Mesh(fsdp=2, tensor=2))


def test_sinkhorn_gives_a_doubly_stochastic_matrix() -> None:
    matrix = sinkhorn(jnp.asarray(np.random.default_rng(0).normal(size=(5, 4, 4), scale=2)), 50)
    np.testing.assert_allclose(matrix.sum(axis=-1), 1, atol=1e-5)
    np.testing.assert_allclose(matrix.sum(axis=-2), 1, atol=1e-3)
    assert np.all(np.isfinite(sinkhorn(jnp.asarray([[200.0, -200.0], [0.0, 0.0]]), 20)))


@pytest.mark.parametrize("override", ["model.mtp.depth=1", "model.per_layer.dim=4", "model.kinds.layer.is_scaled=true"])
def test_unsupported_combinations_are_rejected(override: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.hyper_connections\.streams"):
        compose(["model=tiny", "model.hyper_connections.streams=2", override])
