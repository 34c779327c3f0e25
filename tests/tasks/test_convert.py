"""Weights for others: transformers and PEFT load what task=convert writes, and answer as we do."""

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
from maxhydra.config.schema.decode import Engine as EngineConfig
from maxhydra.config.schema.mesh import Mesh
from maxhydra.config.schema.run import Checkpoint
from maxhydra.config.serialize import to_yaml
from maxhydra.convert import hf_write
from maxhydra.convert.load import load_weights
from maxhydra.data.tokenizers.byte import ByteTokenizer
from maxhydra.decode.engine import Engine
from maxhydra.layers import Context
from maxhydra.model import ModelDef, build, merge_trees, split_trainable
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.tasks import Job, convert
from maxhydra.train import plan_states
from maxhydra.train.checkpoint import open_checkpointer
from tests.decode.test_engine import ask
from tests.support.cli import SMALL, finished
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
OURS = [
    "model.kinds.layer.attention.rope." + setting for setting in ("kind=llama3", "theta=500", "original_context=64")
]
OURS += [f"model.kinds.layer.attention.rope.{name}={value}" for name, value in STRETCH.items()]
ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "original_max_position_embeddings": 64, **STRETCH}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "llama": ({"rope_parameters": PLAIN, "tie_word_embeddings": False}, ["model.head=separate"]),
    "llama3.1": ({"rope_parameters": ROPE, "tie_word_embeddings": True}, ["model.head=tied", *OURS]),
    "mistral": (
        {"rope_parameters": PLAIN, "tie_word_embeddings": False, "sliding_window": 8},
        ["model.head=separate", "model.kinds.layer.attention.window=8"],
    ),
}
TOKENS = np.random.default_rng(0).integers(0, 300, (2, 24))


def their_model(case: str, folder: Path, dtype: Any = torch.float32) -> Any:
    """A random model of theirs, saved."""
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


def their_logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.float().numpy()


@pytest.mark.parametrize("case", CASES)
def test_a_folder_comes_back_bit_for_bit(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = {"llama": torch.bfloat16}.get(case, torch.float32)
    their_model(case, tmp_path / "in", dtype)
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
    theirs, again = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype) for folder in (tmp_path / "in", out)
    )
    assert type(again) is type(theirs)
    np.testing.assert_array_equal(their_logits(again), their_logits(theirs))
    prompt = torch.from_numpy(TOKENS)
    ours, expected = (one.generate(prompt, max_new_tokens=12, do_sample=False) for one in (again, theirs))
    assert torch.equal(ours, expected)


def load(file: Path) -> dict[str, Any]:
    return safetensors.load_file(file)


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trained an adapter around a Hugging Face folder, as one would leave it, with random values."""
    folder = tmp_path_factory.mktemp("peft")
    their_model("llama3.1", folder / "base")
    config = composed("llama3.1", folder / "base", "adapter=lora", "adapter.targets=[attention/,layer/mlp/down]")
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
    (run / "config.yaml").write_text(to_yaml(config))
    (run / "run.json").write_text(json.dumps({"folder": str(folder)}))
    return run


def our_logits(run: Path) -> np.ndarray:
    """With the adapter beside the weights, not merged."""
    config = composed("llama3.1", run.parent / "base", "adapter=lora", "adapter.targets=[attention/,layer/mlp/down]")
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


def test_peft_loads_an_adapter_and_answers_as_we_do(adapter_run: Path, tmp_path: Path) -> None:
    out = converted("llama3.1", adapter_run, tmp_path / "out", "task.format=peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(adapter_run.parent / "base")
    plain = their_logits(base)
    theirs = their_logits(peft.PeftModel.from_pretrained(base, out))
    np.testing.assert_allclose(theirs, our_logits(adapter_run), rtol=1e-4, atol=1e-4)
    assert np.abs(theirs - plain).max() > 0.1
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"].endswith("/base")


def test_an_adapter_that_peft_made_answers_as_there(tmp_path: Path) -> None:
    """Over two of three layers, in all kinds of projections; merged into the weights it was made around."""
    theirs = their_model("llama", tmp_path / "base")
    targets = ["q_proj", "o_proj", "down_proj"]
    settings = peft.LoraConfig(r=4, lora_alpha=12, target_modules=targets, layers_to_transform=[0, 2])
    adapted = peft.get_peft_model(theirs, settings)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_(0.0, 0.2)
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    model = build(composed("llama", tmp_path / "adapter").model)
    merged = load_weights(str(tmp_path / "adapter"), model, shardings=None, dtype="float32")
    np.testing.assert_allclose(logits_of(model, merged), their_logits(adapted), rtol=1e-4, atol=1e-4)
    odd = json.loads((tmp_path / "adapter/adapter_config.json").read_text()) | {"use_dora": True}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(odd))
    with pytest.raises(ConfigError, match="use_dora=True"):
        load_weights(str(tmp_path / "adapter"), model, shardings=None, dtype="float32")


@pytest.mark.parametrize("odd", [{"init_lora_weights": "olora"}, {"alora_invocation_tokens": [5, 6]}])
def test_an_adapter_of_peft_that_is_more_than_an_addition_is_refused(odd: dict[str, Any], tmp_path: Path) -> None:
    """What peft gives is not what its two matrices add to the weights, so we could not give it."""
    theirs = their_model("llama", tmp_path / "base")
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **odd))
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    model = build(composed("llama", tmp_path / "adapter").model)
    ((name, value),) = odd.items()
    with pytest.raises(ConfigError, match=re.escape(f"is an adapter with {name}={value}")):
        load_weights(str(tmp_path / "adapter"), model, shardings=None, dtype="float32")


def test_our_own_adapter_comes_back_from_peft(adapter_run: Path, tmp_path: Path) -> None:
    out = converted("llama3.1", adapter_run, tmp_path / "out", "task.format=peft")
    model = build(composed("llama3.1", out).model)
    ours, back = (load_weights(str(place), model, shardings=None, dtype="float32") for place in (adapter_run, out))
    jax.tree.map(np.testing.assert_array_equal, back, ours)


def test_a_checkpoint_of_ours_holds_the_same_weights(tmp_path: Path) -> None:
    their_model("mistral", tmp_path / "in", torch.bfloat16)
    out = converted("mistral", tmp_path / "in", tmp_path / "out", "task.format=maxhydra", "task.dtype=bfloat16")
    model = build(composed("mistral", out).model)
    mesh = build_mesh(Mesh(fsdp=4, tensor=2), jax.devices()[:8])
    shardings = Sharder(mesh, Mesh().rules).tree(model.axes)
    split_up = load_weights(str(out), model, shardings=shardings, dtype="bfloat16")
    whole = load_weights(str(tmp_path / "in"), model, shardings=None, dtype="bfloat16")
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), split_up, whole)


def test_an_exported_run_writes_the_same_text_there(tmp_path: Path) -> None:
    """Fifty greedy tokens of a trained model, by the engine here and by generate there."""
    finished(*SMALL, "model=llama3-tiny", "run.name=a", "train.steps=20", "optimizer.learning_rate=1e-2", cwd=tmp_path)
    run, out = tmp_path / "outputs/a", tmp_path / "out"
    given = [*SMALL, "model=llama3-tiny", "model.dtypes.compute=float32", f"checkpoint.load_parameters={run}"]
    config = compose([*given, "task=convert", f"task.output={out}"]).config
    convert.run(Job(config, {}, None, None))  # type: ignore[arg-type]
    model, sharder = build(config.model), Sharder(build_mesh(Mesh(), jax.devices()[:1]), Mesh().rules)
    params = load_weights(str(run), model, shardings=sharder.tree(model.axes), dtype="float32")
    prompt = tuple(b"ROMEO:")
    engine = Engine(
        model, params, ByteTokenizer(), EngineConfig(max_batch=1, cache_tokens=128), sharder=sharder, eos=()
    )
    try:
        ours = engine.submit(ask(prompt, max_tokens=50, ignore_eos=True)).result().tokens
    finally:
        engine.close()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    theirs.generation_config.eos_token_id = None
    wrote = theirs.generate(torch.tensor([prompt]), max_new_tokens=50, do_sample=False)
    assert list(ours) == wrote[0, len(prompt) :].tolist() and len(set(ours)) > 2


def test_a_merged_adapter_is_a_model_of_theirs(adapter_run: Path, tmp_path: Path) -> None:
    out = converted("llama3.1", adapter_run, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    np.testing.assert_allclose(their_logits(theirs), our_logits(adapter_run), rtol=1e-4, atol=1e-4)


def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    their_model("llama", tmp_path / "in")
    (tmp_path / "there").mkdir()
    for output, overrides, path in (
        ("there", [], "task.output"),
        ("out", ["task.format=peft"], "checkpoint.load_parameters"),
        ("out", ["model.logit_softcap=30"], "task.model_type"),
        ("out", ["task.model_type=gpt2"], "task.model_type"),
        ("out", ["model.emb_dim=32"], "model.emb_dim"),
    ):
        with pytest.raises(ConfigError) as caught:
            converted("llama", tmp_path / "in", tmp_path / output, *overrides)
        assert caught.value.problems[0].path == path
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in", "there"]
