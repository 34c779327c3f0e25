"""LoRA adapters against their formula, and the frozen weights under them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.schema import model as config
from maxhydra.config.schema.quantization import Adapter, AdapterKind
from maxhydra.layers import Context
from maxhydra.model import build, merge_trees, split_trainable
from maxhydra.sharding import Sharder

SIZES = {"num_layers": 3, "emb_dim": 24, "mlp_dim": 40, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6}


def model_config(**changes: Any) -> config.Model:
    fields = {**SIZES, "vocab_size": 50, "context_length": 64, "kinds": {"layer": config.Kind()}}
    return config.Model(**{**fields, "dtypes": config.Dtypes(compute=config.Dtype.float32), **changes})


def lora(**changes: Any) -> Adapter:
    fields = {"kind": AdapterKind.lora, "rank": 3, "alpha": 6.0, "dropout": 0.0, "targets": ["attention/", "mlp/"]}
    return Adapter(**{**fields, **changes})


def context(batch: int, length: int, **changes: Any) -> Context:
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    fields = {"positions": positions, "segments": None, "sharder": Sharder.single(), "cache": None, "dropout_key": None}
    return Context(**{**fields, **changes})


def noisy(params: Any) -> Any:
    """The weights with a nonzero adapter."""
    trained, frozen = split_trainable(params)
    leaves, tree = jax.tree.flatten(trained)
    noise = [0.1 * jax.random.normal(jax.random.key(i), leaf.shape) for i, leaf in enumerate(leaves)]
    return merge_trees(jax.tree.unflatten(tree, noise), frozen)


def added(params: Any, scale: float) -> Any:
    """The base weights with the low-rank product added in NumPy."""

    def walk(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        if "lora" not in node:
            return {name: walk(below) for name, below in node.items()}
        kernel, a, b = (np.asarray(x, np.float64) for x in (node["kernel"], node["lora"]["a"], node["lora"]["b"]))
        layers = [np.tensordot(a[i], b[i], axes=1) for i in range(len(a))]
        return {"kernel": jnp.asarray(kernel + scale * np.stack(layers), jnp.float32)}

    return walk(params)


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 50, (2, 7)))


@pytest.mark.slow
@pytest.mark.parametrize("targets", [["attention/", "mlp/"], ["attention/(query|value)"], ["layer/mlp/down"]])
def test_adapter_equals_the_formula(targets: list[str]) -> None:
    model = build(model_config(), lora(targets=targets))
    params = noisy(model.init(jax.random.key(0)))
    hidden, _ = model.hidden(params, TOKENS, context(2, 7))
    expected, _ = model.base.hidden(added(params, 2.0), TOKENS, context(2, 7))
    np.testing.assert_allclose(hidden, expected, rtol=1e-4, atol=1e-5)
    assert np.abs(hidden - model.base.hidden(split_trainable(params)[1], TOKENS, context(2, 7))[0]).max() > 0.01


def test_fresh_adapter_changes_neither_outputs_nor_base_weights() -> None:
    plain, adapted = build(model_config()), build(model_config(), lora())
    base, params = plain.init(jax.random.key(1)), adapted.init(jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, split_trainable(params)[1], base)
    expected, _ = plain.hidden(base, TOKENS, context(2, 7))
    np.testing.assert_allclose(adapted.hidden(params, TOKENS, context(2, 7))[0], expected, rtol=1e-5, atol=1e-6)


def test_adapter_can_be_disabled() -> None:
    model = build(model_config(), lora())
    params = noisy(model.init(jax.random.key(0)))
    plain, _ = model.hidden(params, TOKENS, context(2, 7, is_adapted=False))
    expected, _ = model.base.hidden(split_trainable(params)[1], TOKENS, context(2, 7))
    np.testing.assert_array_equal(plain, expected)


@pytest.mark.slow
def test_dropout_applies_to_the_adapter_only() -> None:
    model = build(model_config(), lora(dropout=0.5))
    params = noisy(model.init(jax.random.key(0)))

    def hidden(**changes: Any) -> np.ndarray:
        return np.asarray(model.hidden(params, TOKENS, context(2, 7, **changes))[0])

    still, one, other = (hidden(), hidden(dropout_key=jax.random.key(1)), hidden(dropout_key=jax.random.key(2)))
    assert np.abs(one - still).max() > 1e-3 and np.abs(one - other).max() > 1e-3
    np.testing.assert_array_equal(one, hidden(dropout_key=jax.random.key(1)))
    silent = model.init(jax.random.key(0))
    off, _ = model.hidden(silent, TOKENS, context(2, 7, dropout_key=jax.random.key(1)))
    np.testing.assert_array_equal(off, model.hidden(silent, TOKENS, context(2, 7))[0])


def test_split_and_merge_are_inverse() -> None:
    model = build(model_config(), lora(targets=["mlp/up"]))
    trained, frozen = split_trainable(model.shapes)
    assert set(trained) == {"pattern"} and set(trained["pattern"]["0"]["mlp"]) == {"up"}
    assert merge_trees(trained, frozen) == model.shapes
    base = build(model_config()).shapes
    assert split_trainable(base) == (base, {})


def test_target_without_a_match_is_rejected() -> None:
    with pytest.raises(ConfigError) as caught:
        _ = build(model_config(), lora(targets=["attention/", "mpl/"])).shapes
    (problem,) = caught.value.problems
    assert problem.path == "adapter.targets" and "'mpl/'" in problem.reason and "layer/mlp/up" in problem.accepted
