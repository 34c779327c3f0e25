"""Engram and hyper-connections against NumPy: hashes, gates, convolution, streams; documents, decoding, devices."""

import dataclasses

import pytest

from maxhydra.config.compose.composer import compose
from maxhydra.config.errors import ConfigError
from maxhydra.config.schema import model as config
from maxhydra.config.schema.hardware import Mesh
from maxhydra.config.schema.residual import Engram, HyperConnections
from maxhydra.layers.engram import distinct_primes
from tests.layers.test_latent_block import NARROW
from tests.support import mechanism_checks as checks

MEMORY = Engram(vocab_sizes=[20, 30], num_heads=2, head_dim=4, kernel_size=3, seed=1)
MODEL = dataclasses.replace(
    NARROW,
    kinds={"layer": config.Kind(engram=MEMORY)},
    hyper_connections=HyperConnections(streams=2, sinkhorn_iterations=3),
)


@pytest.mark.slow
def test_memory_matches_numpy_and_itself_in_documents_and_decoding() -> None:
    checked = checks.check(MODEL)
    checks.assert_matches_reference(checked)
    checks.assert_decodes_alike(checked)
    checks.assert_documents_do_not_meet(checked)


@pytest.mark.exhaustive
def test_memory_on_a_mesh_equals_one_device() -> None:
    checks.assert_shards_alike(checks.check(MODEL), Mesh(fsdp=2, tensor=2))


def test_heads_have_distinct_primes() -> None:
    assert distinct_primes([20, 22, 7], 3) == ((23, 29, 31), (37, 41, 43), (7, 11, 13))


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["model.mtp.depth=1"], "model.mtp.depth"),
        (["model.kinds.layer.latent_dim=16"], "engram.vocab_sizes"),
        (["model.kinds.layer.engram.vocab_sizes=[]", "model.kinds.layer.engram.seed=3"], "engram.seed"),
        (["task=serve", "task.engine.prefix_cache=true"], "prefix_cache"),
    ],
)
def test_unsupported_combinations_are_rejected(overrides: list[str], path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        compose(["model=tiny", "model.kinds.layer.engram.vocab_sizes=[50,50]", *overrides])
