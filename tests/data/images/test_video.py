"""Frame sampling and video processors against recorded results of transformers (golden/make.py)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxhydra.data.images import Video, make_video_processor
from maxhydra.data.images.patches import merged_patches, padded_patches
from maxhydra.data.images.settings import video_settings
from maxhydra.data.images.video import sample_frames
from maxhydra.data.media import MediaError
from tests.support.pictures import frames, picture, video_options


def golden() -> list[Any]:
    with np.load(Path(__file__).parent / "golden" / "torchvision.npz") as stored:
        keys = [key for key in stored if json.loads(key)[0] == "video"]
        return [(*json.loads(key)[1:], stored[key].astype(np.float32)) for key in keys]


def test_videos_are_within_a_rounding_step_of_transformers() -> None:
    cases = golden()
    for name, settings, (count, height, width, fps), grid, indices, expected in cases:
        raw = {"video_processor_type": name, **video_options(name), **settings}
        assert sample_frames(count, fps, video_settings(raw)) == indices
        result = make_video_processor(raw)(Video(frames(count, height, width), fps))
        assert list(result.grid) == grid and result.tokens == np.prod(grid) // 4
        if name == "Gemma4VideoProcessor":
            patches, _ = padded_patches(result.pixels, patch_size=4, max_patches=grid[1] * grid[2])
        else:
            patches = merged_patches(result.pixels, patch_size=4, merge_size=2, temporal_patch_size=2)
        step = 1 / 255 / min(video_settings(raw).image_std)
        np.testing.assert_allclose(patches, expected, atol=1.2 * step)
        assert np.mean(abs(patches - expected) > 0.2 * step) < 0.02
    assert len(cases) == 10


@pytest.mark.parametrize("fps", [1.0, 2.0, 7.3])
@pytest.mark.parametrize("total", [2, 3, 5, 24, 61, 1000])
def test_frames_are_sampled_within_the_video(total: int, fps: float) -> None:
    for name in ("Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor", "Gemma4VideoProcessor"):
        settings = video_settings({"video_processor_type": name, "do_sample_frames": True, "fps": fps})
        indices = sample_frames(total, 24.0, settings)
        assert indices == sorted(indices) and indices[0] == 0 and indices[-1] < total
        assert len(indices) <= max(total / 24 * fps, 4)


def test_videos_of_a_fixed_number_of_frames_may_be_shorter() -> None:
    settings = video_settings({"video_processor_type": "Gemma4VideoProcessor"})
    assert sample_frames(3, 24.0, settings) == [0, 1, 2]
    assert sample_frames(100, 24.0, settings) == [number * 100 // 32 for number in range(32)]


def test_timestamps_are_in_the_middle_of_each_step() -> None:
    process = make_video_processor({"video_processor_type": "Qwen3VLVideoProcessor", "do_sample_frames": False})
    assert process(Video(frames(3, 40, 40), fps=2.0)).timestamps == (0.25, 1.0)


@pytest.mark.parametrize(
    ("video", "reason"),
    [
        (Video([], 1.0), "has no frames"),
        (Video([picture(8, 8)], 1.0), "has 1 frames"),
        (Video([picture(8, 8), picture(8, 9)], 1.0), "different sizes"),
        (Video(frames(2, 1, 500), 1.0), "aspect ratio above 200"),
    ],
)
def test_unusable_videos_are_named(video: Video, reason: str) -> None:
    with pytest.raises(MediaError, match=f"{reason}.*accepted: "):
        make_video_processor({"video_processor_type": "Qwen3VLVideoProcessor"})(video)
