"""Averaged weights in a run: saved in the place of the weights, restored bit for bit, sharded like the weights."""

import jax
import numpy as np
import pytest

from maxhydra.convert.orbax_io import read_parameters
from maxhydra.optim.parameters import path_of
from maxhydra.train import next_token_loss
from maxhydra.train.checkpoint import open_checkpointer, restore
from maxhydra.train.evaluate import held_out_loss
from maxhydra.train.path_rules import path_rules
from maxhydra.train.step import make_step
from tests.support.states import plan
from tests.train.test_state import batch

KINDS = {"ema": ["optimizer.ema_decay=0.9"], "schedule_free": ["optimizer=schedule_free"]}


def assert_equal(a: object, b: object) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


@pytest.mark.slow
@pytest.mark.default_cases("ema")
@pytest.mark.parametrize("overrides", KINDS.values(), ids=KINDS)
def test_average_is_saved_as_the_weights_and_training_resumes_exactly(overrides, tmp_path):
    states, config = plan(*overrides, fsdp=2)
    loss = next_token_loss(states.model, states.sharder, config.train)
    step = jax.jit(make_step(loss, states.optimizer, config.train, cast=states.cast, layout=states.layout()))
    state = states.create(0)
    for seed in range(2):
        state, _ = step(state, batch(states, seed))
    saving = open_checkpointer(tmp_path, config.checkpoint)
    saving.save(2, state, {}, {})
    saving.close()
    weights = read_parameters("checkpoint.load_parameters", tmp_path / "2", states.abstract().params)
    assert_equal(weights, state.opt_state.average.params)
    kernels = [tree["pattern"]["0"]["mlp"]["up"]["kernel"] for tree in (weights, state.params)]
    assert not np.array_equal(*kernels)
    assert kernels[0].sharding.is_equivalent_to(kernels[1].sharding, kernels[0].ndim)
    restored = restore(tmp_path, config.checkpoint, states.abstract(), lambda position: None)
    assert restored is not None
    assert_equal(restored.state, state)
    assert_equal(step(restored.state, batch(states, 2)), step(state, batch(states, 2)))
    evaluate = held_out_loss(loss, lambda: iter([batch(states, 9)]), limit=1, parts=1)
    averaged = evaluate(state.exchange_average())["eval/loss"]
    expected = loss(state.opt_state.average.params, batch(states, 9), None)
    assert averaged == pytest.approx(float(expected["nll"] / expected["weight"]), rel=1e-5)
    assert averaged != evaluate(state)["eval/loss"]


def test_rates_fall_from_layer_to_layer():
    states, config = plan("optimizer.layer_decay=0.5", "model.num_layers=3")
    rates = dict(path_rules(config, states.model).rates_by_path)
    leaves = jax.tree_util.tree_leaves_with_path(states.model.shapes)
    stacked = {path_of(keys): leaf.shape for keys, leaf in leaves if path_of(keys).startswith("pattern/0")}
    for path, shape in stacked.items():
        assert rates[path].shape == (3, *[1] * (len(shape) - 1))
        np.testing.assert_array_equal(rates[path].ravel(), [0.25, 0.5, 1.0])
    assert rates["embedding/table"] == 0.125
    assert not [path for path in rates if path.startswith(("final_norm", "head"))]


@pytest.mark.slow
def test_rates_of_a_prefix_and_a_partial_repetition():
    kinds = "+model.kinds={a:${model.kinds.layer},b:${model.kinds.layer}}"
    layers = ["model.num_layers=6", "model.prefix=[a]", "model.pattern=[layer,b]"]
    states, config = plan(kinds, *layers, "optimizer.layer_decay=0.5")
    rates = path_rules(config, states.model).rates_by_path
    found = {
        path.rpartition("/mlp/up")[0]: rate.ravel().tolist()
        for path, rate in rates.items()
        if path.endswith("mlp/up/kernel")
    }
    layers = {group: [5 + np.log2(rate) for rate in ratios] for group, ratios in found.items()}
    assert layers == {"prefix/0": [0], "pattern/0": [1, 3], "pattern/1": [2, 4], "remainder/0": [5]}
