"""task=convert: transformers and PEFT load the exported weights and give the same outputs."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import Config, ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.checkpoint import Checkpoint
from maxhydra.config.schema.decode import Engine as EngineConfig
from maxhydra.config.schema.hardware import Mesh
from maxhydra.config.serialize import from_yaml, to_yaml
from maxhydra.convert import hf_write
from maxhydra.convert.load import load_weights
from maxhydra.data.tokenizers.byte import ByteTokenizer
from maxhydra.decode.engine import Engine
from maxhydra.layers import Context
from maxhydra.model import ModelDef, build, merge_trees, split_trainable
from maxhydra.record import RunDirectory
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.tasks import Job, convert
from maxhydra.train import plan_states
from maxhydra.train.checkpoint import open_checkpointer
from tests.decode.test_engine import make_request
from tests.support.cli import SMALL, run_ok
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")
transformers = import_optional("transformers", extra="parity")
peft = import_optional("peft", extra="parity")
safetensors = import_optional("safetensors.torch", extra="parity")

pytestmark = pytest.mark.parity

SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
MODEL = [
    *("model=llama2-tiny", "model.num_layers=3", "model.emb_dim=64", "model.mlp_dim=128", "model.num_heads=4"),
    *("model.num_kv_heads=2", "model.head_dim=16", "model.vocab_size=300", "model.context_length=128"),
    *("train.seq_len=32", "model.dtypes.compute=float32"),
]
STRETCH = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE_OVERRIDES = [
    "model.kinds.layer.attention.rope." + setting for setting in ("kind=llama3", "theta=500", "original_context=64")
]
ROPE_OVERRIDES += [f"model.kinds.layer.attention.rope.{name}={value}" for name, value in STRETCH.items()]
ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "original_max_position_embeddings": 64, **STRETCH}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "llama": ({"rope_parameters": PLAIN, "tie_word_embeddings": False}, ["model.head=separate"]),
    "llama3.1": ({"rope_parameters": ROPE, "tie_word_embeddings": True}, ["model.head=tied", *ROPE_OVERRIDES]),
    "mistral": (
        {"rope_parameters": PLAIN, "tie_word_embeddings": False, "sliding_window": 8},
        ["model.head=separate", "model.kinds.layer.attention.window=8"],
    ),
}
TOKENS = np.random.default_rng(0).integers(0, 300, (2, 24))


def save_hf_model(case: str, folder: Path, dtype: Any = torch.float32) -> Any:
    """Save a random transformers model."""
    family = transformers.MistralConfig if case == "mistral" else transformers.LlamaConfig
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(family(**SIZES, **CASES[case][0]))
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(1.0 if weight.ndim == 1 else 0.0, 0.2)
    model = model.to(dtype).eval()
    model.save_pretrained(folder)
    return model


def composed(case: str, source: Path, *overrides: str) -> Config:
    return compose([*MODEL, *CASES[case][1], f"checkpoint.load_parameters={source}", *overrides]).config


def converted(case: str, source: Path, output: Path, *overrides: str) -> Path:
    config = composed(case, source, "task=convert", f"task.output={output}", *overrides)
    job: Any = Job(config, {}, None, None)  # type: ignore[arg-type]
    convert.run(job)
    assert not output.with_name(output.name + ".partial").exists()
    return output


def hf_logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.float().numpy()


@pytest.mark.slow
@pytest.mark.default_cases("llama")
@pytest.mark.parametrize("case", CASES)
def test_hf_round_trip_is_bit_exact(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = {"llama": torch.bfloat16}.get(case, torch.float32)
    save_hf_model(case, tmp_path / "in", dtype)
    (tmp_path / "in/tokenizer.json").write_text("{}")
    overrides = ["task.dtype=bfloat16"] if case == "llama" else []
    if case == "mistral":
        monkeypatch.setattr(hf_write, "MAX_SHARD_BYTES", 100_000)
    out = converted(case, tmp_path / "in", tmp_path / "out", *overrides)
    before, after = (
        {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load(file).items()}
        for folder in (tmp_path / "in", out)
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == dtype for name in before)
    assert (len(list(out.glob("*.safetensors"))) > 1) == (case == "mistral")
    assert (out / "tokenizer.json").read_text() == "{}"
    original, exported = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype) for folder in (tmp_path / "in", out)
    )
    assert type(exported) is type(original)
    np.testing.assert_array_equal(hf_logits(exported), hf_logits(original))
    prompt = torch.from_numpy(TOKENS)
    actual, expected = (m.generate(prompt, max_new_tokens=12, do_sample=False) for m in (exported, original))
    assert torch.equal(actual, expected)


def load(file: Path) -> dict[str, Any]:
    return safetensors.load_file(file)


ADAPTER = ["adapter=lora", "adapter.targets=[attention/,layer/mlp/down]"]
VARIANTS = ["adapter.dora=true", "adapter.rank_stabilized=true", "adapter.init=pissa"]


@pytest.fixture(
    scope="module",
    params=[ADAPTER, pytest.param([*ADAPTER, *VARIANTS], marks=pytest.mark.exhaustive)],
    ids=["lora", "variants"],
)
def adapter_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that trained an adapter on a Hugging Face folder, with random values."""
    folder = tmp_path_factory.mktemp("peft")
    save_hf_model("llama3.1", folder / "base")
    config = composed("llama3.1", folder / "base", *request.param)
    states = plan_states(config, Sharder(build_mesh(config.mesh, jax.devices()[:1]), config.mesh.rules))
    state = states.create(0)
    leaves, tree = jax.tree.flatten(state.params)
    noise = [0.1 * jax.random.normal(jax.random.key(i), leaf.shape) for i, leaf in enumerate(leaves)]
    params = jax.tree.unflatten(tree, noise)
    run = folder / "run"
    (run / "checkpoints").mkdir(parents=True)
    saver = open_checkpointer(run / "checkpoints", Checkpoint())
    saver.save(1, type(state)(**{**vars(state), "params": params}), {}, {})
    saver.close()
    record = RunDirectory(run)
    with record.session(to_yaml(config), {"folder": str(folder)}):
        record.finish("finished", None)
    return run


def our_logits(run: Path) -> np.ndarray:
    """Logits with the adapter not merged."""
    config = from_yaml((run / "config.yaml").read_text(), "config.yaml")
    model = build(config.model, config.adapter)
    base = load_weights(str(run.parent / "base"), model, shardings=None, dtype="float32")
    trained = convert.read_adapter("", str(run), model)
    assert jax.tree.structure(trained) == jax.tree.structure(split_trainable(model.shapes)[0])
    return logits_of(model, merge_trees(trained, base))


def logits_of(model: ModelDef, weights: Any) -> np.ndarray:
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    ctx = Context(positions=positions, segments=None, sharder=Sharder.single(), cache=None, dropout_key=None)
    hidden, _ = model.hidden(weights, jnp.asarray(TOKENS), ctx)
    return np.asarray(model.logits(weights, hidden, Sharder.single()))


@pytest.mark.slow
def test_peft_loads_an_exported_adapter_with_the_same_logits(adapter_run: Path, tmp_path: Path) -> None:
    out = converted("llama3.1", adapter_run, tmp_path / "out", "task.format=peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(adapter_run.parent / "base")
    plain = hf_logits(base)
    adapted = hf_logits(peft.PeftModel.from_pretrained(base, out))
    np.testing.assert_allclose(adapted, our_logits(adapter_run), rtol=1e-4, atol=1e-4)
    assert np.abs(adapted - plain).max() > 0.1
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"].endswith("/base")


@pytest.mark.slow
@pytest.mark.default_cases("dora")
@pytest.mark.parametrize(
    "variant", [{"layers_to_transform": [0, 2]}, {"use_dora": True, "use_rslora": True}], ids=["lora", "dora"]
)
def test_an_adapter_of_peft_loads_with_the_same_logits(variant: dict[str, Any], tmp_path: Path) -> None:
    """On two of three layers, or with DoRA and rsLoRA, for several projections; merged into its base weights."""
    hf_model = save_hf_model("llama", tmp_path / "base")
    targets = ["q_proj", "o_proj", "down_proj"]
    settings = peft.LoraConfig(r=4, lora_alpha=12, target_modules=targets, **variant)
    adapted = peft.get_peft_model(hf_model, settings)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_(0.0, 0.2)
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    model = build(composed("llama", tmp_path / "adapter").model)
    merged = load_weights(str(tmp_path / "adapter"), model, shardings=None, dtype="float32")
    np.testing.assert_allclose(logits_of(model, merged), hf_logits(adapted), rtol=1e-4, atol=1e-4)
    odd = json.loads((tmp_path / "adapter/adapter_config.json").read_text()) | {"fan_in_fan_out": True}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(odd))
    with pytest.raises(ConfigError, match="fan_in_fan_out=True"):
        load_weights(str(tmp_path / "adapter"), model, shardings=None, dtype="float32")


@pytest.mark.parametrize("odd", [{"init_lora_weights": "olora"}, {"alora_invocation_tokens": [5, 6]}])
def test_an_adapter_of_peft_that_is_not_plain_lora_is_rejected(odd: dict[str, Any], tmp_path: Path) -> None:
    """PEFT's result is then not the base weights plus B A, so it cannot be reproduced."""
    hf_model = save_hf_model("llama", tmp_path / "base")
    adapted = peft.get_peft_model(
        hf_model, peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **odd)
    )
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    model = build(composed("llama", tmp_path / "adapter").model)
    ((name, value),) = odd.items()
    with pytest.raises(ConfigError, match=re.escape(f"is a PEFT adapter with {name}={value}")):
        load_weights(str(tmp_path / "adapter"), model, shardings=None, dtype="float32")


@pytest.mark.exhaustive
def test_an_adapter_round_trips_through_peft(adapter_run: Path, tmp_path: Path) -> None:
    out = converted("llama3.1", adapter_run, tmp_path / "out", "task.format=peft")
    model = build(composed("llama3.1", out).model)
    original, exported = (load_weights(str(p), model, shardings=None, dtype="float32") for p in (adapter_run, out))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), exported, original)


@pytest.mark.slow
def test_a_maxhydra_checkpoint_has_the_same_weights(tmp_path: Path) -> None:
    save_hf_model("mistral", tmp_path / "in", torch.bfloat16)
    out = converted("mistral", tmp_path / "in", tmp_path / "out", "task.format=maxhydra", "task.dtype=bfloat16")
    model = build(composed("mistral", out).model)
    mesh = build_mesh(Mesh(fsdp=4, tensor=2), jax.devices()[:8])
    shardings = Sharder(mesh, Mesh().rules).tree(model.axes)
    sharded = load_weights(str(out), model, shardings=shardings, dtype="bfloat16")
    whole = load_weights(str(tmp_path / "in"), model, shardings=None, dtype="bfloat16")
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), sharded, whole)


@pytest.mark.exhaustive
def test_an_exported_run_generates_the_same_text_in_transformers(tmp_path: Path) -> None:
    """Fifty greedy tokens of a trained model, from our engine and from transformers' generate."""
    run_ok(*SMALL, "model=llama3-tiny", "run.name=a", "train.steps=20", "optimizer.learning_rate=1e-2", cwd=tmp_path)
    run, out = tmp_path / "outputs/a", tmp_path / "out"
    overrides = [*SMALL[:6], "model=llama3-tiny", "model.dtypes.compute=float32", f"checkpoint.load_parameters={run}"]
    config = compose([*overrides, "task=convert", f"task.output={out}"]).config
    convert.run(Job(config, {}, None, None))  # type: ignore[arg-type]
    model, sharder = build(config.model), Sharder(build_mesh(Mesh(), jax.devices()[:1]), Mesh().rules)
    params = load_weights(str(run), model, shardings=sharder.tree(model.axes), dtype="float32")
    prompt = tuple(b"ROMEO:")
    engine = Engine(
        model, params, ByteTokenizer(), EngineConfig(max_batch=1, cache_tokens=128), sharder=sharder, eos=()
    )
    try:
        tokens = engine.submit(make_request(prompt, max_tokens=50, ignore_eos=True)).result().tokens
    finally:
        engine.close()
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    hf_model.generation_config.eos_token_id = None
    expected = hf_model.generate(torch.tensor([prompt]), max_new_tokens=50, do_sample=False)
    assert list(tokens) == expected[0, len(prompt) :].tolist() and len(set(tokens)) > 2


@pytest.mark.exhaustive
def test_a_merged_adapter_loads_in_transformers(adapter_run: Path, tmp_path: Path) -> None:
    out = converted("llama3.1", adapter_run, tmp_path / "out")
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(out)
    np.testing.assert_allclose(hf_logits(hf_model), our_logits(adapter_run), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_an_impossible_export_is_rejected_and_leaves_no_output(tmp_path: Path) -> None:
    save_hf_model("llama", tmp_path / "in")
    (tmp_path / "existing").mkdir()
    for output, overrides, path in (
        ("existing", [], "task.output"),
        ("out", ["task.format=peft"], "checkpoint.load_parameters"),
        ("out", ["model.logit_softcap=30"], "task.model_type"),
        ("out", ["task.model_type=gpt2"], "task.model_type"),
        ("out", ["model.emb_dim=32"], "model.emb_dim"),
    ):
        with pytest.raises(ConfigError) as caught:
            converted("llama", tmp_path / "in", tmp_path / output, *overrides)
        assert caught.value.problems[0].path == path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["existing", "in"]
