"""Reads videos: animations, folders of images, arrays of frames, and with PyAV the containers that FFmpeg decodes.

Only containers have audio tracks.
"""

import contextlib
import importlib
import importlib.util
import io
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from maxhydra.data.images.read import (
    IMAGE_FORMATS,
    MAX_FRAMES,
    MAX_VIDEO_PIXELS,
    VIDEO_FORMATS,
    Video,
    pillow,
    read_image,
    read_video,
)
from maxhydra.data.media import MediaError, Source, read_bytes

# Frames per second of folders and arrays, which do not state them, as in the processor of Qwen3-VL.
DEFAULT_FPS = 24.0
NPY_PREFIX = b"\x93NUMPY"
# First bytes of GIF, PNG and WebP files.
ANIMATIONS = (b"GIF8", b"\x89PNG", b"RIFF")
# Name of a container in FFmpeg -> its first bytes, and where they are. Other demuxers, such as those of playlists,
# would open further files.
CONTAINERS = {"mov": (4, b"ftyp"), "matroska": (0, b"\x1aE\xdf\xa3")}
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


def read_any_video(source: Source) -> Video:
    """Read a video: a path, a data URL, bytes, or {path, bytes, fps}; a folder has its frames in the order of names.

    Raises MediaError if it cannot be read.
    """
    fps = source.get("fps") if isinstance(source, Mapping) else None
    if fps is not None and (isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps < 1e6):
        raise MediaError("video", f"fps={fps} is not a frame rate", accepted="a number above 0")
    folder = _folder_of(source)
    video = _read_file(source) if folder is None else _read_folder(folder)
    return video if fps is None else Video(video.frames, float(fps))


def read_audio_track(source: Source, *, sampling_rate: int, max_seconds: float) -> np.ndarray | None:
    """Read the audio of a video as float32 samples of one channel; None if the video has no audio track.

    FFmpeg mixes the channels and resamples, as in torchcodec, which transformers uses for videos. Raises MediaError if
    the track cannot be read.
    """
    if _folder_of(source) is not None:
        return None
    content, name = read_bytes(source)
    if (container := _container_of(content)) is None:
        return None
    with _open_container(content, name, container) as file:
        stream = file.streams.best("audio")
        if stream is None:
            return None
        resampler = importlib.import_module("av").AudioResampler(format="fltp", layout="mono", rate=sampling_rate)
        pieces, count = list[np.ndarray](), 0
        # None flushes the resampler.
        for frame in itertools.chain(file.decode(stream), [None]):
            resampled = [each.to_ndarray()[0] for each in resampler.resample(frame)]
            pieces += resampled
            count += sum(map(len, resampled))
            if count > max_seconds * sampling_rate:
                reason = f"has an audio track of more than {max_seconds:g} seconds"
                raise MediaError(name, reason, accepted=f"up to {max_seconds:g} seconds")
    if not count:
        raise MediaError(name, "has an audio track without samples", accepted="at least one sample")
    return np.concatenate(pieces)


def _folder_of(source: Source) -> Path | None:
    """The folder of a source; None for files."""
    location: Any = source.get("path") if isinstance(source, Mapping) and not source.get("bytes") else source
    with contextlib.suppress(OSError, ValueError):
        if isinstance(location, (str, Path)) and len(str(location)) < 4096 and Path(location).is_dir():
            return Path(location)
    return None


def _read_folder(folder: Path) -> Video:
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not 0 < len(files) <= MAX_FRAMES:
        reason = f"has {len(files)} images"
        raise MediaError(str(folder), reason, accepted=f"1 to {MAX_FRAMES} files of {', '.join(IMAGE_FORMATS)}")
    return Video([read_image(file, max_pixels=MAX_VIDEO_PIXELS // len(files)) for file in files], DEFAULT_FPS)


def _read_file(source: Source) -> Video:
    content, name = read_bytes(source)
    if content.startswith(NPY_PREFIX):
        return _read_array(content, name)
    if content.startswith(ANIMATIONS):
        return read_video(content, name=name)
    if (container := _container_of(content)) is None:
        formats = f"{', '.join(VIDEO_FORMATS)} animations, a folder of images, a .npy file, MP4, MOV, MKV or WebM"
        raise MediaError(name, "not a video of a supported format", accepted=formats)
    with _open_container(content, name, container) as file:
        return _read_container(file, name)


def _container_of(content: bytes) -> str | None:
    """Name of a container in FFmpeg; None for other files."""
    return next((each for each, (at, first) in CONTAINERS.items() if content[at : at + len(first)] == first), None)


@contextlib.contextmanager
def _open_container(content: bytes, name: str, container: str) -> Iterator[Any]:
    """A file opened by PyAV, whose errors become a MediaError."""
    if importlib.util.find_spec("av") is None:
        reason = "MP4, MOV, MKV and WebM files need PyAV, which is not installed"
        raise MediaError(name, reason, accepted="an animation, or pip install 'maxhydra[video]'")
    av = importlib.import_module("av")
    try:
        with av.open(io.BytesIO(content), format=container) as file:
            yield file
    except (av.FFmpegError, ValueError) as error:
        if isinstance(error, MediaError):
            raise
        raise MediaError(name, f"cannot be decoded: {error}", accepted="a video that FFmpeg decodes") from None


def _read_array(content: bytes, name: str) -> Video:
    accepted = f"uint8 frames [frames, height, width, 3] of at most {MAX_VIDEO_PIXELS} pixels"
    try:
        # read_bytes limits the size of the file, which numpy compares with the shape in its header.
        frames = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise MediaError(name, f"damaged: {error}", accepted=accepted) from None
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or not frames.size:
        raise MediaError(name, f"has shape {frames.shape} and type {frames.dtype}", accepted=accepted)
    if len(frames) > MAX_FRAMES:
        raise MediaError(name, f"has {len(frames)} frames", accepted=f"up to {MAX_FRAMES} frames")
    return Video([pillow().fromarray(frame) for frame in frames], DEFAULT_FPS)


def _read_container(file: Any, name: str) -> Video:
    if not file.streams.video:
        raise MediaError(name, "has no video stream", accepted="a video")
    stream, frames, pixels = file.streams.video[0], list[Any](), 0
    fps = float(stream.average_rate or DEFAULT_FPS)
    for frame in file.decode(stream):
        pixels += frame.width * frame.height
        if pixels > MAX_VIDEO_PIXELS or len(frames) >= MAX_FRAMES:
            accepted = f"up to {MAX_FRAMES} frames and {MAX_VIDEO_PIXELS} pixels in all"
            raise MediaError(name, "is too long", accepted=accepted)
        frames.append(frame.to_image())
    if not frames:
        raise MediaError(name, "has no frames", accepted="a video")
    return Video(frames, fps)
