"""Placeholder text against the processors of transformers; those with torchvision are called without their images."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.data.images import ProcessedImage, ProcessedVideo, make_processor
from maxhydra.data.media import MediaError
from maxhydra.data.placeholders import Layout, expand, image_text, make_layouts, video_text
from tests.support.pictures import picture
from tests.support.skips import import_optional

transformers = import_optional("transformers", extra="parity")


def image(count: int, tokens: int, grid: tuple[int, int] | None = None) -> ProcessedImage:
    return ProcessedImage(np.zeros((count, 1, 1, 3), np.float32), grid, tokens)


def image_layout(name: str, **tokens: str) -> Layout:
    layout = make_layouts({"processor_class": name}, tokens).image
    assert layout is not None
    return layout


@pytest.mark.slow
@pytest.mark.parametrize("size", [(40, 40), (30, 100), (200, 40)])
def test_prompts_with_crops_equal_transformers(size: tuple[int, int]) -> None:
    """The whole processor, with a tokenizer of a few words, and its own names of the special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    names = {"boi_token": "<boi>", "image_token": "<soft>", "eoi_token": "<eoi>"}
    vocabulary = [
        "[UNK]",
        "Look",
        "at",
        "this",
        "Here",
        "is",
        "the",
        "original",
        "image",
        "and",
        "here",
        "are",
        "crops",
    ]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]", extra_special_tokens=names
    )
    settings = {"size": {"height": 8, "width": 8}, "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16}
    limits = {"pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2}
    reference = transformers.Gemma3Processor(
        Gemma3ImageProcessorPil(**settings, **limits), tokenizer, image_seq_length=3
    )
    prompt = "Look at this <boi> Look"
    expected = reference(images=[picture(*size)], text=[prompt], **settings, **limits)["input_ids"][0]
    process = make_processor({"image_processor_type": "Gemma3ImageProcessor", "image_seq_length": 3, **settings})
    layout = image_layout("Gemma3Processor", **names)
    text = expand(prompt, [image_text(process(picture(*size)), layout)], layout)
    assert tokenizer(text)["input_ids"] == expected
    assert expected.count(tokenizer.convert_tokens_to_ids("<soft>")) == process(picture(*size)).tokens


@pytest.mark.parametrize("grid", [(1, 1), (2, 3), (1, 4), (3, 1)])
def test_tiles_equal_transformers(grid: tuple[int, int]) -> None:
    expected = transformers.Llama4Processor._prompt_split_image(None, grid, 5)
    count = grid[0] * grid[1] + (grid != (1, 1))
    assert image_text(image(count, 5 * count, grid), image_layout("Llama4Processor")) == expected
    # The replacement contains the marker.
    layout = image_layout("Llama4Processor")
    assert expand("a<|image|>b<|image|>c", [expected, "x"], layout) == f"a{expected}bxc"


def test_images_of_one_part_equal_transformers() -> None:
    grid = {"image_grid_thw": np.array([[1, 4, 6]])}
    reader = SimpleNamespace(image_processor=SimpleNamespace(merge_size=2), image_token="<|image_pad|>")
    for name in ("Qwen2VLProcessor", "Qwen3VLProcessor", "Qwen3OmniMoeProcessor"):
        expected = getattr(transformers, name).replace_image_token(reader, grid, 0)
        assert image_text(image(1, 6, (4, 6)), image_layout(name)) == expected
    names = {"boi_token": "<b>", "image_token": "<i>", "eoi_token": "<e>"}
    expected = transformers.Gemma4Processor.replace_image_token(
        SimpleNamespace(**names), {"num_soft_tokens_per_image": [6]}, 0
    )
    assert image_text(image(1, 6, (6, 9)), image_layout("Gemma4Processor", **names)) == expected


@pytest.mark.parametrize("indices", [[0, 2, 5, 7], [0, 3, 4]])
def test_videos_equal_transformers(indices: list[int]) -> None:
    grid = (2, 4, 6)
    processor: Any = transformers.Qwen3VLProcessor
    reader = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        _calculate_timestamps=lambda *values: processor._calculate_timestamps(None, *values),
    )
    metadata = SimpleNamespace(fps=3.0, frames_indices=list(indices))
    inputs = {"video_grid_thw": np.array([grid]), "video_metadata": [metadata]}
    padded = indices + indices[-1:] * (len(indices) % 2)
    times = tuple((padded[at] / 3 + padded[at + 1] / 3) / 2 for at in (0, 2))
    video = ProcessedVideo(np.zeros((4, 1, 1, 3), np.float32), grid, times, 12)
    for name, replace in (
        ("Qwen3VLProcessor", processor.replace_video_token),
        ("Qwen2VLProcessor", transformers.Qwen2VLProcessor.replace_video_token),
    ):
        layout = make_layouts({"processor_class": name}).video
        assert layout is not None and video_text(video, layout) == replace(reader, inputs, 0)


def test_videos_with_minutes_equal_transformers() -> None:
    names = {"boi_token": "<b>", "video_token": "<v>", "eoi_token": "<e>"}
    times = (0.0, 59.96, 61.5, 6000.0)
    inputs = {
        "num_soft_tokens_per_video": [3],
        "video_metadata": [SimpleNamespace(fps=2.0, timestamps=list(times))],
    }
    expected = transformers.Gemma4Processor.replace_video_token(SimpleNamespace(**names), inputs, 0)
    layout = make_layouts({"processor_class": "Gemma4Processor"}, names).video
    video = ProcessedVideo(np.zeros((4, 1, 1, 3), np.float32), (4, 2, 6), times, 12)
    assert layout is not None and video_text(video, layout) == expected


def test_audio_equals_transformers() -> None:
    names = {"boa_token": "<b>", "audio_token": "<a>", "eoa_token": "<e>"}
    mask = np.arange(50) < 37
    expected = transformers.Gemma4Processor.replace_audio_token(
        SimpleNamespace(**names), {"input_features_mask": [mask]}, 0
    )
    layout = make_layouts({"processor_class": "Gemma4Processor"}, names).audio
    assert layout is not None and layout.enclose(int(mask[::4].sum())) == expected


def test_wrong_numbers_of_markers_and_unknown_classes_are_named() -> None:
    layout = image_layout("Qwen2VLProcessor")
    with pytest.raises(MediaError, match="for 1 files; accepted: one marker for each file"):
        expand("<|image_pad|><|image_pad|>", ["x"], layout)
    with pytest.raises(ConfigError, match="accepted: Gemma3Processor"):
        make_layouts({"processor_class": "CLIPProcessor"})
    with pytest.raises(ConfigError, match="processor_class"):
        make_layouts({"mechanism": "square"})
