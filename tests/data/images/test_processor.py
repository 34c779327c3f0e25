"""Image processors against the PIL processors of transformers, bit for bit, and recorded results of torchvision's.

golden/make.py records the processors that transformers implements with torchvision alone.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.data.audio import make_extractor
from maxhydra.data.images import make_processor, make_video_processor
from maxhydra.data.images.patches import merged_patches, padded_patches
from maxhydra.data.media import TABLE, MediaError, read_processor_files
from maxhydra.data.placeholders import make_layouts
from tests.support.pictures import picture
from tests.support.skips import import_optional

gemma3 = import_optional("transformers.models.gemma3.image_processing_pil_gemma3", extra="parity")
gemma4 = import_optional("transformers.models.gemma4.image_processing_pil_gemma4", extra="parity")
qwen2_vl = import_optional("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl", extra="parity")

SIZES = [(1, 1), (3, 5), (17, 31), (64, 64), (100, 37), (37, 101), (250, 90), (53, 400)]
SQUARE = {"image_processor_type": "Gemma3ImageProcessorFast", "size": {"height": 56, "width": 42}}
DYNAMIC = {"image_processor_type": "Qwen2VLImageProcessor"}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"resample": 3, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]},
        {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20},
        {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 40, "pan_and_scan_max_num_crops": 3},
    ],
)
def test_square_images_equal_transformers(size: tuple[int, int], settings: dict) -> None:
    raw = {**SQUARE, **settings}
    defaults = {"pan_and_scan_min_ratio_to_activate": 1.2, "pan_and_scan_max_num_crops": 4}
    values = {**defaults, **{key: value for key, value in raw.items() if key != "image_processor_type"}}
    reference = gemma3.Gemma3ImageProcessorPil(**values)(picture(*size))
    result = make_processor(raw)(picture(*size))
    np.testing.assert_array_equal(result.pixels, np.stack(reference["pixel_values"]).transpose(0, 2, 3, 1))
    assert result.grid is None and result.tokens == 256 * (1 + reference["num_crops"][0])


def test_crops_are_made() -> None:
    settings = {**SQUARE, "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20}
    assert len(make_processor(settings)(picture(250, 90)).pixels) == 4


@pytest.mark.parametrize("size", [*SIZES, (4, 900)])
@pytest.mark.parametrize("tokens", [70, 280])
def test_images_under_a_token_budget_equal_transformers(size: tuple[int, int], tokens: int) -> None:
    settings = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": tokens}
    reference = gemma4.Gemma4ImageProcessorPil(**settings)(picture(*size))
    result = make_processor({"image_processor_type": "Gemma4ImageProcessor", **settings})(picture(*size))
    patches, positions = padded_patches(result.pixels, patch_size=4, max_patches=tokens * 4)
    np.testing.assert_array_equal(patches, np.array(reference["pixel_values"]))
    np.testing.assert_array_equal(positions, np.array(reference["image_position_ids"]))
    assert result.tokens == reference["num_soft_tokens_per_image"][0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "settings",
    [
        {"size": {"shortest_edge": 3136, "longest_edge": 12544}},
        {"size": {"shortest_edge": 1024, "longest_edge": 65536}, "patch_size": 8, "image_mean": [0.5] * 3},
        {"min_pixels": 784, "max_pixels": 20000, "patch_size": 7, "merge_size": 3, "temporal_patch_size": 1},
    ],
)
def test_dynamic_images_equal_transformers(size: tuple[int, int], settings: dict) -> None:
    reference = qwen2_vl.Qwen2VLImageProcessorPil(**settings)
    expected = reference(picture(*size))
    result = make_processor({**DYNAMIC, **settings})(picture(*size))
    sizes = {name: getattr(reference, name) for name in ("patch_size", "merge_size", "temporal_patch_size")}
    np.testing.assert_array_equal(merged_patches(result.pixels, **sizes), expected["pixel_values"])
    assert [1, *(result.grid or ())] == expected["image_grid_thw"][0].tolist()
    assert result.tokens == np.prod(expected["image_grid_thw"][0]) // reference.merge_size**2


def test_defaults_are_those_of_transformers() -> None:
    """Folders may leave out the defaults of the class that they name."""
    image = picture(50, 70)
    square = make_processor({"image_processor_type": "Gemma3ImageProcessor"})(image).pixels
    np.testing.assert_array_equal(square.transpose(0, 3, 1, 2), gemma3.Gemma3ImageProcessorPil()(image)["pixel_values"])
    patches, _ = padded_patches(
        make_processor({"image_processor_type": "Gemma4ImageProcessor"})(image).pixels, patch_size=16, max_patches=2520
    )
    np.testing.assert_array_equal(patches, gemma4.Gemma4ImageProcessorPil()(image)["pixel_values"])
    dynamic = make_processor(DYNAMIC)(image).pixels
    merged = merged_patches(dynamic, patch_size=14, merge_size=2, temporal_patch_size=2)
    np.testing.assert_array_equal(merged, qwen2_vl.Qwen2VLImageProcessorPil()(image)["pixel_values"])


def test_every_class_of_the_table_has_complete_settings() -> None:
    table = json.loads(TABLE.read_text())
    for section, make in (
        ("image_processor_type", make_processor),
        ("video_processor_type", make_video_processor),
        ("feature_extractor_type", make_extractor),
        ("processor_class", make_layouts),
    ):
        for name in table[section]:
            assert make({section: name})  # type: ignore[operator]


def golden(kind: str) -> list[Any]:
    with np.load(Path(__file__).parent / "golden" / "torchvision.npz") as stored:
        cases = [(*json.loads(key)[1:], stored[key].astype(np.float32)) for key in stored]
        return [case for key, case in zip(stored, cases, strict=True) if json.loads(key)[0] == kind]


def test_tiles_are_within_a_rounding_step_of_transformers() -> None:
    """Pillow and torchvision round a few bytes differently; bfloat16 adds half of its step near 1 (1 / 256)."""
    cases = golden("tiles")
    for settings, size, grid, expected in cases:
        raw = {"image_processor_type": "Llama4ImageProcessorFast", "patch_size": 7, **settings}
        result = make_processor(raw)(picture(*size))
        assert result.grid == tuple(grid) and result.pixels.shape == expected.shape
        np.testing.assert_allclose(result.pixels, expected, atol=2 / 255 + 1 / 256)
        assert np.mean(result.pixels != expected) < 0.05
        assert result.tokens == len(expected)
    assert len(cases) == 12


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "CMYK", "1", "I;16"])
def test_modes_become_rgb_as_in_transformers(mode: str) -> None:
    """Transparent parts are composited onto white."""
    image = picture(20, 30)
    if mode in ("LA", "RGBA"):
        image.putalpha(picture(20, 30, phase=3).convert("L"))
    image = image.convert("L").convert("I;16") if mode == "I;16" else image.convert(mode)
    reference = gemma3.Gemma3ImageProcessorPil(size={"height": 20, "width": 30})(image)
    result = make_processor({**SQUARE, "size": {"height": 20, "width": 30}})(image)
    np.testing.assert_array_equal(result.pixels[0], reference["pixel_values"][0].transpose(1, 2, 0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "accepted: Gemma3ImageProcessor"),
        ({**SQUARE, "do_resize": False}, "do_resize=false: not supported"),
        ({**SQUARE, "do_center_crop": True}, "do_center_crop=true: not supported"),
        ({**SQUARE, "size": {"shortest_edge": 224}}, r"accepted: \{height: N, width: N\}"),
        ({**SQUARE, "resample": 9}, r"2 \(bilinear\)"),
        ({**SQUARE, "image_std": [1, 0, 1]}, "above 0"),
        ({**SQUARE, "max_soft_tokens": 70}, "max_soft_tokens=70: unknown setting"),
        ({**DYNAMIC, "merge_sise": 2}, "did you mean 'merge_size'"),
        ({"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 71}, "70, 140, 280"),
        ({"mechanism": "square"}, "size: missing"),
        ({"mechanism": "triangle"}, "accepted: square"),
        ({}, "image_processor_type"),
    ],
)
def test_unsupported_settings_are_named(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_processor(settings)


def test_settings_of_a_file_with_audio_and_nulls_are_accepted() -> None:
    """As in folders that describe image and audio in one file, and in those that store null for a default."""
    audio = {"feature_extractor_type": "WhisperFeatureExtractor", "n_fft": 400, "sampling_rate": 16000}
    assert make_processor({**DYNAMIC, **audio, "resample": None, "do_pad": None})(picture(30, 30)).tokens == 4


def test_extreme_aspect_ratios_are_rejected() -> None:
    with pytest.raises(MediaError, match="aspect ratios up to 200"):
        make_processor(DYNAMIC)(picture(1, 201))


def test_folders_of_both_kinds_are_read(tmp_path: Path) -> None:
    def write(**files: dict) -> None:
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))

    write(
        preprocessor_config={**SQUARE, "image_seq_length": 4}, processor_config={"processor_class": "Gemma3Processor"}
    )
    files = read_processor_files(tmp_path)
    assert make_processor(files.image)(picture(9, 9)).tokens == 4 and not files.audio and not files.video
    (tmp_path / "preprocessor_config.json").unlink()
    audio = {"feature_extractor_type": "Gemma4AudioFeatureExtractor", "sampling_rate": 16000}
    write(processor_config={"image_seq_length": 7, "image_processor": SQUARE, "feature_extractor": audio})
    files = read_processor_files(tmp_path)
    assert make_processor(files.image)(picture(9, 9)).tokens == 7 and files.audio["sampling_rate"] == 16000
    (tmp_path / "processor_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"processor_config\.json: not readable as JSON"):
        read_processor_files(tmp_path)
