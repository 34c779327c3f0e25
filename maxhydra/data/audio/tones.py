"""Generated tones, with questions about their note. An example depends on seed and index alone."""

from dataclasses import dataclass

import numpy as np

NOTES = ("C", "C#", "D", "D#", "E", "F", "F#", "G", "G#", "A", "A#", "B")
# Octaves in scientific pitch notation: 131 to 988 Hz.
OCTAVES = (3, 4, 5)
# Frequency of A4 in hertz.
CONCERT_PITCH = 440.0


@dataclass(frozen=True)
class ToneExample:
    """Samples of one channel in float32, a question about them, and its reply."""

    samples: np.ndarray
    question: str
    reply: str


def frequency_of(note: str, octave: int) -> float:
    """Frequency of a note in twelve-tone equal temperament, in hertz."""
    return CONCERT_PITCH * 2 ** (octave - 4 + (NOTES.index(note) - NOTES.index("A")) / 12)


def tone_example(seed: int, index: int, *, sampling_rate: int = 16000, seconds: float = 0.5) -> ToneExample:
    """Make example `index`: a note with three overtones, a random loudness, fade and a little noise."""
    generator = np.random.default_rng((seed, index))
    note, octave = str(generator.choice(NOTES)), int(generator.choice(OCTAVES))
    times = np.arange(round(seconds * sampling_rate)) / sampling_rate
    strengths = np.array([1.0, *generator.uniform(0, 0.4, 3)])
    phases = generator.uniform(0, 2 * np.pi, len(strengths))
    harmonics = np.arange(1, len(strengths) + 1)
    angles = 2 * np.pi * frequency_of(note, octave) * harmonics[:, None] * times + phases[:, None]
    wave = strengths @ np.sin(angles) / strengths.sum()
    wave = wave * np.exp(-times * generator.uniform(0, 3)) * generator.uniform(0.2, 0.8)
    samples = (wave + generator.normal(0, 0.002, len(times))).astype(np.float32)
    return ToneExample(samples, "Which note is this?", note)
