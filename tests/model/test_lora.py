"""LoRA adapters against their formula, and the frozen weights under them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema import model as config
from maxhydra.config.schema.quantization import Adapter, AdapterInit, AdapterKind
from maxhydra.layers import Context
from maxhydra.model import (
    build,
    fit_adapter,
    merge_adapter,
    merge_trees,
    parameter_count,
    parameter_counts,
    split_trainable,
)
from maxhydra.sharding import Sharder
from maxhydra.train import plan_states

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
    random = np.random.default_rng(0)
    noise = [jnp.asarray(0.1 * random.normal(size=leaf.shape), jnp.float32) for leaf in leaves]
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
@pytest.mark.default_cases("targets0")
@pytest.mark.parametrize("targets", [["attention/", "mlp/"], ["attention/(query|value)"], ["layer/mlp/down"]])
def test_adapter_equals_the_formula(targets: list[str]) -> None:
    model = build(model_config(), lora(targets=targets))
    params = noisy(model.init(jax.random.key(0)))
    hidden, _ = model.hidden(params, TOKENS, context(2, 7))
    expected, _ = model.base.hidden(added(params, 2.0), TOKENS, context(2, 7))
    np.testing.assert_allclose(hidden, expected, rtol=1e-4, atol=1e-5)
    assert np.abs(hidden - model.base.hidden(split_trainable(params)[1], TOKENS, context(2, 7))[0]).max() > 0.01


@pytest.mark.slow
def test_fresh_adapter_changes_neither_outputs_nor_base_weights() -> None:
    plain, adapted = build(model_config()), build(model_config(), lora())
    base, params = plain.init(jax.random.key(1)), adapted.init(jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, split_trainable(params)[1], base)
    expected, _ = plain.hidden(base, TOKENS, context(2, 7))
    np.testing.assert_allclose(adapted.hidden(params, TOKENS, context(2, 7))[0], expected, rtol=1e-5, atol=1e-6)


VARIANTS = {"dora": True, "init": AdapterInit.pissa, "rank_stabilized": True}


@pytest.mark.slow
def test_a_fitted_adapter_starts_at_the_base_model() -> None:
    """DoRA's magnitudes are the column norms; PiSSA's a and b are the best approximation of rank 3, and both cancel."""
    model = build(model_config(), lora(**VARIANTS))
    params = jax.jit(lambda key: fit_adapter(model, model.init(key)))(jax.random.key(1))
    node = params["pattern"]["0"]["attention"]["query"]
    kernel, adapter = np.asarray(node["kernel"], np.float64), {name: np.asarray(x) for name, x in node["lora"].items()}
    np.testing.assert_allclose(adapter["magnitude"], np.sqrt((kernel**2).sum(1)), rtol=1e-5)
    u, values, v = np.linalg.svd(kernel[2].reshape(24, -1), full_matrices=False)
    scaled = 6 / np.sqrt(3) * np.tensordot(adapter["a"][2], adapter["b"][2], axes=1).reshape(24, -1)
    np.testing.assert_allclose(scaled, (u[:, :3] * values[:3]) @ v[:3], rtol=1e-4, atol=1e-5)
    expected, _ = model.base.hidden(split_trainable(params)[1], TOKENS, context(2, 7))
    np.testing.assert_allclose(model.hidden(params, TOKENS, context(2, 7))[0], expected, rtol=1e-4, atol=1e-5)
    trained = parameter_count(split_trainable(model.shapes)[0])
    assert parameter_counts(model)[1] < 0.6 * trained


@pytest.mark.slow
def test_variants_equal_their_formulas() -> None:
    """Outputs, and gradients of DoRA without those of its norms, against weights merged by the formulas."""
    model = build(model_config(num_layers=1), lora(**VARIANTS))
    params = noisy(jax.jit(model.init)(jax.random.key(0)))
    trained, frozen = split_trainable(params)

    def merged(trained: Any, frozen: Any) -> Any:
        if not isinstance(frozen, dict):
            return frozen
        if "lora" not in trained:
            return {name: merged(trained.get(name, {}), below) for name, below in frozen.items()}
        parts, kernel = {name: x[0] for name, x in trained["lora"].items()}, frozen["kernel"][0]
        start = jax.lax.stop_gradient(jnp.tensordot(parts["start_a"], parts["start_b"], axes=1))
        kernel += 6 / np.sqrt(3) * (jnp.tensordot(parts["a"], parts["b"], axes=1) - start)
        inputs = tuple(range(parts["a"].ndim - 1))
        norms = jax.lax.stop_gradient(jnp.sqrt(jnp.sum(kernel**2, axis=inputs, keepdims=True)))
        return {"kernel": (parts["magnitude"] * kernel / norms)[None]}

    def outputs(trained: Any) -> Any:
        return model.hidden(merge_trees(trained, frozen), TOKENS, context(2, 7))[0]

    def expected(trained: Any) -> Any:
        return model.base.hidden(merged(trained, frozen), TOKENS, context(2, 7))[0]

    (value, gradient), (expected_value, expected_gradient) = (
        jax.jit(jax.value_and_grad(lambda trained, f=f: jnp.sum(jnp.sin(f(trained)))))(trained)
        for f in (outputs, expected)
    )
    np.testing.assert_allclose(value, expected_value, rtol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), gradient, expected_gradient)
    whole = jax.jit(lambda params: merge_adapter(model, params, dtype=np.dtype(np.float32)))(params)
    by_hand = jax.jit(merged)(trained, frozen)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), whole, by_hand)


@pytest.mark.slow
def test_arrays_of_an_adapter_have_their_own_rates() -> None:
    """LoRA+ updates b faster; PiSSA's start does not change; DoRA's magnitudes are not decayed."""
    overrides = ["adapter=lora", "adapter.dora=true", "adapter.init=pissa", "optimizer=sgd", "optimizer.momentum=0"]
    overrides += ["optimizer.learning_rate=1", "optimizer/schedule=constant", "optimizer.clip_norm=null"]
    config = compose([*overrides, "adapter.b_rate_ratio=16", "optimizer.weight_decay=0.5"]).config
    states = plan_states(config, Sharder.single())
    ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), split_trainable(states.model.shapes)[0])
    transform = states.optimizer.transform
    updates, _ = transform.update(ones, transform.init(ones), ones)
    found = {name: float(x.ravel()[0]) for name, x in updates["pattern"]["0"]["attention"]["query"]["lora"].items()}
    relative = {name: value / found["magnitude"] for name, value in found.items()}
    assert relative == pytest.approx({"a": 1.5, "b": 24, "magnitude": 1, "start_a": 0, "start_b": 0})


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


def test_an_adapter_of_nothing_is_rejected() -> None:
    """Without any adapter all weights would be trained, and stored as an adapter."""
    with pytest.raises(ConfigError, match="selects nothing to adapt"):
        compose(["adapter=lora", "adapter.targets=[]"])
    assert compose(["adapter=lora", "adapter.targets=[]", "adapter.parameters=[embedding]"])
