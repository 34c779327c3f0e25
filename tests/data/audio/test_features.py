"""Log-mel features against the feature extractors of transformers, and against the formulas of tokens."""

import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.data.audio import make_extractor
from maxhydra.data.media import MediaError
from tests.support.skips import import_optional

transformers = import_optional("transformers", extra="parity")
CENTERED = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128}
SEMICAUSAL = {"feature_extractor_type": "Gemma4AudioFeatureExtractor"}
LENGTHS = (201, 1600, 4801, 9999)


def clips(kind: str) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    if kind == "noise":
        return [generator.normal(0, 0.1, length).astype(np.float32) for length in LENGTHS]
    return [np.float32(0.5 * np.sin(2 * np.pi * 440 * np.arange(length) / 16000)) for length in LENGTHS]


@pytest.mark.parametrize("kind", ["noise", "tone"])
def test_centered_features_equal_transformers(kind: str) -> None:
    """Both implementations of transformers, in NumPy and in torch."""
    reference = transformers.WhisperFeatureExtractor(feature_size=128)
    waveforms = clips(kind)
    padded = reference(waveforms, sampling_rate=16000, padding=True, truncation=False, return_attention_mask=True)
    result = make_extractor(CENTERED)(waveforms)
    stacked = np.zeros((len(waveforms), max(LENGTHS)), np.float32)
    for row, waveform in zip(stacked, waveforms, strict=True):
        row[: len(waveform)] = waveform
    in_numpy = reference._np_extract_fbank_features(stacked, "cpu").swapaxes(1, 2)
    np.testing.assert_allclose(result.features, in_numpy, atol=1e-4)
    np.testing.assert_allclose(result.features, np.swapaxes(padded["input_features"], 1, 2), atol=1e-4)
    np.testing.assert_array_equal(result.mask, np.array(padded["attention_mask"], bool))


@pytest.mark.parametrize("kind", ["noise", "tone"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"preemphasis": 0.97, "fft_overdrive": True, "input_scale_factor": 2.0},
        {"preemphasis": 0.9, "preemphasis_htk_flavor": False, "feature_size": 40, "frame_length_ms": 25.0},
        {"feature_size": 4, "per_bin_mean": [1.0, 2.0, 3.0, 4.0], "per_bin_stddev": [0.5, 1.0, 2.0, 3.0]},
    ],
)
def test_semicausal_features_equal_transformers(kind: str, settings: dict) -> None:
    reference = transformers.Gemma4AudioFeatureExtractor(**settings)(clips(kind))
    result = make_extractor({**SEMICAUSAL, **settings})(clips(kind))
    np.testing.assert_allclose(result.features, np.stack(reference["input_features"]), atol=1e-4)
    np.testing.assert_array_equal(result.mask, np.stack(reference["input_features_mask"]))


def test_token_counts_equal_transformers() -> None:
    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

    waveforms = [np.zeros(160 * frames + 7, np.float32) for frames in (2, 99, 100, 101, 257)]
    result = make_extractor(CENTERED)(waveforms)
    expected = _get_feat_extract_output_lengths(result.mask.sum(axis=1))
    assert list(result.tokens) == list(expected)
    # One token for each 40 ms of a long clip.
    assert make_extractor(SEMICAUSAL)([np.zeros(160_000, np.float32)]).tokens == (250,)


def test_long_clips_are_cut_where_the_model_ends() -> None:
    extract = make_extractor(SEMICAUSAL)
    assert (
        extract([np.zeros(500_000, np.float32)]).features.shape
        == extract([np.zeros(480_000, np.float32)]).features.shape
    )


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"feature_extractor_type": "ClapFeatureExtractor"}, "feature_extractor_type"),
        ({**CENTERED, "dither": 0.1}, "dither"),
        ({**CENTERED, "hop_length": 0}, "hop_length"),
        ({**SEMICAUSAL, "hop_lenght_ms": 10}, "did you mean 'hop_length_ms'"),
        ({}, "feature_extractor_type"),
    ],
)
def test_unsupported_settings_are_named(settings: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        make_extractor(settings)


@pytest.mark.parametrize("settings", [CENTERED, SEMICAUSAL])
@pytest.mark.parametrize("waveforms", [[], [np.zeros((2, 400), np.float32)], [np.zeros(100, np.float32)]])
def test_unusable_waveforms_are_named(settings: dict, waveforms: list) -> None:
    with pytest.raises(MediaError, match="accepted: "):
        make_extractor(settings)(waveforms)
