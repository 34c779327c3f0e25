"""Video processors: frames are sampled in time, resized together and normalized."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from maxhydra.data.images.geometry import pixel_range_size, token_budget_size
from maxhydra.data.images.processor import pixel_values, resize
from maxhydra.data.images.read import Video, to_rgb
from maxhydra.data.images.settings import FrameSettings, VideoSettings, video_settings
from maxhydra.data.media import MediaError


@dataclass(frozen=True)
class ProcessedVideo:
    """Pixels [frames, height, width, 3] in float32, and the grid of patches in time, rows and columns.

    `timestamps` are the seconds of each step of the grid, `tokens` the placeholder tokens of the whole video.
    """

    pixels: np.ndarray
    grid: tuple[int, int, int]
    timestamps: tuple[float, ...]
    tokens: int


@dataclass(frozen=True)
class VideoProcessor:
    """Turns videos into the pixels of one model."""

    settings: VideoSettings | FrameSettings

    def __call__(self, video: Video) -> ProcessedVideo:
        if not video.frames:
            raise MediaError("video", "has no frames", accepted="at least one frame")
        settings = self.settings
        indices = sample_frames(len(video.frames), video.fps, settings)
        frames = [to_rgb(video.frames[index]) for index in indices]
        sizes = {(frame.height, frame.width) for frame in frames}
        if len(sizes) > 1:
            raise MediaError("video", f"frames have different sizes: {sorted(sizes)}", accepted="frames of one size")
        size = frame_size(*sizes.pop(), len(frames), settings)
        pixels = np.stack([np.asarray(resize(frame, size, settings)) for frame in frames])
        steps = math.ceil(len(frames) / settings.temporal_patch_size)
        grid = (steps, size[0] // settings.patch_size, size[1] // settings.patch_size)
        times = _timestamps(indices, video.fps, settings.temporal_patch_size)
        return ProcessedVideo(pixel_values(pixels, settings), grid, times, math.prod(grid) // settings.merge_size**2)


def make_video_processor(settings: Mapping[str, Any]) -> VideoProcessor:
    """Return the processor that `video_preprocessor_config.json` of a Hugging Face folder describes."""
    return VideoProcessor(video_settings(settings))


def sample_frames(total: int, fps: float, settings: VideoSettings | FrameSettings) -> list[int]:
    """Indices of the frames that a model sees of a video with `total` frames at `fps`.

    With a budget per video they include the first and the last frame; with a budget per frame their number is a
    multiple of `temporal_patch_size`, and each is the first of an equal share.
    """
    if not settings.do_sample_frames:
        return list(range(total))
    if isinstance(settings, FrameSettings):
        count = settings.num_frames if settings.fps is None else int(total / fps * settings.fps)
        count = min(max(count, settings.min_frames), settings.num_frames, total)
        return (np.arange(count) * total // count).tolist()
    multiple, per_video = settings.temporal_patch_size, settings.budget == "pixels_per_video"
    if settings.num_frames is not None:
        count = settings.num_frames if per_video else round(settings.num_frames / multiple) * multiple
    elif settings.fps is None:
        count = min(max(total, settings.min_frames), settings.max_frames) if per_video else total
    elif per_video:
        count = min(max(int(total / fps * settings.fps), settings.min_frames), settings.max_frames, total)
    else:
        most = min(settings.max_frames, total) // multiple * multiple
        count = math.floor(min(max(total / fps * settings.fps, settings.min_frames), most, total) / multiple) * multiple
    if not 0 < count <= total:
        accepted = f"at least {max(count, multiple)} frames"
        raise MediaError("video", f"{count} frames cannot be sampled from {total}", accepted=accepted)
    if per_video:
        return np.linspace(0, total - 1, count).round().astype(int).tolist()
    starts = np.arange(math.ceil(total / (total / count))) * (total / count)
    return starts.astype(np.float32).astype(int).tolist()


def frame_size(height: int, width: int, count: int, settings: VideoSettings | FrameSettings) -> tuple[int, int]:
    """Height and width to which `count` frames are resized."""
    if isinstance(settings, FrameSettings):
        return token_budget_size(height, width, settings)
    multiple = settings.patch_size * settings.merge_size
    low, high = settings.size
    floor = int(low * 1.05)
    if settings.budget == "pixels_per_frame":
        if settings.cap_pixels_per_frame:
            total = int(settings.max_video_tokens * multiple * multiple * 0.9)
            high = max(min(high, total * settings.temporal_patch_size // count), floor)
        return pixel_range_size(height, width, multiple=multiple, pixels=(low, high), name="video")
    if count < settings.temporal_patch_size:
        raise MediaError("video", f"has {count} frames", accepted=f"at least {settings.temporal_patch_size} frames")
    if settings.cap_pixels_per_frame:
        high = max(min(settings.max_video_tokens * multiple**2, high // count), floor) * count
    if min(height, width) < multiple:
        scale = max(multiple / height, multiple / width)
        height, width = int(height * scale), int(width * scale)
    frames = (count, settings.temporal_patch_size)
    return pixel_range_size(height, width, multiple=multiple, pixels=(low, high), frames=frames, name="video")


def _timestamps(indices: list[int], fps: float, multiple: int) -> tuple[float, ...]:
    """Middle of the first and the last frame of each step of the grid, in seconds."""
    padded = indices + indices[-1:] * (-len(indices) % multiple)
    return tuple((padded[i] / fps + padded[i + multiple - 1] / fps) / 2 for i in range(0, len(padded), multiple))
