"""Mixture of block attention: FLOPs and rejected settings. test_simple_mechanisms.py compares it with NumPy."""

import pytest

from maxhydra.config.compose.composer import compose
from maxhydra.config.errors import ConfigError
from maxhydra.layers.moba import BlockSpec, visible_in_blocks


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
