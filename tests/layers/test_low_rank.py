"""LoRA of experts, embedding and head: meshes, the model without its adapter, and merged weights.

tests/convert/test_peft.py compares outputs and gradients with PEFT.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema import model as config
from maxhydra.config.schema.quantization import AdapterInit, AdapterKind
from maxhydra.model import ModelDef, build, fit_adapter, merge_adapter, merge_trees, split_trainable
from maxhydra.sharding import Sharder
from tests.model.test_lora import TOKENS, context, lora, model_config, noisy
from tests.support.cached_decoding import cached_logits
from tests.support.cli import SMALL
from tests.support.mesh_cases import Case, compare, initial_state, train

PARAMETERS = ["experts/", "embedding", "head"]
MODEL = [*SMALL, "model=qwen3-moe-tiny", "model.emb_dim=32", "model.num_heads=2", "model.num_kv_heads=2"]
MODEL += ["model.vocab_size=64", "model.dtypes.compute=float32", "optimizer.clip_norm=null", "train.steps=3"]
MODEL += ["adapter=lora", "adapter.parameters=[experts/,embedding,head]", "model.head=separate"]
TIED = ["model.head=tied", "adapter.parameters=[experts/,embedding]", "adapter.targets=[]"]
MESHES = {
    "expert_fsdp_tensor": ({"expert": 2, "fsdp": 2, "tensor": 2}, []),
    "expert": ({"expert": 8}, []),
    "tied": ({"expert": 2, "fsdp": 2, "tensor": 2}, TIED),
    "stage_expert": ({"stage": 2, "expert": 4}, []),
}


def mixture(**changes: Any) -> config.Model:
    kind = config.Kind(feed_forward=config.FeedForward.moe, moe=config.Moe(experts=4, top_k=2, **changes))
    return model_config(kinds={"layer": kind}, head=config.Head.separate)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MESHES)
def test_training_on_a_mesh_equals_one_device(name: str) -> None:
    """Losses of three steps and the first gradients, of factors that are not zero."""
    axes, overrides = MESHES[name]
    mesh = [f"mesh.{axis}={size}" for axis, size in {"fsdp": 1, **axes}.items()]
    sizes: dict[str, Any] = {"rows": 8, "length": 32, "steps": 3}
    one = Case([*MODEL, *overrides], devices=1, **sizes)
    state = initial_state(one)
    random = np.random.default_rng(0)
    noise = jax.tree.map(lambda leaf: (0.1 * random.normal(size=leaf.shape)).astype(leaf.dtype), state.params)
    state = dataclasses.replace(state, params=noise)
    found = train(Case([*MODEL, *overrides, *mesh], devices=8, **sizes), state)
    errors = compare(train(one, state), found)
    assert errors.loss_error < 1e-5 and errors.gradient_error < 1e-3, errors
    assert any("experts/gate/lora/a" in path for path in found.gradients)
    assert "embedding/lora/b" in found.gradients


def logits_of(model: ModelDef, params: Any, *, is_adapted: bool = True) -> np.ndarray:
    ctx = context(2, 7, is_adapted=is_adapted)
    hidden, _ = model.hidden(params, TOKENS, ctx)
    head = model.lm_head(params, Sharder.single(), is_adapted=is_adapted)
    return np.asarray(head(hidden))


@pytest.mark.exhaustive
@pytest.mark.parametrize("moe", [{}, {"capacity_factor": 1.0}], ids=["dropless", "capacity"])
def test_merged_weights_give_the_same_logits(moe: dict[str, Any]) -> None:
    model = build(mixture(**moe), lora(targets=["attention/"], parameters=PARAMETERS, init=AdapterInit.pissa))
    params = jax.jit(lambda key: fit_adapter(model, model.init(key)))(jax.random.key(0))
    frozen = split_trainable(params)[1]
    base = logits_of(model.base, frozen)
    np.testing.assert_allclose(logits_of(model, params), base, rtol=1e-4, atol=1e-5)
    noise = noisy(params)
    merged = jax.jit(lambda params: merge_adapter(model, params, dtype=np.dtype(np.float32)))(noise)
    np.testing.assert_allclose(logits_of(model.base, merged), logits_of(model, noise), rtol=1e-4, atol=1e-5)
    assert np.abs(logits_of(model, noise) - base).max() > 0.1
    np.testing.assert_array_equal(logits_of(model, noise, is_adapted=False), base)


@pytest.mark.slow
@pytest.mark.default_cases("Projection.joined")
@pytest.mark.parametrize("layout", config.Projection)
def test_decode_steps_use_the_adapter(layout: config.Projection) -> None:
    """Where kernels that read few experts, fuse the embedding with a norm or return the largest logit do not apply."""
    whole = mixture()
    whole = dataclasses.replace(whole, kernels=dataclasses.replace(whole.kernels, projection=layout))
    model, sharder = build(whole, lora(targets=[], parameters=PARAMETERS)), Sharder.single()
    params = noisy(jax.jit(model.init)(jax.random.key(0)))
    expected = logits_of(model, params)
    np.testing.assert_allclose(cached_logits(model, params, np.asarray(TOKENS), {}), expected, rtol=1e-4, atol=1e-5)
    hidden, _ = model.hidden(params, TOKENS, context(2, 7))
    largest, token = model.largest_logit(params, hidden[:, -1], sharder)
    np.testing.assert_array_equal(token, expected[:, -1].argmax(-1))
    np.testing.assert_allclose(largest, expected[:, -1].max(-1), rtol=1e-5)


@pytest.mark.slow
def test_experts_over_nf4_projections_keep_their_dtype() -> None:
    """QLoRA quantizes the projections; experts, embedding and head are adapted in their own dtype."""
    sizes = {"emb_dim": 64, "mlp_dim": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    whole = dataclasses.replace(mixture(), **sizes)
    model = build(whole, lora(kind=AdapterKind.qlora, targets=["attention/"], parameters=PARAMETERS))
    params = noisy(jax.jit(model.init)(jax.random.key(0)))
    assert isinstance(params["pattern"]["0"]["attention"]["query"]["kernel"], dict)
    assert params["pattern"]["0"]["mlp"]["experts"]["up"]["kernel"].dtype == jnp.float32
    merged = jax.jit(lambda params: merge_adapter(model, params, dtype=np.dtype(np.float32)))(params)
    np.testing.assert_allclose(logits_of(model.base, merged), logits_of(model, params), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_fresh_adapter_keeps_the_weights_of_its_base() -> None:
    model = build(mixture(), lora(targets=["attention/"], parameters=PARAMETERS))
    params, base = (jax.jit(each.init)(jax.random.key(3)) for each in (model, model.base))
    jax.tree.map(np.testing.assert_array_equal, split_trainable(params)[1], base)
    trained = split_trainable(params)[0]
    assert set(trained) == {"embedding", "head", "pattern"}
    assert set(trained["pattern"]["0"]["mlp"]["experts"]) == {"gate", "up", "down"}
    assert merge_trees(trained, base).keys() == params.keys()


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["adapter.dora=true"], "adapter.dora"),
        (["adapter.dropout=0.1"], "adapter.dropout"),
        (["adapter.parameters=['(']"], "adapter.parameters"),
        (["adapter=none"], "adapter.parameters"),
    ],
)
def test_settings_without_support_are_rejected(overrides: list[str], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["model=qwen3-moe-tiny", "adapter=lora", "adapter.parameters=[experts/]", *overrides])
    assert [problem.path for problem in caught.value.problems] == [path]


def test_a_name_that_matches_no_weight_is_rejected() -> None:
    tied = dataclasses.replace(mixture(), head=config.Head.tied)
    with pytest.raises(ConfigError, match=r"adapter\.parameters.*no weight's name matches 'head'") as caught:
        _ = build(tied, lora(targets=["attention/"], parameters=["head"])).shapes
    assert "layer/mlp/experts/gate" in (caught.value.problems[0].accepted or "")
    with pytest.raises(ConfigError, match="correct or remove it; the others match"):
        _ = build(tied, lora(targets=["attention/", "mlp/"])).shapes
