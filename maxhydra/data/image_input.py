"""Images of records and requests: files, bytes and data URLs become pixels of the size that a model takes."""

import base64
import binascii
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maxhydra.data.records import need

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
# Limits of one image; decoding takes four bytes per pixel.
MAX_BYTES, MAX_PIXELS = 20 * 2**20, 2**26
DATA_URL = "data:image/"


class ImageError(ValueError):
    """An image that cannot be read; the message names the cause."""


def read_image(value: Any) -> "Image.Image":
    """Read an image as RGB: a path, a data URL, the bytes of a file, {bytes, path}, or an array [H, W, 3] of bytes."""
    pillow = need("PIL.Image", "data.record_type=image_chat", extra="vision")
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3 and value.shape[-1] == 3:
        return pillow.fromarray(value)
    content = value if isinstance(value, bytes) else _content(value)
    if len(content) > MAX_BYTES:
        raise ImageError(f"an image has {len(content):,} bytes, more than {MAX_BYTES:,}")
    try:
        image = pillow.open(io.BytesIO(content), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise ImageError(f"an image has {image.width} x {image.height} pixels, more than {MAX_PIXELS:,}")
        return image.convert("RGB")
    except ImageError:
        raise
    except Exception as error:  # damaged files raise many types, and Pillow its own for those of other formats
        raise ImageError(f"an image cannot be read ({', '.join(FORMATS)} can): {str(error)[:200]}") from None


def decode_data_url(url: str) -> bytes:
    """The bytes of a base64 data URL; other URLs are never fetched."""
    header, _, content = url.partition(",")
    if not header.startswith(DATA_URL) or not header.endswith(";base64"):
        raise ImageError(f"an image URL starts with {url[:32]!r}; expected {DATA_URL}png;base64,... or another format")
    if len(content) > 4 * (MAX_BYTES // 3 + 1):
        raise ImageError(f"an image has more than {MAX_BYTES:,} bytes")
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"an image URL is not valid base64: {error}") from None


def image_pixels(image: "Image.Image", size: int) -> np.ndarray:
    """[size, size, 3] pixels from -1 to 1, by bilinear resampling."""
    resized = image.resize((size, size), resample=2)
    return np.asarray(resized, np.float32) / np.float32(127.5) - np.float32(1)


def _content(value: Any) -> bytes:
    if not isinstance(value, str):
        raise ImageError(f"an image is of type {type(value).__name__}, expected a path, a data URL or bytes")
    if value.startswith("data:"):
        return decode_data_url(value)
    path = Path(value).expanduser()
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ImageError(f"{value} has {path.stat().st_size:,} bytes, more than {MAX_BYTES:,}")
        return path.read_bytes()
    except OSError as error:
        raise ImageError(f"{value} cannot be read: {error.strerror}") from None
