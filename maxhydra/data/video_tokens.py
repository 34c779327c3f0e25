"""Videos in conversations: their frames, and their tokens.

A video is a source {"video": path or data URL, "fps": frames per second} among the images of a conversation, with one
marker in its text. As many frames as a patch has become a step of the video, which the model sees as an image with its
tokens. The time of each step may be text before it, or the audio of the video may be between its steps.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from maxhydra.config.schema.audio import Audio
from maxhydra.config.schema.vision import Timestamps, Vision
from maxhydra.data.audio.tokens import clip_frames
from maxhydra.data.image_tokens import BICUBIC, IMAGE_PARTS, MARKER, patch_inputs, read_images
from maxhydra.data.images import ProcessedImage, ProcessedVideo, VideoProcessor, read_any_video, read_audio_track
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
# Keys of a part, the second that of newer versions of transformers, that say whether the audio of a video is read.
AUDIO_KEYS = ("use_audio_in_video", "load_audio_from_video")
Encode = Callable[[str], Sequence[int]]


class VideoAudio(NamedTuple):
    """How the audio tracks of videos are read."""

    section: Audio
    max_seconds: float
    """Length of a track; videos with longer ones are rejected."""


def read_media(
    sources: Sequence[Any], vision: Vision, encode: Encode, audio: VideoAudio | None = None
) -> list[ProcessedImage]:
    """Images and videos in order; sources of images are those of `read_images`. `encode` tokenizes timestamps.

    `audio` is needed if vision.videos.use_audio_in_video is set. Raises MediaError if one cannot be read.
    """
    return [
        read_video_tokens(source, vision, encode, audio) if is_video(source) else read_images([source], vision)[0]
        for source in sources
    ]


def is_video(source: Any) -> bool:
    return isinstance(source, Mapping) and "video" in source


def read_video_tokens(
    source: Mapping[str, Any], vision: Vision, encode: Encode, audio: VideoAudio | None = None
) -> ProcessedImage:
    """A video {"video": source, "fps": rate} as the images of its steps, with all of its tokens.

    Its audio track is read if vision.videos.use_audio_in_video is set and the key `use_audio_in_video` of the source is
    not false. Raises MediaError if it cannot be read.
    """
    if vision.video_id is None:
        raise MediaError("video", "the model takes no videos", accepted="a model with model.vision.video_id")
    video, fps = source["video"], source.get("fps")
    file = video if isinstance(video, Mapping) else {"bytes" if isinstance(video, bytes) else "path": video}
    clip = _read_clip(file, audio) if _uses_audio(source, vision) else None
    processed = _make_processor(vision)(read_any_video(file if fps is None else {**file, "fps": fps}))
    if clip is None:
        ids = _video_ids(processed, vision, encode)
    else:
        assert audio is not None
        ids = interleaved_ids(processed, len(clip), vision, audio.section)
    return ProcessedImage(patch_inputs(processed.pixels, vision), None, processed.tokens, tuple(map(int, ids)), clip)


def _uses_audio(source: Mapping[str, Any], vision: Vision) -> bool:
    """Whether the audio of a video is read: by the key of its source, or the model's setting without one."""
    is_used, given = vision.videos.use_audio_in_video, source.get("use_audio_in_video")
    if given is None:
        return is_used
    if not isinstance(given, (bool, np.bool_)):
        reason = f"use_audio_in_video={repr(given)[:50]} is not a boolean"
        raise MediaError("video", reason, accepted="true or false")
    if given and not is_used:
        reason = "use_audio_in_video=true needs model.vision.videos.use_audio_in_video=true"
        raise MediaError("video", reason, accepted="use_audio_in_video=false")
    return bool(given)


def _read_clip(file: Mapping[str, Any], audio: VideoAudio | None) -> np.ndarray | None:
    """Log-mel frames of the audio track of a video; None if it has none."""
    if audio is None:
        reason = "has audio, which of the record types with images only image_chat supports"
        raise MediaError("video", reason, accepted="use_audio_in_video=false")
    section, seconds = audio
    samples = read_audio_track(file, sampling_rate=section.sampling_rate, max_seconds=seconds)
    return None if samples is None else clip_frames(samples, section, max_seconds=seconds)


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


def interleaved_ids(video: ProcessedVideo, frames: int, vision: Vision, audio: Audio) -> list[int]:
    """Tokens of a video and of its audio by their positions in time, a step before the audio of the same position."""
    steps, clip = video.grid[0], audio.num_tokens(frames)
    assert vision.step_positions is not None
    times = [np.repeat(np.arange(steps) * vision.step_positions, video.tokens // steps), np.arange(clip)]
    ids = np.repeat(np.array([vision.video_id, audio.placeholder_id]), [video.tokens, clip])
    ordered = ids[np.argsort(np.concatenate(times), kind="stable")]
    marks = (vision.begin_id, audio.begin_id), (audio.end_id, vision.end_id)
    begin, end = ([id for id in pair if id is not None] for pair in marks)
    return [*begin, *ordered.tolist(), *end]


def clips_in_order(
    tokens: np.ndarray,
    media: Sequence[ProcessedImage],
    clips: Sequence[np.ndarray],
    *,
    vision: Vision | None,
    audio: Audio | None,
) -> list[np.ndarray]:
    """Frames of clips and of the audio of videos, in the order of the single placeholders in tokens."""
    visual_id, clip_id = (None if section is None else section.placeholder_id for section in (vision, audio))
    placed = [*zip(np.flatnonzero(tokens == visual_id), (image.clip for image in media), strict=False)]
    placed += zip(np.flatnonzero(tokens == clip_id), clips, strict=False)
    return [clip for _, clip in sorted(placed, key=lambda item: item[0]) if clip is not None]


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

    A part of a video may have the video itself, {"type": "video", "video": path}, and whether its audio is read. Raises
    MediaError if the number of videos is not that of the parts.
    """
    remaining, others, ordered, count = list(videos), list(images), [], 0
    for part in _media_parts(messages):
        if part.get("type") not in VIDEO_PARTS:
            ordered += [others.pop(0)] if others else []
            continue
        count += 1
        source = part.get("video") or (remaining.pop(0) if remaining else None)
        if source is not None:
            given = next((part[key] for key in AUDIO_KEYS if part.get(key) is not None), None)
            ordered.append({"video": source, "fps": part.get("fps"), AUDIO_KEYS[0]: given})
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
