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

from maxhydra.config.schema.model import Dtype, Dtypes
from maxhydra.convert.hf import hf_source
from maxhydra.convert.hf_write import find_family, write_hf
from maxhydra.convert.streaming import FileArrays, single_device_shardings, stream_weights
from maxhydra.convert.tables.multimodal import TOWER
from maxhydra.layers import Context, DenseCacheSpec
from maxhydra.model import ModelDef, build
from maxhydra.sharding import Sharder
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
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "sliding_window": 5,
    "query_pre_attn_scalar": 12,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 24,
    "patch_size": 4,
    "vision_use_head": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with weights that are large enough for every mechanism to matter."""
    torch.manual_seed(0)
    settings = transformers.Gemma3Config(
        text_config=TEXT,
        vision_config=VISION,
        mm_tokens_per_image=9,
        boi_token_index=BEGIN,
        eoi_token_index=END,
        image_token_index=PLACEHOLDER,
    )
    model = transformers.Gemma3ForConditionalGeneration(settings)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.3 if weight.ndim > 1 else 0.1)
    path = tmp_path_factory.mktemp("gemma3")
    model.save_pretrained(path)
    return path


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


def expected_logits(folder: Path, tokens: np.ndarray, images: np.ndarray | None) -> np.ndarray:
    model = transformers.Gemma3ForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    inputs = {"input_ids": torch.tensor(tokens)}
    if images is not None:
        pixels = images.reshape(-1, *images.shape[2:]).transpose(0, 3, 1, 2)
        inputs |= {"pixel_values": torch.tensor(pixels), "token_type_ids": torch.tensor(tokens == PLACEHOLDER).long()}
    with torch.no_grad():
        return model.eval()(**inputs).logits.numpy()


def test_logits_with_images_equal_transformers(folder: Path) -> None:
    logits = logits_of(*load(folder), TOKENS, PIXELS)
    expected = expected_logits(folder, TOKENS, PIXELS)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert np.abs(expected).max() > 1


def test_the_text_decoder_alone_gives_the_logits_of_text(folder: Path) -> None:
    source = hf_source("", str(folder), folder)
    vision = dataclasses.replace(source.model.vision, num_layers=None)
    model, params = load(folder, vision=vision)
    text = np.arange(40).reshape(2, 20)
    assert "vision" not in params
    np.testing.assert_allclose(logits_of(model, params, text, None), expected_logits(folder, text, None), atol=1e-4)


def test_export_is_bit_identical(folder: Path, tmp_path: Path) -> None:
    source = hf_source("", str(folder), folder)
    model = build(source.model)
    table = find_family(model, None)
    write_hf(tmp_path, model, FileArrays(source, model), table=table, dtype=np.dtype("float32"), extra={})
    stored = {table.current_name(name): array for name, array in load_file(folder / "model.safetensors").items()}
    exported = load_file(tmp_path / "model.safetensors")
    assert table.model_type == "gemma3" and stored.keys() == exported.keys()
    assert any(name.startswith(TOWER) for name in exported)
    for name, array in exported.items():
        np.testing.assert_array_equal(array, stored[name])
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path))
    for section in ("vision_config", "text_config"):
        assert {key: before[section].get(key) for key in after[section]} == after[section] | {
            key: before[section].get(key) for key in ("sliding_window_pattern",) if key in after[section]
        }
    np.testing.assert_array_equal(expected_logits(tmp_path, TOKENS, PIXELS), expected_logits(folder, TOKENS, PIXELS))


def test_cached_decoding_equals_one_forward_pass(folder: Path) -> None:
    """Prefill takes the images, decode steps read the cache."""
    model, params = load(folder)
    whole = logits_of(model, params, TOKENS, PIXELS)
    B, T = TOKENS.shape
    cache = model.empty_cache(DenseCacheSpec(B, T))
    prefill = T - 3
    outputs = []

    @jax.jit
    def step(params: Any, tokens: jax.Array, ctx: Context) -> tuple[jax.Array, Any]:
        hidden, cache = model.hidden(params, tokens, ctx)
        return model.logits(params, hidden, SINGLE), cache

    for start, stop in ((0, prefill), *((at, at + 1) for at in range(prefill, T))):
        positions = jnp.broadcast_to(jnp.arange(start, stop), (B, stop - start))
        ctx = Context(positions=positions, segments=None, sharder=SINGLE, cache=cache, dropout_key=None)
        if start == 0:
            ctx = dataclasses.replace(ctx, images=jnp.asarray(PIXELS), is_fresh=True)
        logits, cache = step(params, jnp.asarray(TOKENS[:, start:stop]), ctx)
        outputs.append(logits)
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), whole, atol=1e-4)
