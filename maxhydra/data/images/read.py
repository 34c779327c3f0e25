"""Reads images and animations from paths, bytes and data URLs; checks their size before decoding them."""

import contextlib
import io
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from maxhydra.data.media import MediaError, Source, read_bytes
from maxhydra.data.records import need

if TYPE_CHECKING:
    from PIL import Image

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP")
VIDEO_FORMATS = ("GIF", "WEBP", "PNG")
# Limits of an image, and of all frames of a video together: 64 and 512 million pixels.
MAX_IMAGE_PIXELS = 2**26
MAX_VIDEO_PIXELS = 2**29
MAX_FRAMES = 4096
# Duration of a frame if the file gives none or zero, in milliseconds, as browsers play it.
DEFAULT_FRAME_MS = 100
# Exceptions of Pillow's decoders for damaged files, in addition to DecompressionBombError.
_DECODING_ERRORS = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error)


@dataclass(frozen=True)
class Video:
    """Frames in order of time, at a constant rate in frames per second."""

    frames: Sequence["Image.Image"]
    fps: float


def pillow() -> ModuleType:
    """Return `PIL.Image`, or raise an error that says how to install it."""
    return need("PIL.Image", "data=images", extra="vision")


def to_rgb(image: "Image.Image") -> "Image.Image":
    """Convert an image of any mode to RGB, with transparent parts composited onto white."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    background = pillow().new("RGBA", image.size, (255, 255, 255, 255))
    return pillow().alpha_composite(background, image).convert("RGB")


def read_image(
    source: Source | np.ndarray, *, name: str | None = None, max_pixels: int = MAX_IMAGE_PIXELS
) -> "Image.Image":
    """Read an image as RGB, upright by its EXIF orientation. An animation gives its first frame.

    Bytes [height, width, 3] of pixels are accepted too.
    """
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[-1] != 3 or not source.size:
            reason = f"an array of shape {source.shape} and type {source.dtype}"
            raise MediaError(name or "image", reason, accepted="uint8 arrays [height, width, 3]")
        return pillow().fromarray(source)
    transpose = need("PIL.ImageOps", "data=images", extra="vision").exif_transpose
    content, name = read_bytes(source, name=name)
    with _decoding(name, IMAGE_FORMATS), _open(content, name, IMAGE_FORMATS) as image:
        _check_pixels(image, name, max_pixels)
        return to_rgb(transpose(image))


def read_video(source: Source, *, name: str | None = None, max_pixels: int = MAX_VIDEO_PIXELS) -> Video:
    """Read the frames of an animation as RGB; the rate is the mean of the durations in the file."""
    content, name = read_bytes(source, name=name)
    frames, milliseconds = [], 0.0
    with _decoding(name, VIDEO_FORMATS), _open(content, name, VIDEO_FORMATS) as image:
        count = getattr(image, "n_frames", 1)
        if count > MAX_FRAMES:
            raise MediaError(name, f"{count} frames are more than the limit", accepted=f"up to {MAX_FRAMES} frames")
        _check_pixels(image, name, max_pixels, frames=count)
        for index in range(count):
            image.seek(index)
            frames.append(to_rgb(image))
            milliseconds += image.info.get("duration") or DEFAULT_FRAME_MS
    return Video(frames, fps=1000 * count / milliseconds)


@contextlib.contextmanager
def _decoding(name: str, formats: tuple[str, ...]) -> Iterator[None]:
    """Turn the exceptions of Pillow's decoders for damaged files into a MediaError."""
    damaged = (pillow().DecompressionBombError, *_DECODING_ERRORS)
    try:
        yield
    except MediaError:
        raise
    except damaged as error:
        raise MediaError(name, f"damaged: {error}", accepted=f"{', '.join(formats)} files") from None


def _open(content: bytes, name: str, formats: tuple[str, ...]) -> "Image.Image":
    try:
        return pillow().open(io.BytesIO(content), formats=formats)
    except pillow().UnidentifiedImageError:
        reason = "not an image of a supported format"
        raise MediaError(name, reason, accepted=f"{', '.join(formats)} files") from None


def _check_pixels(image: "Image.Image", name: str, limit: int, *, frames: int = 1) -> None:
    """Reject an image by the size in its header, before it is decoded."""
    if image.width * image.height * frames > limit:
        size = f"{image.width}x{image.height}" + (f"x{frames}" if frames > 1 else "")
        raise MediaError(name, f"{size} pixels are more than the limit", accepted=f"up to {limit} pixels")
