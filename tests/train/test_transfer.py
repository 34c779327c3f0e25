"""model.transfer: initial values and learning rates by width and depth, against the tables of the papers."""

import jax
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.optim.parameters import path_of
from maxhydra.train.path_rules import path_rules
from tests.support.cli import SMALL
from tests.support.states import plan

WIDE = ["model.emb_dim=128", "model.mlp_dim=256", "model.num_heads=8", "model.num_kv_heads=4", "model.num_layers=6"]
TRANSFER = ["model.transfer.base_width=32", "model.transfer.base_layers=2"]
# Standard deviation of the initial values and learning rate relative to the base model of width 32 and 2 layers, at a
# width ratio of 4 and a depth ratio of 3 (Yang et al., 2022; Dey et al., 2025). The factor 1/3 of each
# residual branch is part of its last projection.
EXPECTED = {
    "embedding/table": (1, 1),
    "head/kernel": (1 / 4, 1 / 4),
    "pattern/0/attention/query/kernel": (1 / 2, 1 / 4),
    "pattern/0/attention/out/kernel": (1 / 2 / 3, 1 / 4 / 3),
    "pattern/0/mlp/up/kernel": (1 / 2, 1 / 4),
    "pattern/0/mlp/down/kernel": (1 / 2 / 3, 1 / 4 / 3),
}


def deviations(states):
    leaves = jax.tree_util.tree_leaves_with_path(states.create(0).params)
    return {path_of(keys): float(np.std(leaf)) for keys, leaf in leaves}


@pytest.mark.slow
def test_initial_values_and_rates_follow_the_tables():
    wide, config = plan(*WIDE, *TRANSFER)
    base, _ = plan()
    found, of_base, rules = deviations(wide), deviations(base), path_rules(config, wide.model)
    for path, (deviation, rate) in EXPECTED.items():
        assert found[path] / of_base[path] == pytest.approx(deviation, rel=0.08), path
        assert rules.rates_by_path.get(path, 1.0) == pytest.approx(rate), path
        assert rules.decays_by_path.get(path, 1.0) * rules.rates_by_path.get(path, 1.0) == pytest.approx(1), path
    assert not [path for path in rules.rates_by_path if "norm" in path]


@pytest.mark.slow
def test_the_base_model_is_unchanged():
    (same, config), (plain, _) = plan(*TRANSFER), plan()
    jax.tree.map(np.testing.assert_array_equal, same.create(0).params, plain.create(0).params)
    assert not path_rules(config, same.model).rates_by_path


@pytest.mark.parametrize(
    ("override", "path"),
    [("optimizer=muon", "optimizer.kind"), ("model.head=tied", "model.head"), ("adapter=lora", "adapter.kind")],
)
def test_models_without_known_rules_are_rejected(override, path):
    with pytest.raises(ConfigError) as error:
        compose([*SMALL, *TRANSFER, override])
    assert [problem.path for problem in error.value.problems] == [path]
