"""Videos in conversations: their frames, and their tokens.

A video is a source {"video": path or data URL, "fps": frames per second} among the images of a conversation, with one
marker in its text. As many frames as a patch has become a step of the video, which the model sees as an image with its
tokens. The time of each step may be text before it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from maxhydra.config.schema.vision import Timestamps, Vision
from maxhydra.data.image_tokens import BICUBIC, IMAGE_PARTS, MARKER, patch_inputs, read_images
from maxhydra.data.images import ProcessedImage, ProcessedVideo, VideoProcessor, read_any_video
from maxhydra.data.images.settings import FrameSettings, VideoSettings
from maxhydra.data.media import MediaError
from maxhydra.data.placeholders import timestamp_values

# Types of content parts that are videos.
VIDEO_PARTS = ("video", "video_url")
# Formats of `timestamp_values` of the first step, and of later ones.
FORMATS = {
    Timestamps.seconds: ("<%(seconds).1f seconds>", "<%(seconds).1f seconds>"),
    Timestamps.minutes: ("%(minutes)02d:%(rest)02d ", " %(minutes)02d:%(rest)02d "),
}
# Keys of a part that ask for the audio of a video between its steps.
AUDIO_KEYS = ("use_audio_in_video", "load_audio_from_video")
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
    processed = _make_processor(vision)(read_any_video(file if fps is None else {**file, "fps": fps}))
    ids = tuple(map(int, _video_ids(processed, vision, encode)))
    return ProcessedImage(patch_inputs(processed.pixels, vision), None, processed.tokens, ids)


def _video_ids(video: ProcessedVideo, vision: Vision, encode: Encode) -> list[int]:
    """Tokens of a video: those of each step after its timestamp, or all of them without timestamps."""
    assert vision.video_id is not None
    begin, end = ([] if id is None else [id] for id in (vision.begin_id, vision.end_id))
    if vision.videos.timestamps is Timestamps.none:
        return [*begin, *[vision.video_id] * video.tokens, *end]
    step = [*begin, *[vision.video_id] * (video.tokens // video.grid[0]), *end]
    first, later = FORMATS[vision.videos.timestamps]
    texts = [(later if number else first) % timestamp_values(time) for number, time in enumerate(video.timestamps)]
    return [id for text in texts for id in (*encode(text), *step)]


def _make_processor(vision: Vision) -> VideoProcessor:
    videos, pixels = vision.videos, vision.patch_size**2
    if vision.fill_patches:
        return VideoProcessor(
            FrameSettings(
                resample=BICUBIC,
                patch_size=vision.patch_size,
                pooling_kernel_size=vision.block_size,
                max_soft_tokens=videos.max_patches // vision.block_size**2,
                num_frames=videos.max_frames,
                fps=videos.fps,
                min_frames=videos.min_frames,
            )
        )
    return VideoProcessor(
        VideoSettings(
            resample=BICUBIC,
            size=(videos.min_patches * pixels, videos.max_patches * pixels),
            patch_size=vision.patch_size,
            merge_size=vision.block_size,
            temporal_patch_size=vision.frames,
            budget="pixels_per_frame" if videos.per_frame else "pixels_per_video",
            max_frames=videos.max_frames,
            fps=videos.fps,
            min_frames=videos.min_frames,
        )
    )


def order_media(messages: Any, images: Sequence[Any], videos: Sequence[Any]) -> list[Any]:
    """Sources of images and videos in the order of the parts of messages.

    A part of a video may have the video itself, {"type": "video", "video": path}. Raises MediaError if the number of
    videos is not that of the parts, or if a part asks for the audio of its video.
    """
    remaining, others, ordered, count = list(videos), list(images), [], 0
    for part in _media_parts(messages):
        if part.get("type") not in VIDEO_PARTS:
            ordered += [others.pop(0)] if others else []
            continue
        count += 1
        if keys := [key for key in AUDIO_KEYS if part.get(key)]:
            raise MediaError("video", f"{keys[0]} is not supported", accepted="the frames of a video alone")
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
