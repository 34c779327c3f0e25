"""Generated tones: determinism, and the note as the peak of the spectrum."""

import numpy as np
import pytest

from maxhydra.data.audio.tones import NOTES, frequency_of, tone_example


def test_frequencies_are_those_of_a_piano() -> None:
    assert frequency_of("A", 4) == 440 and round(frequency_of("C", 4), 2) == 261.63
    assert round(frequency_of("B", 5), 2) == 987.77


def test_examples_depend_on_seed_and_index_alone() -> None:
    for index in (0, 7, 10**12):
        first, again = tone_example(1, index), tone_example(1, index)
        np.testing.assert_array_equal(first.samples, again.samples)
        assert first.reply == again.reply and first.samples.dtype == np.float32
    assert not np.array_equal(tone_example(1, 0).samples, tone_example(2, 0).samples)


@pytest.mark.slow
def test_the_reply_is_the_note_of_the_strongest_frequency() -> None:
    examples = [tone_example(0, index) for index in range(200)]
    for example in examples:
        spectrum = abs(np.fft.rfft(example.samples * np.hanning(len(example.samples)), n=2**16))
        frequency = np.argmax(spectrum) * 16000 / 2**16
        note = round(12 * np.log2(frequency / 440)) % 12
        assert NOTES[(note + NOTES.index("A")) % 12] == example.reply
        assert abs(example.samples).max() < 1
    assert {example.reply for example in examples} == set(NOTES)
