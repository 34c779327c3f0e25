"""Audio in conversations: frames of clips, their places in the text, and their placeholder tokens.

A content part {"type": "audio"} becomes CLIP_MARKER in the text that a chat template renders. The tokenizer replaces
every marker by one placeholder, with the tokens around it; it repeats once the lengths of the clips are known.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from maxhydra.config.schema.audio import Audio, AudioFeatures
from maxhydra.data.audio.features import MAX_SAMPLES, CenteredPower, FeatureExtractor, SemicausalMagnitude
from maxhydra.data.audio.read import MAX_SECONDS, read_audio, resample
from maxhydra.data.image_tokens import ImageTokenizer
from maxhydra.data.media import MediaError
from maxhydra.data.tokenizers import Tokenizer

# A noncharacter, which Unicode reserves for internal use.
CLIP_MARKER = "\ufdd0"
# Highest frequency of the mel bands of magnitudes, in hertz.
MAX_FREQUENCY = 8000.0
# Types of content parts that are audio.
AUDIO_PARTS = ("audio", "audio_url", "input_audio")


def clip_frames(source: Any, audio: Audio, *, max_seconds: float = MAX_SECONDS) -> np.ndarray:
    """[frames, bands] of a path, data URL, bytes, {bytes, path}, {array, sampling_rate} or array of samples.

    Raises MediaError if it cannot be read, or is longer than `max_seconds`.
    """
    rate = audio.sampling_rate
    if audio.features is AudioFeatures.semicausal_magnitude:
        max_seconds = min(max_seconds, MAX_SAMPLES / rate)
    extract = _extractor(audio.features, audio.num_bands, rate, audio.hop_length, audio.frame_length)
    extracted = extract([_samples(source, rate, max_seconds)])
    return extracted.features[0, extracted.mask[0]]


def _samples(source: Any, rate: int, max_seconds: float) -> np.ndarray:
    if isinstance(source, Mapping) and source.get("array") is not None:
        given = source.get("sampling_rate")
        if not isinstance(given, int) or given < 1:
            raise MediaError("audio", f"has the sampling rate {given!r}", accepted="a positive integer")
        samples = resample(np.asarray(source["array"], np.float32), given, rate)
    elif isinstance(source, np.ndarray):
        samples = source
    else:
        samples = read_audio(source, sampling_rate=rate, max_seconds=max_seconds)
    # Resampling rounds the length up.
    if len(samples) > max_seconds * rate + 1:
        raise MediaError(
            "audio", f"is {len(samples) / rate:.1f} seconds long", accepted=f"up to {max_seconds:g} seconds"
        )
    return samples[: int(max_seconds * rate)]


@cache
def _extractor(kind: AudioFeatures, bands: int, rate: int, hop: int, length: int) -> FeatureExtractor:
    if kind is AudioFeatures.centered_power:
        return CenteredPower(feature_size=bands, sampling_rate=rate, hop_length=hop, n_fft=length)
    return SemicausalMagnitude(
        feature_size=bands,
        sampling_rate=rate,
        frame_length_ms=length * 1000 / rate,
        hop_length_ms=hop * 1000 / rate,
        max_frequency=min(MAX_FREQUENCY, rate / 2),
    )


class Clips(NamedTuple):
    """Audio clips of one sequence."""

    frames: np.ndarray
    """[clips, frames, bands] float32, zeros after the end of each clip."""
    lengths: np.ndarray
    """[clips] int32 frames of each clip."""


def stack_clips(clips: Sequence[np.ndarray], *, count: int, shape: tuple[int, int]) -> Clips:
    """Pad each of the clips to `shape`, and their number to `count`."""
    stacked, lengths = np.zeros((count, *shape), np.float32), np.zeros(count, np.int32)
    for index, clip in enumerate(clips):
        stacked[index, : len(clip)], lengths[index] = clip, len(clip)
    return Clips(stacked, lengths)


class ClipTokenizer(ImageTokenizer):
    """A tokenizer that replaces markers in rendered conversations by one placeholder and the tokens around it."""

    marker = CLIP_MARKER

    def __init__(self, tokenizer: Tokenizer, audio: Audio):
        ids = (audio.begin_id, audio.placeholder_id, audio.end_id)
        self._tokenizer, self._ids = tokenizer, np.array([id for id in ids if id is not None], np.int32)
        self._separator = ""


def placeholder_counts(tokens: np.ndarray, lengths: Sequence[int], audio: Audio) -> np.ndarray:
    """How often each token repeats: placeholders as often as their clip, of this many frames, has tokens.

    Raises MediaError unless there is one placeholder for each clip.
    """
    is_placeholder = tokens == audio.placeholder_id
    if (count := int(np.count_nonzero(is_placeholder))) != len(lengths):
        raise MediaError("messages", f"has {len(lengths)} audio clips, but {count} audio parts in its messages")
    counts = np.ones(len(tokens), np.int64)
    counts[is_placeholder] = [audio.num_tokens(length) for length in lengths]
    return counts
