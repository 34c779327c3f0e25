"""Models with images against transformers."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.model import Dtype, Dtypes
from maxhydra.convert import llama4_vision
from maxhydra.convert.hf import hf_source
from maxhydra.convert.hf_write import find_family, write_hf
from maxhydra.convert.streaming import FileArrays, single_device_shardings, stream_weights
from maxhydra.convert.tables.multimodal import TOWER
from maxhydra.data.image_tokens import insert_images, join_pixels, read_images
from maxhydra.layers import Context
from maxhydra.model import ModelDef, build
from maxhydra.sharding import Sharder
from tests.support.cached_decoding import cached_logits
from tests.support.pictures import picture
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")
transformers = import_optional("transformers", extra="parity")

pytestmark = [pytest.mark.parity, pytest.mark.slow]

SINGLE = Sharder.single()
BEGIN, END, PLACEHOLDER = 60, 61, 62
IMAGE = [BEGIN, *[PLACEHOLDER] * 9, END]
# Text before, between and behind images; a window of 5 tokens is shorter than an image.
TOKENS = np.array(
    [[1, 2, 3, *IMAGE, 5, 6, 7, 8, 9, *IMAGE, 4, 4, 3], [1, *IMAGE, 2, 3, 5, *IMAGE, 5, 6, 7, 8, 9, 10, 11]]
)
PIXELS = np.random.default_rng(0).normal(size=(2, 2, 24, 24, 3)).astype(np.float32)
TEXT = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 512,
}
VISION = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 24,
    "patch_size": 4,
}
EARLIER_KEYS = ("sliding_window_pattern", "rope_theta")
TOKEN_IDS = {"boi_token_index": BEGIN, "eoi_token_index": END, "image_token_index": PLACEHOLDER}
GEMMA3 = {
    "text_config": TEXT
    | {
        "num_hidden_layers": 3,
        "intermediate_size": 48,
        "sliding_window": 5,
        "query_pre_attn_scalar": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "vision_config": VISION | {"intermediate_size": 40, "vision_use_head": False},
    "mm_tokens_per_image": 9,
}
LLAMA4 = {
    "text_config": TEXT
    | {
        "num_hidden_layers": 4,
        "intermediate_size": 16,
        "intermediate_size_mlp": 40,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 17,
    },
    "vision_config": VISION
    | {
        "intermediate_size": 96,
        "projector_input_dim": 20,
        "projector_output_dim": 20,
        "vision_output_dim": 20,
        # Small, so that all coordinates matter.
        "rope_parameters": {"rope_type": "default", "rope_theta": 20.0},
    },
}


@dataclasses.dataclass(frozen=True)
class Reference:
    """A random model of transformers with images, in a folder."""

    model_type: str
    model_class: Any
    folder: Path
    tower: str
    """Prefix of the tensors of the image encoder."""


FAMILIES = {"gemma3": (GEMMA3, "Gemma3", TOWER), "llama4": (LLAMA4, "Llama4", llama4_vision.TOWER)}


def make_reference(family: str, folder: Path) -> Reference:
    """A random model with weights that are large enough for every mechanism to matter."""
    torch.manual_seed(0)
    settings, name, tower = FAMILIES[family]
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    model = model_class(getattr(transformers, f"{name}Config")(**settings, **TOKEN_IDS))
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            is_scale = "norm" in weight_name and weight_name.endswith("weight")
            weight.normal_(float(is_scale), 0.3 if weight.ndim > 1 else 0.1)
    model.save_pretrained(folder)
    return Reference(family, model_class, folder, tower)


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def folder(reference: Reference) -> Path:
    return reference.folder


def load(folder: Path, **changes: Any) -> tuple[ModelDef, Any]:
    source = hf_source("", str(folder), folder)
    config = dataclasses.replace(source.model, dtypes=Dtypes(compute=Dtype.float32), **changes)
    model = build(config)
    return model, stream_weights(source, model, shardings=single_device_shardings(model), dtype="float32")


def logits_of(model: ModelDef, params: Any, tokens: np.ndarray, images: np.ndarray | None) -> np.ndarray:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    batch = {"positions": positions, **({} if images is None else {"images": jnp.asarray(images)})}

    @jax.jit
    def run(params: Any, tokens: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
        ctx = Context.of_batch(batch, SINGLE, None)
        return model.logits(params, model.hidden(params, tokens, ctx)[0], SINGLE)

    return np.asarray(run(params, jnp.asarray(tokens), batch))


def expected_logits(
    reference: Reference, tokens: np.ndarray, images: np.ndarray | None, folder: Path | None = None
) -> np.ndarray:
    model = reference.model_class.from_pretrained(
        folder or reference.folder, dtype=torch.float32, attn_implementation="eager"
    )
    inputs = {"input_ids": torch.tensor(tokens)}
    if images is not None:
        pixels = images.reshape(-1, *images.shape[2:]).transpose(0, 3, 1, 2)
        inputs |= {"pixel_values": torch.tensor(pixels)}
    if images is not None and reference.model_type == "gemma3":
        inputs |= {"token_type_ids": torch.tensor(tokens == PLACEHOLDER).long()}
    with torch.no_grad():
        return model.eval()(**inputs).logits.numpy()


@pytest.mark.default_cases("gemma3")
def test_logits_with_images_equal_transformers(reference: Reference) -> None:
    logits = logits_of(*load(reference.folder), TOKENS, PIXELS)
    expected = expected_logits(reference, TOKENS, PIXELS)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert np.abs(expected).max() > 1


def test_logits_of_images_with_different_numbers_of_tiles_equal_transformers(tmp_path: Path) -> None:
    """A row of four squares and one of five, padded; the reference gets the squares of both without padding."""
    reference = make_reference("llama4", tmp_path)
    tiles = "model.vision.tiles={max_tiles: 4, column_id: 57, row_id: 58, whole_id: 59}"
    options = ["model=from_hf_vision", f"model.path={tmp_path}", "train.seq_len=64", tiles]
    vision = compose(options).config.model.vision
    rows, squares = [], []
    for height, width in ((61, 20), (40, 35)):
        images = read_images([np.asarray(picture(height, width))], vision)
        rows.append(insert_images(np.array([1, 2, PLACEHOLDER, 3, 4]), images, vision)[0])
        squares.append(join_pixels(images))
    assert [len(each) for each in squares] == [4, 5]
    tokens, pixels = np.zeros((2, 64), np.int64), np.zeros((2, 5, 24, 24, 3), np.float32)
    for row, (ids, each) in enumerate(zip(rows, squares, strict=True)):
        tokens[row, : len(ids)], pixels[row, : len(each)] = ids, each
    expected = expected_logits(reference, tokens, np.concatenate(squares)[None])
    np.testing.assert_allclose(logits_of(*load(tmp_path, vision=vision), tokens, pixels), expected, atol=1e-4)


@pytest.mark.default_cases("gemma3")
def test_the_text_decoder_alone_gives_the_logits_of_text(reference: Reference, folder: Path) -> None:
    source = hf_source("", str(folder), folder)
    vision = dataclasses.replace(source.model.vision, num_layers=None)
    model, params = load(folder, vision=vision)
    text = np.arange(40).reshape(2, 20)
    assert "vision" not in params
    expected = expected_logits(reference, text, None)
    np.testing.assert_allclose(logits_of(model, params, text, None), expected, atol=1e-4)


def test_export_is_bit_identical(reference: Reference, folder: Path, tmp_path: Path) -> None:
    source = hf_source("", str(folder), folder)
    model = build(source.model)
    table = find_family(model, None)
    write_hf(tmp_path, model, FileArrays(source, model), table=table, dtype=np.dtype("float32"), extra={})
    stored = {table.current_name(name): array for name, array in load_file(folder / "model.safetensors").items()}
    exported = load_file(tmp_path / "model.safetensors")
    assert table.model_type == reference.model_type and stored.keys() == exported.keys()
    assert any(name.startswith(reference.tower) for name in exported)
    for name, array in exported.items():
        np.testing.assert_array_equal(array, stored[name])
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path))
    for section in ("vision_config", "text_config"):
        # Keys of earlier versions of transformers are exported too.
        settings = {key: value for key, value in after[section].items() if key not in EARLIER_KEYS}
        assert {key: before[section].get(key) for key in settings} == settings
    exported_logits = expected_logits(reference, TOKENS, PIXELS, tmp_path)
    np.testing.assert_array_equal(exported_logits, expected_logits(reference, TOKENS, PIXELS))


@pytest.mark.exhaustive
def test_cached_decoding_equals_one_forward_pass(folder: Path) -> None:
    """Prefill takes the images, decode steps read the cache."""
    model, params = load(folder)
    cached = cached_logits(model, params, TOKENS, {"images": jnp.asarray(PIXELS)})
    np.testing.assert_allclose(cached, logits_of(model, params, TOKENS, PIXELS), atol=1e-4)
