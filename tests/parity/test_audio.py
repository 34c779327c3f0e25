"""Models with audio against transformers."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.convert.hf import hf_source
from maxhydra.layers import AudioClips
from maxhydra.model import ModelDef
from tests.support.cached_decoding import cached_logits
from tests.support.media_models import OMNI_AUDIO, export, forward_logits, load_float32
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")
transformers = import_optional("transformers", extra="parity")

pytestmark = [pytest.mark.parity, pytest.mark.slow]

BEGIN, END, PLACEHOLDER, BANDS = 60, 61, 62, OMNI_AUDIO["num_mel_bins"]
# Frames of the clips of two rows: shorter than a chunk of 100, a part of one in the second, and more than a window of
# two chunks.
LENGTHS = np.array([[37, 163], [100, 251]])
TEXT = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 512,
}
AUDIO = {**OMNI_AUDIO, "encoder_layers": 2}
VISION = {"depth": 0, "deepstack_visual_indexes": [], "hidden_size": 16, "num_heads": 2, "num_position_embeddings": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with weights that are large enough for every mechanism to matter."""
    torch.manual_seed(0)
    settings = transformers.Qwen3OmniMoeThinkerConfig(
        text_config=TEXT,
        audio_config=AUDIO,
        vision_config=VISION,
        audio_token_id=PLACEHOLDER,
        audio_start_token_id=BEGIN,
    )
    model = transformers.Qwen3OmniMoeThinkerForConditionalGeneration(settings)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(*((0, 0.3) if weight.ndim > 1 else (0.5, 0.2)))
    path = tmp_path_factory.mktemp("omni")
    model.save_pretrained(path)
    return path


def tokens_of(model: ModelDef) -> np.ndarray:
    """Two rows of equal length, with text around the clips."""
    rows = [
        [1, 2, *(id for n in row for id in (BEGIN, *[PLACEHOLDER] * model.config.audio.num_tokens(int(n)), END, 5))]
        for row in LENGTHS
    ]
    size = max(map(len, rows)) + 4
    return np.array([[*row, *range(3, 3 + size - len(row))] for row in rows])


def clips() -> AudioClips:
    """Noise; frames after the end of a clip are nonzero, and must not matter."""
    frames = np.random.default_rng(0).normal(size=(2, 2, LENGTHS.max() + 3, BANDS)).astype(np.float32)
    return AudioClips(jnp.asarray(frames), jnp.asarray(LENGTHS))


def expected_logits(folder: Path, tokens: np.ndarray, audio: AudioClips | None) -> np.ndarray:
    """Logits of transformers, of which every clip is encoded alone: the padding of its batches changes short clips."""
    model = transformers.Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        if audio is None:
            return model(input_ids=torch.tensor(tokens)).logits.numpy()
        features = [
            model.get_audio_features(
                torch.tensor(np.asarray(audio.frames[at])[:length].T[None]),
                feature_attention_mask=torch.ones((1, length), dtype=torch.long),
            ).pooler_output.reshape(-1, TEXT["hidden_size"])
            for at, length in np.ndenumerate(LENGTHS)
        ]
        embeddings = model.get_input_embeddings()(torch.tensor(tokens))
        embeddings[torch.tensor(tokens) == PLACEHOLDER] = torch.cat(features)
        return model(inputs_embeds=embeddings).logits.numpy()


def test_logits_with_audio_equal_transformers(folder: Path) -> None:
    model, params = load_float32(folder)
    tokens = tokens_of(model)
    logits = forward_logits(model, params, tokens, {"audio": clips()})
    expected = expected_logits(folder, tokens, clips())
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert np.abs(expected).max() > 1


@pytest.mark.exhaustive
def test_positions_and_chunks_equal_a_call_of_transformers(folder: Path) -> None:
    """One row whose clips all have a whole chunk, with the positions and batches that transformers makes itself."""
    model, params = load_float32(folder)
    tokens, audio = tokens_of(model)[1:], clips()
    hf = transformers.Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(folder, attn_implementation="eager")
    mask = torch.tensor(np.arange(audio.frames.shape[2]) < LENGTHS[1][:, None]).long()
    frames = torch.tensor(np.asarray(audio.frames[1]).swapaxes(1, 2))
    with torch.no_grad():
        expected = hf.eval()(input_ids=torch.tensor(tokens), input_features=frames, feature_attention_mask=mask)
    logits = forward_logits(model, params, tokens, {"audio": jax.tree.map(lambda x: x[1:], audio)})
    np.testing.assert_allclose(logits, expected.logits.numpy(), atol=1e-4)


def test_the_text_decoder_alone_gives_the_logits_of_text(folder: Path) -> None:
    source = hf_source("", str(folder), folder)
    model, params = load_float32(folder, audio=dataclasses.replace(source.model.audio, num_layers=None))
    text = np.arange(40).reshape(2, 20)
    assert "audio" not in params
    np.testing.assert_allclose(forward_logits(model, params, text, {}), expected_logits(folder, text, None), atol=1e-4)


def test_export_is_bit_identical(folder: Path, tmp_path: Path) -> None:
    exported = export(folder, tmp_path)
    assert exported.model_type == "qwen3_omni_moe_thinker"
    assert all(name.startswith("visual.") for name in exported.missing)
    assert exported.after["audio_config"].items() <= exported.before["audio_config"].items()
    tokens = tokens_of(load_float32(folder)[0])
    np.testing.assert_array_equal(expected_logits(tmp_path, tokens, clips()), expected_logits(folder, tokens, clips()))


@pytest.mark.exhaustive
def test_cached_decoding_equals_one_forward_pass(folder: Path) -> None:
    """Prefill takes the clips, decode steps read the cache."""
    model, params = load_float32(folder)
    tokens = tokens_of(model)
    cached = cached_logits(model, params, tokens, {"audio": clips()})
    np.testing.assert_allclose(cached, forward_logits(model, params, tokens, {"audio": clips()}), atol=1e-4)
