"""Reading audio: channels, sampling rates, and files that must be rejected."""

import io
import struct

import numpy as np
import pytest
import soundfile

from maxhydra.data.audio import read_audio
from maxhydra.data.audio.read import resample
from maxhydra.data.media import MediaError


def encoded(samples: np.ndarray, rate: int, kind: str, **options: str) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, **options)
    return buffer.getvalue()


def tone(frequency: float, rate: int, count: int) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(count) / rate)


@pytest.mark.parametrize(("kind", "options"), [("WAV", {"subtype": "FLOAT"}), ("WAV", {}), ("FLAC", {})])
def test_channels_are_averaged(kind: str, options: dict) -> None:
    stereo = np.stack([tone(440, 16000, 801), tone(660, 16000, 801)], axis=1)
    samples = read_audio(encoded(stereo, 16000, kind, **options), sampling_rate=16000)
    assert samples.dtype == np.float32 and samples.shape == (801,)
    np.testing.assert_allclose(samples, stereo.mean(axis=1), atol=2**-15)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_resampled_tones_stay_tones(rate: int) -> None:
    """Against the tone itself at the new rate, away from the ends."""
    count = rate // 2 + 1
    samples = resample(tone(1000, rate, count), rate, 16000)
    assert len(samples) == -(-count * 16000 // rate)
    np.testing.assert_allclose(samples[1000:-1000], tone(1000, 16000, len(samples))[1000:-1000], atol=1e-4)


def test_tones_above_half_the_new_rate_are_removed() -> None:
    assert abs(resample(tone(9000, 48000, 24000), 48000, 16000)[1000:-1000]).max() < 1e-4


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"no audio", "not readable"),
        (encoded(tone(1, 100, 50), 16000, "OGG"), "is a OGG file; accepted: WAV and FLAC"),
        (encoded(np.zeros(0), 16000, "WAV"), "has no samples"),
        (encoded(np.array([0.0, np.nan]), 16000, "WAV", subtype="FLOAT"), "not finite"),
        (encoded(tone(1, 100, 50), 100, "WAV"), "sampling rate 100; accepted: sampling rates from"),
        (encoded(tone(1, 100, 6000), 1000, "WAV"), "is 6.0 seconds long; accepted: up to 5 seconds"),
    ],
    ids=["text", "ogg", "empty", "nan", "sampling_rate", "too_long"],
)
def test_unusable_files_are_named(content: bytes, reason: str) -> None:
    with pytest.raises(MediaError, match=f"^clip 3: .*{reason}"):
        read_audio(content, sampling_rate=16000, name="clip 3", max_seconds=5)


def test_a_wrong_length_in_the_header_is_harmless() -> None:
    """A header may claim more data than the file holds."""
    content = bytearray(encoded(tone(440, 16000, 400), 16000, "WAV"))
    at = content.index(b"data") + 4
    content[at : at + 4] = struct.pack("<I", 2**31)
    assert len(read_audio(bytes(content), sampling_rate=16000)) == 400
