"""LoRA adapters of experts, embedding and head against PEFT: outputs, gradients and files."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.quantization import Adapter, AdapterInit, AdapterKind
from maxhydra.convert.hf_write import find_family
from maxhydra.convert.load import load_adapter, load_weights
from maxhydra.convert.name_table import Join
from maxhydra.convert.peft import write_peft
from maxhydra.convert.peft_experts import ExpertStack
from maxhydra.layers import Context
from maxhydra.model import ModelDef, build, merge_adapter, merge_trees, split_trainable
from maxhydra.sharding import Sharder
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")
transformers = import_optional("transformers", extra="parity")
peft = import_optional("peft", extra="parity")
safetensors = import_optional("safetensors.numpy", extra="parity")

pytestmark = pytest.mark.parity

SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
QWEN = {"moe_intermediate_size": 12, "num_experts": 4}
TOKENS = np.random.default_rng(0).integers(0, 48, (2, 9))
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


def hf_model(family: str, **settings: Any) -> Any:
    config = {
        "qwen": transformers.Qwen3MoeConfig,
        "mixtral": transformers.MixtralConfig,
        "gpt_oss": transformers.GptOssConfig,
    }[family]
    torch.manual_seed(0)
    experts = QWEN if family == "qwen" else {"num_local_experts": 4}
    model = transformers.AutoModelForCausalLM.from_config(config(**SIZES, **experts, **settings)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(1.0 if weight.ndim == 1 else 0.0, 0.2)
    return model


def adapted_by_peft(model: Any, folder: Path, **settings: Any) -> Any:
    """A model with a random adapter in folder/adapter, over weights in folder/base."""
    model.save_pretrained(folder / "base")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=6, **settings))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_(0.0, 0.3)
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "base")
    adapted.save_pretrained(folder / "adapter", save_embedding_layers=False)
    return adapted


def our_model(folder: Path) -> Any:
    return compose(["model=from_hf", f"model.path={folder}", "model.dtypes.compute=float32"]).config.model


def logits_of(model: ModelDef, weights: Any) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    ctx = Context(positions=positions, segments=None, sharder=Sharder.single(), cache=None, dropout_key=None)
    hidden, _ = model.hidden(weights, jnp.asarray(TOKENS), ctx)
    return model.logits(weights, hidden, Sharder.single())


def peft_logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.float().numpy()


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return safetensors.load_file(folder / "adapter_model.safetensors")


def saved_tensors(folder: Path, model: ModelDef, trained: Any, base: Path) -> dict[str, np.ndarray]:
    folder.mkdir()
    write_peft(folder, model, jax.tree.map(np.asarray, trained), table=find_family(model.base, None), base=str(base))
    return tensors_of(folder)


def with_shared_a(gradient: Any) -> Any:
    """The gradient of an A that gate and up share: the sum of both."""
    for layers in gradient.get("pattern", {}).values():
        experts = layers.get("mlp", {}).get("experts", {})
        if "gate" in experts:
            whole = experts["gate"]["lora"]["a"] + experts["up"]["lora"]["a"]
            for name in ("gate", "up"):
                experts[name]["lora"]["a"] = whole
    return gradient


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "experts": ({}, EXPERTS),
    "embedding_and_head": ({"tie_word_embeddings": False}, {"target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    "tied": (
        {"tie_word_embeddings": True},
        {"target_modules": ["embed_tokens"], "ensure_weight_tying": True, "use_rslora": True},
    ),
}


@pytest.mark.slow
@pytest.mark.default_cases("experts")
@pytest.mark.parametrize("case", CASES)
def test_outputs_gradients_and_files_equal_those_of_peft(case: str, tmp_path: Path) -> None:
    options, settings = CASES[case]
    reference = adapted_by_peft(hf_model("qwen", **options), tmp_path, **settings)
    config = our_model(tmp_path / "base")
    adapter, trained = load_adapter("", str(tmp_path / "adapter"), build(config))
    model = build(config, adapter)
    assert jax.tree.map(jnp.shape, trained) == jax.tree.map(lambda x: x.shape, split_trainable(model.shapes)[0])
    base = load_weights(str(tmp_path / "base"), build(config), shardings=None, dtype="float32")

    def value(trained: Any) -> tuple[jax.Array, jax.Array]:
        logits = logits_of(model, merge_trees(trained, base))
        return jnp.sum(jnp.sin(logits)), logits

    (_, logits), gradient = jax.jit(jax.value_and_grad(value, has_aux=True))(jax.tree.map(jnp.asarray, trained))
    expected = reference(torch.from_numpy(TOKENS)).logits
    np.testing.assert_allclose(logits, expected.detach().numpy(), rtol=1e-4, atol=1e-5)
    merged = jax.jit(lambda trained: merge_adapter(model, merge_trees(trained, base), dtype=np.dtype(np.float32)))
    np.testing.assert_allclose(logits_of(model.base, merged(trained)), logits, rtol=1e-4, atol=1e-5)
    assert np.abs(logits - logits_of(model.base, base)).max() > 0.1

    torch.sin(expected).sum().backward()
    found = saved_tensors(tmp_path / "gradient", model, with_shared_a(gradient), tmp_path / "base")
    grads = {
        name.replace(".default", ""): weight.grad.numpy()
        for name, weight in reference.named_parameters()
        if weight.grad is not None
    }
    if case == "tied":
        head, stem = "base_model.model.lm_head.lora_{}.weight", "base_model.model.model.embed_tokens.lora_embedding_{}"
        for own, other in (("A", "B"), ("B", "A")):
            grads[stem.format(own)] = grads[stem.format(own)] + grads.pop(head.format(other)).T
            found.pop(head.format(other))
    assert found.keys() == grads.keys()
    for name, array in grads.items():
        # Sums over tokens, whose terms cancel.
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5 * np.abs(array).max(), err_msg=name)

    again = saved_tensors(tmp_path / "again", model, trained, tmp_path / "base")
    before = tensors_of(tmp_path / "adapter")
    assert again.keys() == before.keys()
    assert all(np.array_equal(again[name], before[name]) for name in before)
    loaded = peft.PeftModel.from_pretrained(hf_model("qwen", **options), tmp_path / "again")
    np.testing.assert_array_equal(peft_logits(loaded), expected.detach().numpy())


@pytest.mark.exhaustive
@pytest.mark.parametrize("init", [AdapterInit.normal, pytest.param(AdapterInit.pissa, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "family", ["qwen", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("mixtral", "gpt_oss"))]
)
def test_experts_that_we_train_load_in_peft(family: str, init: AdapterInit, tmp_path: Path) -> None:
    """Gate and up have different A: an adapter for each expert, or two blocks where transformers stores both in one."""
    hf_model(family).save_pretrained(tmp_path / "base")
    config = our_model(tmp_path / "base")
    sizes: dict[str, Any] = {"rank": 3, "alpha": 6.0, "dropout": 0.0, "init": init}
    adapter = Adapter(kind=AdapterKind.lora, targets=[], parameters=["experts/"], **sizes)
    model = build(config, adapter)
    random = np.random.default_rng(1)
    trained = jax.tree.map(
        lambda leaf: (0.3 * random.normal(size=leaf.shape)).astype(np.float32), split_trainable(model.shapes)[0]
    )
    base = load_weights(str(tmp_path / "base"), build(config), shardings=None, dtype="float32")
    logits = logits_of(model, merge_trees(trained, base))
    tensors = saved_tensors(tmp_path / "adapter", model, trained, tmp_path / "base")
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    is_stacked = family == "gpt_oss"
    assert ("rank_pattern" in settings) == is_stacked
    assert any("experts.3." in name for name in tensors) != is_stacked
    loaded = peft.PeftModel.from_pretrained(hf_model(family), tmp_path / "adapter")
    np.testing.assert_allclose(peft_logits(loaded), logits, rtol=1e-4, atol=1e-4)
    # PEFT writes the adapter with stacked experts in both cases.
    loaded.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    loaded.save_pretrained(tmp_path / "by_peft")
    for folder in ("adapter", "by_peft"):
        _, again = load_adapter("", str(tmp_path / folder), build(config))
        if init is AdapterInit.normal:
            jax.tree.map(np.testing.assert_array_equal, again, trained)
        merged = load_weights(str(tmp_path / folder), build(config), shardings=None, dtype="float32")
        np.testing.assert_allclose(logits_of(model.base, merged), logits, rtol=1e-4, atol=1e-4)


def test_square_experts_without_gates_are_distinguished_by_their_wrappers() -> None:
    """Both adapters have the same shapes; one alone may be that of either projection."""
    random = np.random.default_rng(0)
    arrays = {name: random.normal(size=(3, 6, 2)).astype(np.float32) for name in ("up", "down")}
    trained = {name: {"lora": {"a": a, "b": 2 * a.swapaxes(1, 2)}} for name, a in arrays.items()}
    stack = ExpertStack(("experts",), {"m": ()}, (3, 6, 6), ("up",), Join.parts, is_by_expert=True)

    def tensors(trained: Any) -> dict[str, np.ndarray]:
        return {
            f"{stem}.lora_{matrix}.weight": array
            for _, stem, *matrices in stack.write({"experts": trained}, in_blocks=False)
            for matrix, array in zip("AB", matrices, strict=True)
        }

    found, _ = stack.read(tensors(trained), 2, ValueError)
    jax.tree.map(np.testing.assert_array_equal, found, trained)
    with pytest.raises(ValueError, match="may be of either"):
        stack.read(tensors({"up": trained["up"]}), 2, ValueError)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ({"tie_word_embeddings": True}, {"target_modules": ["embed_tokens"]}, "ensure_weight_tying=False"),
        ({"tie_word_embeddings": False}, {"target_modules": ["lm_head"], "use_dora": True}, "DoRA of head"),
        ({}, {**EXPERTS, "rank_pattern": {"down_proj": 2}}, "rank_pattern="),
    ],
)
def test_unsupported_adapters_are_rejected(
    options: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    adapted_by_peft(hf_model("qwen", **options), tmp_path, **settings)
    with pytest.raises(ConfigError, match=message):
        load_adapter("", str(tmp_path / "adapter"), build(our_model(tmp_path / "base")))
