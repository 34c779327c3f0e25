"""Reading videos: folders, arrays, animations and containers, and files that must be rejected."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maxhydra.data.images import read_any_video, read_audio_track
from maxhydra.data.images.video_files import DEFAULT_FPS
from maxhydra.data.media import MediaError
from tests.support.containers import matroska
from tests.support.pictures import frames
from tests.support.skips import import_optional

PICTURES = frames(5, 16, 24)
PIXELS = np.stack([np.asarray(frame) for frame in PICTURES])


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def mp4() -> bytes:
    """Five frames of one colour each, at 8 frames per second."""
    av = import_optional("av", extra="video")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        for number in range(5):
            picture = np.full((16, 32, 3), 50 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def test_folders_and_arrays_have_their_frames(tmp_path: Path) -> None:
    for number, frame in enumerate(PICTURES):
        frame.save(tmp_path / f"{number:03}.png")
    (tmp_path / "notes.txt").write_text("not a frame")
    content = npy(PIXELS)
    url = "data:video/npy;base64," + base64.b64encode(content).decode()
    for source in (tmp_path, str(tmp_path), {"path": str(tmp_path)}, content, url, {"bytes": content}):
        video = read_any_video(source)
        assert video.fps == DEFAULT_FPS
        np.testing.assert_array_equal([np.asarray(frame) for frame in video.frames], PIXELS)
    assert read_any_video({"bytes": content, "fps": 3}).fps == 3.0


def test_animations_have_their_own_rate() -> None:
    buffer = io.BytesIO()
    PICTURES[0].save(buffer, "WEBP", save_all=True, append_images=PICTURES[1:], duration=125, lossless=True)
    video = read_any_video(buffer.getvalue())
    assert video.fps == 8.0
    np.testing.assert_array_equal([np.asarray(frame) for frame in video.frames], PIXELS)


def test_containers_are_decoded_by_pyav() -> None:
    video = read_any_video(mp4())
    assert video.fps == 8.0 and [frame.size for frame in video.frames] == [(32, 16)] * 5
    np.testing.assert_allclose([np.asarray(frame).mean() for frame in video.frames], np.arange(5) * 50, atol=4)


def test_audio_tracks_have_the_samples_of_the_file(tmp_path: Path) -> None:
    """At the rate of the file they are equal; a tone of 48 kHz is the same tone at 16 kHz. Other videos have none."""
    limits = {"sampling_rate": 16000, "max_seconds": 0.5}
    samples = np.random.default_rng(0).integers(-(2**15), 2**15, (1, 8000)).astype(np.int16)
    np.testing.assert_array_equal(read_audio_track(matroska(PIXELS, 8, samples), **limits), samples[0] / 2**15)
    tone = (10000 * np.sin(2 * np.pi * 440 * np.arange(24000) / 48000)).astype(np.int16)
    resampled = read_audio_track(matroska(PIXELS, 8, tone[None], 48000), **limits)
    assert resampled is not None and len(resampled) == 8000
    expected = 10000 / 2**15 * np.sin(2 * np.pi * 440 * np.arange(8000) / 16000)
    np.testing.assert_allclose(resampled[100:-100], expected[100:-100], atol=1e-3)
    for source in (matroska(PIXELS, 8), npy(PIXELS), {"path": str(tmp_path)}):
        assert read_audio_track(source, **limits) is None
    with pytest.raises(MediaError, match=r"audio track of more than 0\.25 seconds"):
        read_audio_track(matroska(PIXELS, 8, samples), sampling_rate=16000, max_seconds=0.25)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (b"#EXTM3U\nhttp://localhost/x.ts\n", "not a video of a supported format"),
        ("http://localhost/x.mp4", "URLs are not fetched"),
        (npy(PIXELS.astype(np.float32)), "type float32"),
        (npy(PIXELS[0]), "shape"),
        (npy(np.array([{"a": 1}], object)), "damaged"),
        (npy(PIXELS)[:200], "damaged"),
        ({"bytes": npy(PIXELS), "fps": 0}, "fps=0"),
        ({"bytes": npy(PIXELS), "fps": "x"}, "fps=x"),
        (b"\x00\x00\x00\x18ftypmp42" + bytes(40), "cannot be decoded|has no"),
    ],
)
def test_unusable_videos_are_rejected(source: bytes | str | dict, reason: str) -> None:
    import_optional("av", extra="video")
    with pytest.raises(MediaError, match=reason):
        read_any_video(source)


def test_a_folder_without_images_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="has 0 images"):
        read_any_video(tmp_path)
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    assert len(read_any_video(tmp_path).frames) == 1
