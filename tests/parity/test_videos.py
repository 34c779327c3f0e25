"""Videos of Qwen3-VL against the processor and the model of transformers: from frames in a file to logits."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.model import Dtype, Dtypes
from maxhydra.config.schema.vision import Videos
from maxhydra.convert.hf import hf_source
from maxhydra.convert.streaming import single_device_shardings, stream_weights
from maxhydra.data.image_tokens import MARKER, ImageTokenizer, insert_images, join_pixels
from maxhydra.data.tokenizers import load_tokenizer
from maxhydra.data.video_tokens import read_media
from maxhydra.layers import Context
from maxhydra.model import build
from maxhydra.sharding import Sharder
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")
transformers = import_optional("transformers", extra="parity")

pytestmark = [pytest.mark.parity, pytest.mark.slow]

# Written by videos/make.py.
PROCESSED = Path(__file__).parent / "videos" / "processor.npz"
SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
VOCABULARY = {token: id for id, token in enumerate([*"abc<>. 0123456789secondf", *SPECIAL])}
FPS, BUDGET = 4.0, {"shortest_edge": 256, "longest_edge": 1536}
SIZES = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
# Frames of a whole number of tokens, which are not resized: torchvision and Pillow resample differently.
FRAMES = np.random.default_rng(0).integers(0, 256, (9, 16, 24, 3), np.uint8)
PICTURE = np.random.default_rng(1).integers(0, 256, (16, 16, 3), np.uint8)
TEXT = "a{video}b{image}c"
SETTINGS = {
    "text_config": {
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 64,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 2, 2]},
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_heads": 3,
        "patch_size": 4,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0],
        "out_hidden_size": 32,
    },
    **dict(
        zip(
            ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"),
            (VOCABULARY[name] for name in SPECIAL),
            strict=True,
        )
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with its tokenizer."""
    path = tmp_path_factory.mktemp("videos")
    torch.manual_seed(0)
    model = transformers.Qwen3VLForConditionalGeneration(transformers.Qwen3VLConfig(**SETTINGS))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(float("norm" in name and name.endswith("weight")), 0.2)
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    np.save(path / "video.npy", FRAMES)
    return path


def make_tokenizer() -> Any:
    """A tokenizer of characters and special tokens."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(VOCABULARY, []))
    made.add_special_tokens(SPECIAL)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


def test_tokens_and_logits_of_a_prompt_with_a_video_equal_transformers(folder: Path) -> None:
    source = hf_source("", str(folder), folder)
    videos = Videos(min_patches=16, max_patches=96)
    vision = dataclasses.replace(source.model.vision, min_patches=16, max_patches=96, videos=videos)
    model = build(dataclasses.replace(source.model, dtypes=Dtypes(compute=Dtype.float32), vision=vision))
    params: Any = stream_weights(source, model, shardings=single_device_shardings(model), dtype="float32")
    data = compose(["data.tokenizer.kind=hf", f"data.tokenizer.path={folder}"]).config.data
    tokenizer = load_tokenizer(data)
    media = read_media([{"video": str(folder / "video.npy"), "fps": FPS}, PICTURE], vision, tokenizer.encode)
    text = TEXT.format(video=MARKER, image=MARKER)
    tokens, _ = insert_images(ImageTokenizer(tokenizer, vision).encode_with_special_tokens(text)[0], media, vision)
    with np.load(PROCESSED) as arrays:
        inputs = {name: torch.tensor(arrays[name]) for name in arrays.files}
    assert tokens.tolist() == inputs["input_ids"][0].tolist()
    reference = transformers.Qwen3VLForConditionalGeneration.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        logits = reference.eval()(**inputs).logits.numpy()
    batch = {"positions": jnp.arange(len(tokens))[None], "images": jnp.asarray(join_pixels(media))[None]}
    hidden, _ = model.hidden(params, jnp.asarray(tokens)[None], Context.of_batch(batch, Sharder.single(), None))
    np.testing.assert_allclose(model.logits(params, hidden, Sharder.single()), logits, atol=1e-4)
    assert np.abs(logits).max() > 1
