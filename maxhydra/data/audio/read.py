"""Reads WAV and FLAC files as one channel at the sampling rate of a model."""

import io
import math

import numpy as np

from maxhydra.data.media import MediaError, Source, read_bytes
from maxhydra.data.records import need

FORMATS = ("WAV", "WAVEX", "FLAC")
MAX_SECONDS = 3600.0
# Sampling rates from telephone to studio; libsndfile accepts any positive number.
RATES = (1000, 384_000)


def read_audio(
    source: Source, *, sampling_rate: int, name: str | None = None, max_seconds: float = MAX_SECONDS
) -> np.ndarray:
    """Read a file as float32 samples in [-1, 1]: the mean of its channels, resampled to `sampling_rate`."""
    library = need("soundfile", "data=audio", extra="audio")
    content, name = read_bytes(source, name=name)
    try:
        with library.SoundFile(io.BytesIO(content)) as file:
            if file.format not in FORMATS:
                raise MediaError(name, f"is a {file.format} file", accepted="WAV and FLAC files")
            if not RATES[0] <= file.samplerate <= RATES[1]:
                accepted = f"sampling rates from {RATES[0]} to {RATES[1]}"
                raise MediaError(name, f"has the sampling rate {file.samplerate}", accepted=accepted)
            if file.frames > max_seconds * file.samplerate:
                seconds = file.frames / file.samplerate
                raise MediaError(name, f"is {seconds:.1f} seconds long", accepted=f"up to {max_seconds:g} seconds")
            samples, rate = file.read(dtype="float32", always_2d=True).mean(axis=1), file.samplerate
    except library.LibsndfileError as error:
        raise MediaError(name, f"not readable: {error.error_string}", accepted="WAV and FLAC files") from None
    if not len(samples):
        raise MediaError(name, "has no samples", accepted="at least one sample")
    if not np.isfinite(samples).all():
        raise MediaError(name, "has samples that are not finite", accepted="finite samples")
    return resample(samples, rate, sampling_rate)


def resample(samples: np.ndarray, rate: int, new_rate: int) -> np.ndarray:
    """Change the sampling rate with a polyphase low-pass filter; the length is rounded up."""
    if rate == new_rate:
        return samples
    divisor = math.gcd(rate, new_rate)
    signal = need("scipy.signal", "data=audio", extra="audio")
    # Half the length in input samples times the larger factor: a transition band of 4 % of the lower rate.
    up, down = new_rate // divisor, rate // divisor
    taps = signal.firwin(2 * 64 * max(up, down) + 1, 0.96 / max(up, down), window=("kaiser", 12.0))
    return signal.resample_poly(samples, up, down, window=taps).astype(np.float32)
