"""Mixture of block attention against a dense mask in NumPy: rows, documents, decoding, devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config.compose.composer import compose
from maxhydra.config.errors import ConfigError
from maxhydra.config.schema import model as config
from maxhydra.config.schema.hardware import Mesh
from maxhydra.layers import Context
from maxhydra.layers.moba import BlockSpec, visible_in_blocks
from tests.layers.test_latent_block import NARROW
from tests.support import mechanism_checks as checks

BLOCKS = config.Attention(moba=config.Moba(block_size=2, top_k=2))
MODEL = dataclasses.replace(NARROW, kinds={"layer": config.Kind(attention=BLOCKS)})


@pytest.mark.slow
def test_blocks_match_numpy_and_themselves_in_documents_decoding_and_on_a_mesh() -> None:
    checked = checks.check(MODEL)
    checks.assert_matches_reference(checked)
    checks.assert_decodes_alike(checked)
    checks.assert_shards_alike(checked, Mesh(fsdp=2, tensor=2))
    # The first seven tokens of both rows as two documents of one row.
    row = np.concatenate([checked.ids[0, :7], checked.ids[1, :7]])[None]
    tokens = {"positions": jnp.asarray(np.tile(np.arange(7), 2)[None])}
    tokens["segments"] = jnp.asarray(np.repeat([1, 2], 7)[None])
    ctx = Context(**tokens, sharder=checks.SINGLE, cache=None, dropout_key=None)
    hidden = np.asarray(jax.jit(checked.model.hidden)(checked.params, jnp.asarray(row), ctx)[0])[0]
    np.testing.assert_allclose(hidden[:7], checked.hidden[0, :7], atol=3e-5)
    np.testing.assert_allclose(hidden[7:], checked.hidden[1, :7], atol=3e-5)


def test_visible_keys_are_those_of_two_blocks() -> None:
    assert visible_in_blocks(BlockSpec(2, 2), 6) == (1 + 2 + 3 + 4 + 3 + 4) / 6


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["model.kinds.layer.attention.window=8"], "attention.window"),
        (["model.kinds.layer.attention.sinks=true"], "attention.sinks"),
        (["model.qk_clip=100"], "moba.block_size"),
        (["model.kernels.attention=splash"], "kernels.attention"),
        (["model.kinds.layer.attention.moba={block_size: null, top_k: 3}"], "moba.top_k"),
    ],
)
def test_unsupported_combinations_are_rejected(overrides: list[str], path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        compose(["model=tiny", "model.kinds.layer.attention.moba.block_size=4", *overrides])
