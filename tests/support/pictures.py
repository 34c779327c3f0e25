"""Deterministic pictures and videos of any size, the same on every machine and with every version of NumPy."""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

# Preprocessing that transformers implements with torchvision alone: settings, and the sizes of pictures.
TILE_CASES = (
    {"size": {"height": 14, "width": 14}, "max_patches": 6},
    {"size": {"height": 14, "width": 14}, "max_patches": 4, "resize_to_max_canvas": True},
)
TILE_SIZES = ((3, 2), (14, 14), (29, 61), (60, 20), (41, 43), (9, 70))
VIDEO_CASES = (
    ("Qwen2VLVideoProcessor", {"do_sample_frames": True, "fps": 2.0}),
    ("Qwen2VLVideoProcessor", {"cap_pixels_per_frame": True, "max_video_tokens": 20}),
    ("Qwen3VLVideoProcessor", {"fps": 3.0}),
    ("Qwen3VLVideoProcessor", {"num_frames": None, "fps": 2.0, "cap_pixels_per_frame": True, "max_video_tokens": 12}),
    ("Gemma4VideoProcessor", {"num_frames": 2}),
)
# Frames, height, width, frames per second.
VIDEO_SIZES = ((9, 19, 33, 4.0), (5, 40, 7, 2.5))


def picture(height: int, width: int, *, phase: int = 0) -> "Image.Image":
    """Smooth waves in two channels and a pattern without neighbours of equal value in the third."""
    from PIL import Image

    y, x = np.mgrid[:height, :width].astype(np.int64)
    waves = [(x * 7 + y * 3 + phase * 11) % 512, (y * 9 - x * 2 + phase * 5) % 512]
    channels = [np.minimum(wave, 511 - wave) for wave in waves] + [(x * x * 31 + y * 57 + x * y * 13 + phase) % 256]
    return Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))


def video_options(name: str) -> dict[str, Any]:
    """Settings of all cases of a video processor."""
    if name == "Gemma4VideoProcessor":
        return {"patch_size": 4, "pooling_kernel_size": 2}
    return {"patch_size": 4, "size": {"shortest_edge": 256, "longest_edge": 4096}}


def frames(count: int, height: int, width: int) -> list["Image.Image"]:
    return [picture(height, width, phase=index) for index in range(count)]
