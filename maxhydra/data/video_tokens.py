"""Videos in conversations: their frames, and their tokens.

A video is a source {"video": path or data URL, "fps": frames per second} among the images of a conversation, with one
marker in its text. Two frames, or as many as a patch has, become a step of the video, which the model sees as an image
with its tokens. The seconds of each step are text before it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from maxhydra.config.schema.vision import Vision
from maxhydra.data.image_tokens import BICUBIC, IMAGE_PARTS, MARKER, patch_inputs, read_images
from maxhydra.data.images import ProcessedImage, VideoProcessor, make_video_processor, read_any_video
from maxhydra.data.media import MediaError

# Types of content parts that are videos.
VIDEO_PARTS = ("video", "video_url")
TIMESTAMP = "<%.1f seconds>"
Encode = Callable[[str], Sequence[int]]


def read_media(sources: Sequence[Any], vision: Vision, encode: Encode) -> list[ProcessedImage]:
    """Images and videos in order; sources of images are those of `read_images`. `encode` tokenizes timestamps.

    Raises MediaError if one cannot be read.
    """
    return [
        read_video_tokens(source, vision, encode) if is_video(source) else read_images([source], vision)[0]
        for source in sources
    ]


def is_video(source: Any) -> bool:
    return isinstance(source, Mapping) and "video" in source


def read_video_tokens(source: Mapping[str, Any], vision: Vision, encode: Encode) -> ProcessedImage:
    """A video {"video": source, "fps": rate} as the images of its steps, with all of its tokens.

    Raises MediaError if it cannot be read.
    """
    if vision.video_id is None:
        raise MediaError("video", "the model takes no videos", accepted="a model with model.vision.video_id")
    video, fps = source["video"], source.get("fps")
    file = video if isinstance(video, Mapping) else {"bytes" if isinstance(video, bytes) else "path": video}
    processed = _processor(vision)(read_any_video(file if fps is None else {**file, "fps": fps}))
    count = processed.tokens // processed.grid[0]
    step = [id for id in (vision.begin_id, *[vision.video_id] * count, vision.end_id) if id is not None]
    ids = [id for seconds in processed.timestamps for id in (*encode(TIMESTAMP % seconds), *step)]
    return ProcessedImage(patch_inputs(processed.pixels, vision), None, processed.tokens, tuple(map(int, ids)))


def _processor(vision: Vision) -> VideoProcessor:
    videos, pixels = vision.videos, vision.patch_size**2
    sizes = (vision.patch_size, vision.block_size, vision.frames)
    budget = videos.min_patches * pixels, videos.max_patches * pixels
    return _make(sizes, budget, videos.fps, videos.min_frames, videos.max_frames)


@cache
def _make(sizes: tuple[int, int, int], pixels: tuple[int, int], fps: float, low: int, high: int) -> VideoProcessor:
    patch_size, block_size, frames = sizes
    return make_video_processor(
        {
            "mechanism": "pixels_per_video",
            "resample": BICUBIC,
            "size": {"shortest_edge": pixels[0], "longest_edge": pixels[1]},
            "patch_size": patch_size,
            "merge_size": block_size,
            "temporal_patch_size": frames,
            "fps": fps,
            "min_frames": low,
            "max_frames": high,
            "max_video_tokens": math.ceil(pixels[1] / (patch_size * block_size) ** 2),
        }
    )


def order_media(messages: Any, images: Sequence[Any], videos: Sequence[Any]) -> list[Any]:
    """Sources of images and videos in the order of the parts of messages.

    A part of a video may have the video itself, {"type": "video", "video": path}. Raises MediaError if the number of
    videos is not that of the parts.
    """
    remaining, others, ordered, count = list(videos), list(images), [], 0
    for part in _media_parts(messages):
        if part.get("type") not in VIDEO_PARTS:
            ordered += [others.pop(0)] if others else []
            continue
        count += 1
        source = part.get("video") or (remaining.pop(0) if remaining else None)
        if source is not None:
            ordered.append({"video": source, "fps": part.get("fps")})
    found = sum(map(is_video, ordered))
    if remaining or found != count:
        raise MediaError("messages", f"has {found + len(remaining)} videos, but {count} video parts in its messages")
    return [*ordered, *others]


def has_videos(messages: Any) -> bool:
    """Whether messages have a part that is a video."""
    return any(part.get("type") in VIDEO_PARTS for part in _media_parts(messages))


def _media_parts(messages: Any) -> list[Mapping[str, Any]]:
    """Parts of images and videos; a marker in a text is an image."""
    parts: list[Mapping[str, Any]] = []
    for message in messages if isinstance(messages, Sequence) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in [content] if isinstance(content, str) else content if isinstance(content, Sequence) else ():
            if isinstance(part, Mapping) and part.get("type") in (*IMAGE_PARTS, *VIDEO_PARTS):
                parts.append(part)
            else:
                text = part.get("text") if isinstance(part, Mapping) else part
                parts += [{"type": IMAGE_PARTS[0]}] * (text.count(MARKER) if isinstance(text, str) else 0)
    return parts
