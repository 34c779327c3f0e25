"""Gemma 4 with audio against transformers: features, logits, export and decoding."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.audio import Audio
from maxhydra.data.audio.tokens import clip_frames, placeholder_counts
from maxhydra.data.media import MediaError
from maxhydra.layers import AudioClips
from tests.support.cached_decoding import cached_logits
from tests.support.media_models import export, forward_logits, load_float32
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")
transformers = import_optional("transformers", extra="parity")

pytestmark = [pytest.mark.parity, pytest.mark.slow]

BEGIN, END, CLIP, BANDS = 60, 61, 62, 16
TOKEN_IDS = {"boa_token_id": BEGIN, "eoa_token_index": END, "audio_token_id": CLIP, "image_token_id": 59}
# Samples of the clips of two rows: less than a window of 5 tokens, and several windows; no whole number of frames.
LENGTHS = ((1237, 9041), (5003,))
TEXT = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 6,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 512,
}
AUDIO = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 3,
    "subsampling_conv_channels": [BANDS, 6],
    "conv_kernel_size": 3,
    "attention_chunk_size": 5,
    "attention_context_left": 6,
    "attention_logit_cap": 2.0,
    "output_proj_dims": 20,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with weights that are large enough for every mechanism to matter."""
    torch.manual_seed(0)
    settings = transformers.Gemma4Config(text_config=TEXT, audio_config=AUDIO, vision_config=None, **TOKEN_IDS)
    model = transformers.Gemma4ForConditionalGeneration(settings)
    bounds = {"input_min": -1.5, "input_max": 1.3, "output_min": -1.2, "output_max": 1.4}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_scale = "norm" in name and name.endswith("weight")
            weight.normal_(float(is_scale), 0.2)
        for name, buffer in model.named_buffers():
            if (end := name.rpartition(".")[2]) in bounds:
                buffer.fill_(bounds[end])
    path = tmp_path_factory.mktemp("gemma4")
    model.save_pretrained(path)
    return path


def samples_of(row: int, clip: int) -> np.ndarray:
    return np.random.default_rng((row, clip)).normal(0, 0.1, LENGTHS[row][clip]).astype(np.float32)


def extractor() -> Any:
    return transformers.Gemma4AudioFeatureExtractor(feature_size=BANDS)


def inputs_of(audio: Audio) -> tuple[np.ndarray, AudioClips]:
    """Tokens of two rows, and their clips; frames after the end of a clip are nonzero, and must not matter."""
    clips = [[clip_frames(samples_of(row, clip), audio) for clip in range(len(LENGTHS[row]))] for row in (0, 1)]
    lengths = np.array([[*map(len, row), *[0] * (2 - len(row))] for row in clips])
    frames = np.random.default_rng(0).normal(size=(2, 2, lengths.max() + 3, BANDS)).astype(np.float32)
    rows = []
    for index, row in enumerate(clips):
        for number, clip in enumerate(row):
            frames[index, number, : len(clip)] = clip
        prompt = np.array([1, 2, *(id for _ in row for id in (BEGIN, CLIP, END, 5))])
        rows.append(np.repeat(prompt, placeholder_counts(prompt, [len(clip) for clip in row], audio)))
    size = max(map(len, rows)) + 4
    tokens = np.array([[*row, *(3 + np.arange(size - len(row)) % 40)] for row in rows])
    return tokens, AudioClips(jnp.asarray(frames), jnp.asarray(lengths))


def expected_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Logits of transformers for the outputs of its feature extractor, which pads all clips to the longest."""
    model = transformers.Gemma4ForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    clips = [samples_of(row, clip) for row in (0, 1) for clip in range(len(LENGTHS[row]))]
    inputs = extractor()(clips, return_tensors="pt")
    with torch.no_grad():
        out = model.eval()(
            input_ids=torch.tensor(tokens),
            input_features=inputs["input_features"],
            input_features_mask=inputs["input_features_mask"],
        )
    logits: np.ndarray = out.logits.numpy()
    return logits


def test_logits_with_audio_equal_transformers(folder: Path) -> None:
    model, params = load_float32(folder)
    tokens, audio = inputs_of(model.config.audio)
    expected = expected_logits(folder, tokens)
    np.testing.assert_allclose(forward_logits(model, params, tokens, {"audio": audio}), expected, atol=1e-4)
    assert np.abs(expected).max() > 1


@pytest.mark.exhaustive
def test_cached_decoding_equals_one_forward_pass(folder: Path) -> None:
    model, params = load_float32(folder)
    tokens, audio = inputs_of(model.config.audio)
    cached = cached_logits(model, params, tokens, {"audio": audio})
    np.testing.assert_allclose(cached, forward_logits(model, params, tokens, {"audio": audio}), atol=1e-4)


@pytest.mark.exhaustive
def test_export_is_bit_identical(folder: Path, tmp_path: Path) -> None:
    exported = export(folder, tmp_path)
    assert exported.model_type == "gemma4" and not exported.missing
    assert exported.after["audio_config"].items() <= exported.before["audio_config"].items()
    tokens, _ = inputs_of(load_float32(folder)[0].config.audio)
    np.testing.assert_array_equal(expected_logits(tmp_path, tokens), expected_logits(folder, tokens))


def test_frames_and_tokens_equal_those_of_the_feature_extractor(folder: Path) -> None:
    options = ["model=from_hf_audio", f"model.path={folder}", "train.seq_len=64"]
    audio = compose(options).config.model.audio
    for row, lengths in enumerate(LENGTHS):
        for clip in range(len(lengths)):
            frames = clip_frames(samples_of(row, clip), audio)
            inputs = extractor()([samples_of(row, clip)], return_tensors="np")
            mask = inputs["input_features_mask"][0]
            np.testing.assert_allclose(frames, inputs["input_features"][0][mask], atol=1e-5)
            assert audio.num_tokens(len(frames)) == mask[::2][::2].sum()
    with pytest.raises(MediaError, match="accepted: up to 30 seconds"):
        clip_frames(np.zeros(500_000, np.float32), audio)
