"""Log-mel features of audio, in two mechanisms, and the number of tokens that an audio encoder makes of them.

| mechanism | frames | spectrum | logarithm |
|---|---|---|---|
| centered_power | centered, reflected at both ends | power, Slaney mel bands | base 10, 8 decades below the maximum |
| semicausal_magnitude | half a frame of zeros before | magnitude, HTK mel bands | natural, of value plus floor |
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np

from maxhydra.data.media import (
    MediaError,
    boolean,
    class_entry,
    number,
    numbers,
    parse_settings,
    positive_int,
    positive_number,
    setting,
)

# Settings with one supported value.
_REQUIRED = {"padding_value": 0.0, "dither": 0.0, "padding_side": "right"}
# Clips of semicausal features are cut after 30 seconds at 16 kHz, and padded to a multiple.
MAX_SAMPLES, SAMPLE_MULTIPLE = 480_000, 128


@dataclass(frozen=True)
class AudioFeatures:
    """Features [clips, frames, bands] in float32, the mask [clips, frames] of real frames, and tokens per clip."""

    features: np.ndarray
    mask: np.ndarray
    tokens: tuple[int, ...]


class FeatureExtractor(Protocol):
    """Turns waveforms (one channel, at `sampling_rate`) into features, padded to the longest clip."""

    @property
    def sampling_rate(self) -> int: ...

    def __call__(self, waveforms: Sequence[np.ndarray]) -> AudioFeatures: ...


@dataclass(frozen=True)
class CenteredPower:
    """Centered frames and power spectra. `n_window` is half the number of frames that the encoder reads at once."""

    feature_size: int = setting(positive_int)
    sampling_rate: int = setting(positive_int, 16000)
    hop_length: int = setting(positive_int, 160)
    n_fft: int = setting(positive_int, 400)
    n_window: int = setting(positive_int, 50)

    def __call__(self, waveforms: Sequence[np.ndarray]) -> AudioFeatures:
        padded, lengths = _pad(waveforms, multiple=1)
        _check_length(lengths.max(), max(self.n_fft // 2 + 1, self.hop_length))
        bands = mel_filters(
            self.n_fft // 2 + 1, self.feature_size, rate=self.sampling_rate, frequencies=(0.0, 8000.0), slaney=True
        )
        features = np.stack([self._log_mel(waveform, bands) for waveform in padded])
        starts = np.arange(features.shape[1]) * self.hop_length
        mask = starts < lengths[:, None]
        return AudioFeatures(features, mask, tuple(self._tokens(int(count)) for count in mask.sum(axis=1)))

    def _log_mel(self, waveform: np.ndarray, bands: np.ndarray) -> np.ndarray:
        """Features of one clip; the frame centered at its end is dropped."""
        reflected = np.pad(waveform.astype(np.float64), self.n_fft // 2, mode="reflect")
        frames = _frames(reflected, self.n_fft, self.hop_length)[:-1]
        power = np.abs(np.fft.rfft(frames * _hann(self.n_fft))) ** 2
        # Not a matmul: the threads of BLAS wait for each other while a training step uses the same cores, 30 ms a clip.
        energies = np.einsum("fb,bm->fm", power, bands)
        logarithm = np.log10(np.maximum(energies, 1e-10))
        return ((np.maximum(logarithm, logarithm.max() - 8) + 4) / 4).astype(np.float32)

    def _tokens(self, frames: int) -> int:
        """Tokens of three convolutions with stride 2, applied to chunks of `2 * n_window` frames."""
        chunks, rest = divmod(frames, 2 * self.n_window)
        return chunks * _strided(2 * self.n_window, 3) + _strided(rest, 3)


@dataclass(frozen=True)
class SemicausalMagnitude:
    """Frames after half a frame of zeros, magnitude spectra, and two convolutions with stride 2 in the encoder."""

    feature_size: int = setting(positive_int, 128)
    sampling_rate: int = setting(positive_int, 16000)
    frame_length_ms: float = setting(positive_number, 20.0)
    hop_length_ms: float = setting(positive_number, 10.0)
    min_frequency: float = setting(number, 0.0)
    max_frequency: float = setting(positive_number, 8000.0)
    preemphasis: float = setting(number, 0.0)
    preemphasis_htk_flavor: bool = setting(boolean, True)
    fft_overdrive: bool = setting(boolean, False)
    input_scale_factor: float = setting(positive_number, 1.0)
    mel_floor: float = setting(positive_number, 1e-3)
    per_bin_mean: tuple[float, ...] | None = setting(numbers, None)
    per_bin_stddev: tuple[float, ...] | None = setting(numbers, None)

    def __call__(self, waveforms: Sequence[np.ndarray]) -> AudioFeatures:
        padded, lengths = _pad([waveform[:MAX_SAMPLES] for waveform in waveforms], multiple=SAMPLE_MULTIPLE)
        length, hop = self._samples(self.frame_length_ms), self._samples(self.hop_length_ms)
        _check_length(lengths.min(), length - length // 2 + 1)
        padded = np.pad(padded * np.float32(self.input_scale_factor), ((0, 0), (length // 2, 0)))
        frames = _frames(padded, length + 1, hop)
        ends = np.arange(frames.shape[1]) * hop + length - length // 2
        mask = ends < lengths[:, None]
        features = self._log_mel(self._emphasize(frames), length).astype(np.float32) * mask[..., None]
        return AudioFeatures(features, mask, tuple(int(row[::4].sum()) for row in mask))

    def _samples(self, milliseconds: float) -> int:
        return round(self.sampling_rate * milliseconds / 1000)

    def _emphasize(self, frames: np.ndarray) -> np.ndarray:
        """Subtract a part of the preceding sample; HTK scales the first sample of a frame instead."""
        if self.preemphasis <= 0:
            return frames[..., :-1]
        if not self.preemphasis_htk_flavor:
            return frames[..., 1:] - self.preemphasis * frames[..., :-1]
        first = frames[..., :1] * (1 - self.preemphasis)
        return np.concatenate([first, frames[..., 1:-1] - self.preemphasis * frames[..., :-2]], axis=-1)

    def _log_mel(self, frames: np.ndarray, length: int) -> np.ndarray:
        """Features of frames [clips, frames, samples]; the spectrum is in float32, as in transformers."""
        fft_length = 2 ** math.ceil(math.log2(length)) * (2 if self.fft_overdrive else 1)
        frequencies = (self.min_frequency, self.max_frequency)
        bands = mel_filters(
            fft_length // 2 + 1, self.feature_size, rate=self.sampling_rate, frequencies=frequencies, slaney=False
        )
        spectrum = np.abs(np.fft.rfft(frames * _hann(length).astype(np.float32), n=fft_length, axis=-1))
        features = np.log(spectrum @ bands + self.mel_floor)
        features = features if self.per_bin_mean is None else features - np.array(self.per_bin_mean)
        return features if self.per_bin_stddev is None else features / np.array(self.per_bin_stddev)


_MECHANISMS: dict[str, type[CenteredPower] | type[SemicausalMagnitude]] = {
    "centered_power": CenteredPower,
    "semicausal_magnitude": SemicausalMagnitude,
}


def make_extractor(settings: Mapping[str, Any]) -> FeatureExtractor:
    """Return the feature extractor that the settings of a Hugging Face folder describe.

    Unknown and unsupported settings raise a ConfigError.
    """
    entry = class_entry("feature_extractor_type", settings)
    others = ("image", "processor", "audio_chunk")
    kind, defaults = _MECHANISMS[entry["mechanism"]], entry.get("defaults", {})
    return parse_settings(kind, settings, defaults=defaults, required=_REQUIRED, others=others)


@cache
def mel_filters(bins: int, count: int, *, rate: int, frequencies: tuple[float, float], slaney: bool) -> np.ndarray:
    """Triangular mel bands [bins, count] over the frequencies of a spectrum up to half the sampling rate.

    Slaney's scale is linear below 1 kHz and logarithmic above, with bands of equal area; HTK's is logarithmic, with
    bands of equal height.
    """
    to_mel, to_hertz = (_slaney_mel, _slaney_hertz) if slaney else (_htk_mel, _htk_hertz)
    low, high = (float(to_mel(np.array([frequency]))[0]) for frequency in frequencies)
    edges = to_hertz(np.linspace(low, high, count + 2))
    spectrum = np.linspace(0, rate // 2, bins)
    rising = (spectrum[:, None] - edges[None, :-2]) / np.diff(edges)[:-1]
    falling = (edges[None, 2:] - spectrum[:, None]) / np.diff(edges)[1:]
    bands = np.maximum(0, np.minimum(rising, falling))
    return bands * (2 / (edges[2:] - edges[:-2])) if slaney else bands


def _htk_mel(hertz: np.ndarray) -> np.ndarray:
    return 2595 * np.log10(1 + hertz / 700)


def _htk_hertz(mel: np.ndarray) -> np.ndarray:
    return 700 * (10 ** (mel / 2595) - 1)


def _slaney_mel(hertz: np.ndarray) -> np.ndarray:
    return np.where(hertz < 1000, hertz * 3 / 200, 15 + np.log(np.maximum(hertz, 1000) / 1000) * 27 / math.log(6.4))


def _slaney_hertz(mel: np.ndarray) -> np.ndarray:
    return np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((np.maximum(mel, 15) - 15) * math.log(6.4) / 27))


def _hann(length: int) -> np.ndarray:
    """Periodic Hann window."""
    return np.hanning(length + 1)[:-1]


def _frames(waveform: np.ndarray, size: int, hop: int) -> np.ndarray:
    """Overlapping frames [..., count, size] of the last axis."""
    return np.lib.stride_tricks.sliding_window_view(waveform, size, axis=-1)[..., ::hop, :]


def _pad(waveforms: Sequence[np.ndarray], *, multiple: int) -> tuple[np.ndarray, np.ndarray]:
    """Stack clips of one channel with zeros after them; also return their lengths."""
    for index, waveform in enumerate(waveforms):
        if waveform.ndim != 1 or not waveform.size:
            raise MediaError(f"clip {index}", f"has the shape {waveform.shape}", accepted="samples of one channel")
    if not waveforms:
        raise MediaError("audio", "has no clips", accepted="at least one clip")
    lengths = np.array([len(waveform) for waveform in waveforms])
    padded = np.zeros((len(waveforms), -(-lengths.max() // multiple) * multiple), np.float32)
    for row, waveform in zip(padded, waveforms, strict=True):
        row[: len(waveform)] = waveform
    return padded, lengths


def _check_length(samples: int, least: int) -> None:
    if samples < least:
        raise MediaError("audio", f"a clip of {samples} samples has no frame", accepted=f"at least {least} samples")


def _strided(length: int, layers: int) -> int:
    """Length after convolutions with stride 2, kernel size 3 and padding 1."""
    for _ in range(layers):
        length = (length - 1) // 2 + 1
    return length
