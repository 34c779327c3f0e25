"""GGUF files and compressed-tensors folders: other programs read them, and their logits are those of found_logits."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.cli import main
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.tasks.inference import ConvertFormat
from maxhydra.convert.gguf_write import write_gguf
from maxhydra.convert.hf_write import find_family
from maxhydra.convert.load import load_weights
from maxhydra.convert.streaming import InMemoryArrays
from maxhydra.data import load_tokenizer
from maxhydra.data.tokenizers.gguf import gguf_metadata
from maxhydra.layers import Context
from maxhydra.model import build
from maxhydra.sharding import Sharder
from tests.support.golden_models import tensors_of
from tests.support.skips import import_optional
from tests.support.vocabularies import MARKS, byte_level, save

torch = import_optional("torch", extra="parity")
transformers = import_optional("transformers", extra="parity")
gguf = import_optional("gguf", extra="gguf")

pytestmark = pytest.mark.parity

GOLDEN = Path(__file__).parents[1] / "parity" / "golden"
IDS = np.random.default_rng(0).integers(0, 64, (1, 40))


def convert(source: Path, output: Path, format: str) -> int:
    model = ["model=from_hf", f"model.path={source}"]
    return main.run(["task=convert", *model, f"task.output={output}", f"task.format={format}"])


def our_logits(source: Path, weights: Path) -> np.ndarray:
    """Logits of the weights in float32, with the config of the folder they were exported from."""
    config = compose(["task=decode", "model=from_hf", f"model.path={source}", "model.dtypes.compute=float32"]).config
    model = build(config.model)
    params = load_weights(str(weights), model, shardings=None, dtype="float32")
    positions = jnp.arange(IDS.shape[1])[None]
    context = Context(positions=positions, segments=None, sharder=Sharder.single(), cache=None, dropout_key=None)
    hidden, _ = model.hidden(params, jnp.asarray(IDS), context)
    return np.asarray(model.logits(params, hidden, Sharder.single()))


def their_logits(folder: Path, **options: object) -> np.ndarray:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    with torch.no_grad():
        return loaded(torch.tensor(IDS)).logits.numpy()


CASES = [("llama", "f16"), ("llama", "q4_0"), ("llama3.1", "q8_0"), ("qwen2", "q8_0"), ("qwen3", "q4_0")]


@pytest.mark.slow
@pytest.mark.default_cases("llama-q4_0", "qwen2-q8_0")
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_a_gguf_file_has_the_quantized_tensors_and_gives_the_logits_of_transformers(
    family: str, kind: str, tmp_path: Path
) -> None:
    source, file = GOLDEN / family, tmp_path / "out" / "model.gguf"
    assert convert(source, tmp_path / "out", f"gguf_{kind}") == 0
    reader = gguf.GGUFReader(file)
    architecture = json.loads((source / "config.json").read_text())["model_type"]
    assert reader.fields["general.architecture"].contents() == architecture
    stored = {tensor.name: tensor for tensor in reader.tensors}
    matrix_type = gguf.GGMLQuantizationType[kind.upper()]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], 8)
    for name, array in tensors_of(source / "model.safetensors").items():
        tensor = stored[names.get_name(name, (".weight", ".bias"))]
        if array.ndim == 2 and array.shape[-1] % 32 == 0:
            assert tensor.tensor_type == matrix_type, name
        if any(part in name for part in ("q_proj", "k_proj")) and architecture == "llama":
            continue  # reordered; covered by the logits
        exact = array.astype(np.float32)
        expected = gguf.quants.dequantize(gguf.quants.quantize(exact, tensor.tensor_type), tensor.tensor_type)
        found = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(array.shape)
        np.testing.assert_array_equal(found, expected.reshape(array.shape))
    found_logits = our_logits(source, file)
    # transformers ignores head sizes and RoPE factors of GGUF files, so its config comes from the source.
    config = transformers.AutoConfig.from_pretrained(source)
    expected_logits = their_logits(tmp_path / "out", gguf_file="model.gguf", config=config)
    np.testing.assert_allclose(found_logits, expected_logits, atol=2e-4)
    # Four bits change the logits of these random models by up to 2.3; the comparisons above check their values.
    limit = {"f16": 1e-2, "q8_0": 0.1, "q4_0": np.inf}[kind]
    assert np.abs(found_logits - our_logits(source, source)).max() < limit


@pytest.mark.slow
def test_a_gguf_file_contains_the_tokenizer(tmp_path: Path) -> None:
    """Our reader of GGUF tokenizers gives the same ids as tokenizer.json."""
    marks = MARKS["chatml"]
    folder = save(byte_level(marks), tmp_path / "tokenizer", eos_token=marks[1], chat_template="{{ messages }}")
    model = ["model=llama2-tiny", "model.vocab_size=640"]
    config = compose([*model, "data.tokenizer.kind=hf", f"data.tokenizer.path={folder}"]).config
    decoder, tokenizer = build(config.model), load_tokenizer(config.data)
    arrays = InMemoryArrays(jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), decoder.shapes))
    table = find_family(decoder, None, has_gguf=True)
    values = gguf_metadata(tokenizer, 640)
    write_gguf(tmp_path, decoder, arrays, table=table, format=ConvertFormat.gguf_f16, tokenizer=values)
    file = ["data.tokenizer.kind=gguf", f"data.tokenizer.path={tmp_path / 'model.gguf'}"]
    read = load_tokenizer(compose([*model, *file]).config.data)
    for text in ("Hello, world! 123 naïve 日本語", "a  b\n\nc", "user assistant"):
        assert read.encode(text) == tokenizer.encode(text)
    assert (read.eos, read.chat_template) == (tokenizer.eos, tokenizer.chat_template)
    assert read.special_token_ids == tokenizer.special_token_ids


@pytest.mark.slow
@pytest.mark.default_cases("llama-fp8")
@pytest.mark.parametrize(("family", "kind"), [("llama", "fp8"), ("qwen3", "int8")])
def test_transformers_loads_compressed_folders(family: str, kind: str, tmp_path: Path) -> None:
    import_optional("compressed_tensors", extra="parity")
    source, output = GOLDEN / family, tmp_path / "out"
    assert convert(source, output, f"hf_{kind}") == 0
    stored = stored_dtypes(output)
    assert sum(dtype == {"fp8": "F8_E4M3", "int8": "I8"}[kind] for dtype in stored.values()) == 7 * 3
    settings = transformers.CompressedTensorsConfig(run_compressed=False)
    found_logits, expected_logits = our_logits(source, output), their_logits(output, quantization_config=settings)
    np.testing.assert_allclose(found_logits, expected_logits, atol=2e-4)
    difference = np.abs(found_logits - our_logits(source, source)).max()
    assert 1e-4 < difference < {"fp8": 1.0, "int8": 0.3}[kind]


def stored_dtypes(folder: Path) -> dict[str, str]:
    """Name -> dtype of the tensors in model.safetensors."""
    content = (folder / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return {name: entry["dtype"] for name, entry in header.items() if name != "__metadata__"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "format", "reason"),
    [
        ("gemma3", "gguf_f16", "no supported GGUF model_type can represent this model"),
        ("mixtral", "hf_fp8", "is not supported for a mixture of experts"),
    ],
)
def test_unsupported_exports_are_rejected(
    family: str, format: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(GOLDEN / family, tmp_path / "out", format) == 2
    assert reason in capsys.readouterr().err and not (tmp_path / "out").exists()
