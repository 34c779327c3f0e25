"""Gemma 4 with images of different sizes and a video against transformers: preprocessing, logits, export, decoding."""

import dataclasses
import io
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config.compose.composer import compose
from maxhydra.convert.hf import hf_source
from maxhydra.data.image_tokens import insert_images, join_pixels, read_images
from maxhydra.data.video_tokens import read_media
from maxhydra.model import ModelDef
from tests.support.cached_decoding import cached_logits
from tests.support.media_models import GEMMA4_VISION, export, forward_logits, load_float32, randomize
from tests.support.pictures import frames, picture
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")
transformers = import_optional("transformers", extra="parity")

pytestmark = [pytest.mark.parity, pytest.mark.slow]

BEGIN, END, IMAGE, VIDEO = 60, 61, 62, 58
TOKEN_IDS = {"boi_token_id": BEGIN, "eoi_token_id": END, "image_token_id": IMAGE, "audio_token_id": 59}
TOKEN_IDS |= {"video_token_id": VIDEO}
# The smallest that the image processor of transformers accepts.
SOFT_TOKENS = 70
TEXT = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 512,
}
# A small theta, so that all coordinates matter.
VISION = GEMMA4_VISION | {"rope_parameters": {"rope_type": "axial", "rope_theta": 20.0}}
# The small models have per-layer embeddings, a shared KV cache and clipped projections; in the large ones the tokens of
# an image attend to each other in windowed layers, and patches are standardized.
FAMILIES = {
    "small": (
        {"hidden_size_per_layer_input": 6, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        {"use_clipped_linears": True},
    ),
    "large": (
        {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "use_bidirectional_attention": "vision"},
        {"standardize": True},
    ),
}
# Height and width of the images of each row.
SIZES = (((61, 20), (33, 47)), ((7, 90),))
# Height and width of the frames of a video.
FRAME = (3, 91)


@dataclasses.dataclass(frozen=True)
class Reference:
    folder: Path
    is_large: bool


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A random model with weights that are large enough for every mechanism to matter."""
    torch.manual_seed(0)
    text, vision = FAMILIES[request.param]
    settings = transformers.Gemma4Config(
        text_config=TEXT | text,
        vision_config=VISION | vision,
        audio_config=None,
        vision_soft_tokens_per_image=SOFT_TOKENS,
        **TOKEN_IDS,
    )
    model = randomize(transformers.Gemma4ForConditionalGeneration(settings), std=0.18)
    bounds = {"input_min": -1.5, "input_max": 1.3, "output_min": -1.2, "output_max": 1.4}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if (end := name.rpartition(".")[2]) in bounds:
                buffer.fill_(bounds[end])
            elif end in ("std_bias", "std_scale"):
                buffer.normal_(float(end == "std_scale"), 0.3)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return Reference(folder, request.param == "large")


def video() -> dict[str, Any]:
    """A source of frames of an odd size, of which two are seen, at 0 and 100 seconds."""
    content = io.BytesIO()
    np.save(content, np.stack([np.asarray(frame) for frame in frames(3, *FRAME)]))
    return {"video": content.getvalue(), "fps": 0.01}


def inputs_of(model: ModelDef) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of two rows, of which the second has a video, and images [rows, images, patches, 2 + size]."""
    vision = model.config.vision
    sources: list[list[Any]] = [[np.asarray(picture(*size)) for size in sizes] for sizes in SIZES]
    sources[1].append(video())
    media = [read_media(row, vision, encode) for row in sources]
    pixels = [join_pixels(row) for row in media]
    images = np.zeros((len(media), max(map(len, pixels)), *vision.image_shape), np.float32)
    rows = []
    for index, read in enumerate(media):
        prompt = np.array([1, 2, 3, *(id for _ in read for id in (IMAGE, 5, 6))])
        rows.append(insert_images(prompt, read, vision)[0])
        images[index, : len(pixels[index])] = pixels[index]
    length = max(map(len, rows)) + 3
    return np.array([[*row, *(11 + 3 * np.arange(length - len(row)) % 40)] for row in rows]), images


def encode(text: str) -> list[int]:
    return [20 + "0123456789: ".index(letter) for letter in text]


def processor() -> Any:
    return transformers.Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=SOFT_TOKENS)


def expected_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Logits of transformers for the outputs of its image processor."""
    model = transformers.Gemma4ForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    images = processor()([picture(*size) for row in SIZES for size in row], return_tensors="pt")
    videos = processor()([frames(3, *FRAME)[index] for index in (0, 1)], return_tensors="pt")
    with torch.no_grad():
        out = model.eval()(
            input_ids=torch.tensor(tokens),
            pixel_values=images["pixel_values"],
            image_position_ids=images["image_position_ids"],
            pixel_values_videos=videos["pixel_values"],
            video_position_ids=videos["image_position_ids"],
            num_frames_per_video=torch.tensor([2]),
            mm_token_type_ids=torch.tensor((tokens == IMAGE) + 2 * (tokens == VIDEO)),
        )
    logits: np.ndarray = out.logits.numpy()
    return logits


def load(reference: Reference) -> tuple[ModelDef, Any]:
    vision = hf_source("", str(reference.folder), reference.folder).model.vision
    videos = dataclasses.replace(vision.videos, max_frames=2)
    return load_float32(reference.folder, vision=dataclasses.replace(vision, videos=videos))


@pytest.mark.default_cases("large")
def test_logits_with_images_and_a_video_equal_transformers(reference: Reference) -> None:
    model, params = load(reference)
    tokens, images = inputs_of(model)
    expected = expected_logits(reference.folder, tokens)
    np.testing.assert_allclose(forward_logits(model, params, tokens, {"images": images}), expected, atol=1e-4)
    assert np.abs(expected).max() > 1
    vision = model.config.vision
    assert (vision.bidirectional, vision.layers.clipped) == (reference.is_large, not reference.is_large)


@pytest.mark.exhaustive
def test_cached_decoding_equals_one_forward_pass(reference: Reference) -> None:
    model, params = load(reference)
    tokens, images = inputs_of(model)
    media = {"images": jnp.asarray(images)}
    cached = cached_logits(model, params, tokens, media)
    np.testing.assert_allclose(cached, forward_logits(model, params, tokens, media), atol=1e-4)


@pytest.mark.default_cases("large")
def test_export_is_bit_identical(reference: Reference, tmp_path: Path) -> None:
    exported = export(reference.folder, tmp_path)
    # Layers with a shared KV cache do not use some of the projections that transformers stores.
    assert all(".layers.2." in name or ".layers.3." in name for name in exported.missing)
    assert exported.model_type == "gemma4"
    assert exported.after["vision_config"].items() <= exported.before["vision_config"].items()
    assert exported.after["video_token_id"] == VIDEO
    tokens, _ = inputs_of(load(reference)[0])
    np.testing.assert_array_equal(expected_logits(tmp_path, tokens), expected_logits(reference.folder, tokens))


def test_patches_and_tokens_equal_those_of_the_image_processor(reference: Reference) -> None:
    """transformers has patches by row, with columns before rows, and scales pixels in the model."""
    options = ["model=from_hf_vision", f"model.path={reference.folder}", "train.seq_len=64"]
    vision = compose(options).config.model.vision
    for size in (size for row in SIZES for size in row):
        (image,) = read_images([np.asarray(picture(*size))], vision)
        expected = processor()([picture(*size)], return_tensors="np")
        assert insert_images(np.array([IMAGE]), [image], vision)[0].tolist() == [
            *(BEGIN, *[IMAGE] * int(expected["num_soft_tokens_per_image"][0]), END)
        ]
        (own,), positions = image.pixels, expected["image_position_ids"][0]
        count = int((positions[:, 0] >= 0).sum())
        order = np.lexsort((own[:count, 1], own[:count, 0]))
        np.testing.assert_array_equal(own[:count][order, 1::-1] - 1, positions[:count])
        assert not own[count:].any()
        pixels = 2 * (expected["pixel_values"][0, :count].reshape(-1, 4, 4, 3).transpose(0, 3, 1, 2) - 0.5)
        np.testing.assert_array_equal(own[:count][order, 2:].reshape(-1, 3, 4, 4), pixels)
