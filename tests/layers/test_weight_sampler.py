"""Initial values of weights against jax.random, weight by weight."""

from functools import reduce

import jax
import numpy as np
import pytest

from maxhydra.layers import weight_sampler
from maxhydra.layers.weight_sampler import Sizes, WeightSampler

SHAPES = {(1,): (3, 5), (2,): (7,), (3, 1): (2, 4, 3), (3, 1, 1): (11,), (3, 2): (40, 2)}
STD = 0.3


def sample(key: jax.Array | None, sizes: Sizes) -> dict[tuple[int, ...], jax.Array]:
    sampler = WeightSampler(key, sizes)
    return {path: sampler.normal(path, shape, std=STD) for path, shape in SHAPES.items()}


@pytest.mark.slow
@pytest.mark.default_cases("three together", "all together")
@pytest.mark.parametrize("max_values", [0, 64, 2**22], ids=["each alone", "three together", "all together"])
def test_values_are_those_of_jax_random(max_values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sampler, "MAX_VALUES", max_values)
    sizes: Sizes = {}
    assert not any(values.any() for values in sample(None, sizes).values())
    assert sizes == {path: int(np.prod(shape)) for path, shape in SHAPES.items()}
    key = jax.random.key(5)
    expected = jax.jit(
        lambda key: {
            path: STD * jax.random.normal(reduce(jax.random.fold_in, path, key), shape)
            for path, shape in SHAPES.items()
        }
    )(key)
    for sampled in (jax.jit(lambda key: sample(key, sizes))(key), sample(key, {})):
        for path, values in sampled.items():
            np.testing.assert_array_equal(values, expected[path])


def test_a_weight_that_only_uses_its_key_gets_the_folded_one() -> None:
    sizes, key = {**dict.fromkeys(SHAPES, 4), (4,): 0}, jax.random.key(5)
    found, expected = WeightSampler(key, sizes).key((4,)), jax.random.fold_in(key, 4)
    assert found is not None and (jax.random.key_data(found) == jax.random.key_data(expected)).all()
