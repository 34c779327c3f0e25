"""Reading images and animations: sources, formats, orientation, and files that must be rejected."""

import base64
import importlib
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from maxhydra.config import ConfigError
from maxhydra.data.images import read_image, read_video
from maxhydra.data.media import MediaError
from tests.support.pictures import frames, picture

pytestmark = pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning", "ignore::UserWarning")


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_every_source_gives_the_same_pixels(tmp_path: Path) -> None:
    content = encoded(picture(5, 9), "PNG")
    (tmp_path / "image=1.png").write_bytes(content)
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    path = tmp_path / "image=1.png"
    pixels = np.asarray(picture(5, 9))
    for source in (content, url, path, str(path), {"bytes": content}, {"bytes": None, "path": str(path)}, pixels):
        image = read_image(source)
        assert image.mode == "RGB"
        np.testing.assert_array_equal(np.asarray(image), np.asarray(picture(5, 9)))


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("JPEG", {}), ("WEBP", {"lossless": True})])
def test_formats_are_decoded_by_pillow(kind: str, options: dict) -> None:
    content = encoded(picture(16, 24), kind, **options)
    np.testing.assert_array_equal(np.asarray(read_image(content)), np.asarray(Image.open(io.BytesIO(content))))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(picture(16, 24), "PNG", exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    np.testing.assert_array_equal(np.asarray(read_image(content)), np.asarray(upright))


def small_file_of_large_image(width: int, height: int) -> bytes:
    """A PNG file with the header of an image of any size and the data of a few pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (b"no image", "not an image of a supported format; accepted: PNG, JPEG, WEBP"),
        (b"", "is empty"),
        (encoded(picture(4, 4), "BMP"), "not an image of a supported format"),
        (encoded(picture(90, 90), "PNG")[:-600], "damaged"),
        (
            small_file_of_large_image(9000, 9000),
            "9000x9000 pixels are more than the limit; accepted: up to 67108864 pixels",
        ),
        (small_file_of_large_image(60000, 60000), "exceeds limit"),
        ("https://example.com/image.png", "URLs are not fetched; accepted: a path"),
        ("file:///etc/passwd", "URLs are not fetched"),
        ("data:image/png,abc", "not a data URL with base64"),
        ("data:image/png;base64,a!b", "not base64"),
        ("data:image/png;base64,\u00e9", "not base64"),
        ("/no/such/image.png", "no such file"),
        ("iVBORw0KGgo" * 1000, "too long"),
        ("~no_such_user/image.png", "home"),
        ("/tmp", "not a regular file"),
        ("image\0.png", "image"),
        ("", "is empty"),
        ({"url": "a.png"}, "is empty"),
        (7, "of type int"),
        (np.zeros((2, 2), np.uint8), "an array of shape (2, 2)"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "bytes",
)
def test_unusable_images_are_named(source: Any, reason: str) -> None:
    with pytest.raises(MediaError) as error:
        read_image(source)
    assert reason in str(error.value) and "accepted: " in str(error.value)
    with pytest.raises(MediaError, match=r"^record 7: "):
        read_image(source, name="record 7")


@pytest.mark.parametrize(("kind", "options"), [("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})])
def test_frames_and_rate_of_animations(kind: str, options: dict) -> None:
    first, *others = frames(4, 12, 10)
    content = encoded(first, kind, save_all=True, append_images=others, duration=[40, 40, 40, 80], **options)
    video = read_video(content)
    assert len(video.frames) == 4 and video.fps == pytest.approx(20)
    if kind != "GIF":
        for read_frame, frame in zip(video.frames, frames(4, 12, 10), strict=True):
            np.testing.assert_array_equal(np.asarray(read_frame), np.asarray(frame))


def test_long_animations_are_rejected_before_decoding() -> None:
    first, *others = frames(4, 12, 10)
    content = encoded(first, "GIF", save_all=True, append_images=others, duration=40)
    with pytest.raises(MediaError, match="10x12x4 pixels are more than the limit"):
        read_video(content, max_pixels=400)


def test_damaged_files_raise_no_other_error() -> None:
    """Bytes changed at random: the file is read, or the error names it."""
    first, *others = frames(3, 12, 10)
    animated = {"save_all": True, "append_images": others, "duration": 40}
    contents = [encoded(first, kind) for kind in ("PNG", "JPEG", "WEBP")]
    contents += [encoded(first, kind, **animated) for kind in ("PNG", "GIF", "WEBP")]
    generator, rejected = np.random.default_rng(0), 0
    for number in range(600):
        content = bytearray(contents[number % len(contents)])
        for at in generator.integers(len(content), size=4):
            content[at] = generator.integers(256)
        for read in (read_image, read_video):
            try:
                read(bytes(content[: generator.integers(8, 2 * len(content))]), name="file")
            except MediaError as error:
                rejected += str(error).startswith("file: ")
    assert rejected > 300


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"needs the package PIL(.|\n)*maxhydra\[vision\]"):
        read_image(encoded(picture(2, 2), "PNG"))
