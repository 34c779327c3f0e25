"""Qwen3-VL and Qwen3.5, dense and with experts, against transformers: images of different sizes and a video."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from maxhydra.convert.hf import hf_source
from maxhydra.convert.hf_write import find_family
from maxhydra.data.image_tokens import patch_inputs
from maxhydra.data.images import merged_patches
from maxhydra.model import ModelDef, build
from maxhydra.sharding import Sharder
from tests.support.cached_decoding import cached_logits
from tests.support.media_models import QWEN_TEXT, QWEN_VISION, export, forward_logits, load_float32
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")
transformers = import_optional("transformers", extra="parity")

pytestmark = [pytest.mark.parity, pytest.mark.slow]

SINGLE = Sharder.single()
BEGIN, END, IMAGE, VIDEO = 60, 61, 62, 63
TOKEN_IDS = {
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
}
TEXT = {
    **QWEN_TEXT,
    "num_hidden_layers": 4,
    "hidden_size": 40,
    "rope_parameters": {**QWEN_TEXT["rope_parameters"], "mrope_interleaved": True},
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
VISION = {**QWEN_VISION, "depth": 4, "deepstack_visual_indexes": [0, 2], "out_hidden_size": 40}
ROPE = TEXT["rope_parameters"]
HYBRID = TEXT | {
    # The norm of a state that the query hardly reads would amplify rounding.
    "rms_norm_eps": 1e-2,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
}
SHARED_EXPERT = {"shared_expert_intermediate_size": 20}
NO_DEEPSTACK = {key: value for key, value in VISION.items() if key != "deepstack_visual_indexes"}


class Family(NamedTuple):
    """Class name without its ending, settings, and the model_type of the text decoder alone."""

    name: str
    text: dict[str, Any]
    vision: dict[str, Any]
    text_type: str


FAMILIES = {
    "qwen3_vl": Family("Qwen3VL", TEXT, VISION, "qwen3"),
    "qwen3_vl_moe": Family("Qwen3VLMoe", TEXT | EXPERTS, VISION, "qwen3_moe"),
    "qwen3_5": Family("Qwen3_5", HYBRID, NO_DEEPSTACK, "qwen3_5_text"),
    "qwen3_5_moe": Family("Qwen3_5Moe", HYBRID | EXPERTS | SHARED_EXPERT, NO_DEEPSTACK, "qwen3_next"),
}
CASES = [
    *("qwen3_vl", "qwen3_5"),
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("qwen3_vl_moe", "qwen3_5_moe")),
]
# Pixels [frames, height, width, 3] of two images of 2 x 3 and 4 x 1 tokens, and of a video of two steps of 2 x 2.
GENERATOR = np.random.default_rng(0)
PIXELS = [
    GENERATOR.normal(size=(frames, height, width, 3)).astype(np.float32)
    for frames, height, width in ((1, 16, 24), (1, 32, 8), (4, 16, 16))
]
WIDE, TALL = ([BEGIN, *[IMAGE] * count, END] for count in (6, 4))
STEP = [BEGIN, *[VIDEO] * 4, END]
TOKENS = np.array(
    [
        [1, 2, 3, *WIDE, 5, 6, *TALL, 7, *STEP, 8, *STEP, 9, 10, 11],
        [*TALL, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, *WIDE, 5, 6, 7, 8, 9, 10, 11],
    ]
)
# The media of each row.
MEDIA = [[0, 1, 2], [1, 0]]


@dataclasses.dataclass(frozen=True)
class Reference:
    model_type: str
    model_class: Any
    folder: Path


@pytest.fixture(scope="module", params=CASES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A random model with weights that are large enough for every mechanism to matter."""
    torch.manual_seed(0)
    name, text, vision, _ = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    settings = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **TOKEN_IDS)
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    model = model_class(settings)
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            is_scale = "norm" in weight_name and weight_name.endswith("weight")
            weight.normal_(float(is_scale), 0.2 if weight.ndim > 1 else 0.1)
    model.save_pretrained(folder)
    # Published files of Qwen3-VL have [experts, inputs, outputs], of which transformers reads both orders.
    arrays = load_file(folder / "model.safetensors")
    experts = {key: value for key, value in arrays.items() if ".experts." in key and value.ndim == 3}
    stacked = {key: np.ascontiguousarray(value.swapaxes(1, 2)) for key, value in experts.items()}
    save_file(arrays | stacked, folder / "model.safetensors", metadata={"format": "pt"})
    return Reference(request.param, model_class, folder)


def load(folder: Path) -> tuple[ModelDef, Any]:
    vision = hf_source("", str(folder), folder).model.vision
    return load_float32(folder, vision=dataclasses.replace(vision, min_patches=1, max_patches=28))


def image_batch(model: ModelDef) -> np.ndarray:
    """[rows, images, patches, 2 + size]; the second row has fewer images than the first."""
    vision = model.config.vision
    rows = [np.concatenate([patch_inputs(PIXELS[number], vision) for number in row]) for row in MEDIA]
    images = np.zeros((len(rows), max(map(len, rows)), *vision.image_shape), np.float32)
    for row, inputs in enumerate(rows):
        images[row, : len(inputs)] = inputs
    return images


def expected_logits(reference: Reference, folder: Path) -> np.ndarray:
    model = reference.model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    patches = [torch.tensor(merged_patches(pixels, **sizes)) for pixels in PIXELS]
    order = [number for row in MEDIA for number in row]
    grids = [[-(-len(pixels) // 2), pixels.shape[1] // 4, pixels.shape[2] // 4] for pixels in PIXELS]
    images = [number for number in order if number != 2]
    with torch.no_grad():
        out = model(
            input_ids=torch.tensor(TOKENS),
            pixel_values=torch.cat([patches[number] for number in images]),
            image_grid_thw=torch.tensor([grids[number] for number in images]),
            pixel_values_videos=patches[2],
            video_grid_thw=torch.tensor(grids[2:]),
            mm_token_type_ids=torch.tensor((TOKENS == IMAGE) + 2 * (TOKENS == VIDEO)),
        )
    logits: np.ndarray = out.logits.numpy()
    return logits


@pytest.mark.default_cases("qwen3_5")
def test_logits_with_images_and_a_video_equal_transformers(reference: Reference) -> None:
    expected = expected_logits(reference, reference.folder)
    model, params = load(reference.folder)
    logits = forward_logits(model, params, TOKENS, {"images": image_batch(model)})
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert np.abs(expected).max() > 1


def test_export_is_bit_identical(reference: Reference, tmp_path: Path) -> None:
    exported = export(reference.folder, tmp_path)
    assert exported.model_type == reference.model_type and not exported.missing
    assert exported.after["vision_config"].items() <= exported.before["vision_config"].items()
    np.testing.assert_array_equal(expected_logits(reference, tmp_path), expected_logits(reference, reference.folder))


def test_the_text_decoder_alone_is_a_plain_family(reference: Reference) -> None:
    source = hf_source("", str(reference.folder), reference.folder)
    text = dataclasses.replace(source.model, vision=dataclasses.replace(source.model.vision, num_layers=None))
    assert find_family(build(text), None).model_type == FAMILIES[reference.model_type].text_type


@pytest.mark.default_cases("qwen3_vl")
def test_cached_decoding_equals_one_forward_pass(reference: Reference) -> None:
    """Prefill takes the images; decode steps continue at positions that are behind the slots of the cache."""
    model, params = load(reference.folder)
    # 6 - 3 and 4 - 4 tokens and positions of the images, 4 - 2 of each step of the video.
    lag = jnp.array([3 + 0 + 2 * 2, 0 + 3])
    media = {"images": jnp.asarray(image_batch(model))}
    cached = cached_logits(model, params, TOKENS, media, lambda positions: (positions - lag[:, None])[:, :, None])
    np.testing.assert_allclose(cached, forward_logits(model, params, TOKENS, media), atol=1e-4)
