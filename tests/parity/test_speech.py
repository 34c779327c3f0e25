"""Speech of Qwen3-Omni against transformers: talker, code predictor and vocoder, and the whole generation."""

import dataclasses
import re
import wave
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.tasks.inference import DecodeTask, SpeechOutput
from maxhydra.convert import speech
from maxhydra.data.audio.tokens import Clips
from maxhydra.data.image_tokens import patch_inputs
from maxhydra.data.images import merged_patches
from maxhydra.decode.speech import Speaker, SpeechError, Utterance
from maxhydra.layers import Context
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder
from tests.support.cli import run_ok
from tests.support.media_models import (
    AUDIO_BEGIN,
    BEGIN,
    CLIP,
    END,
    IMAGE,
    OMNI_AUDIO,
    OMNI_IDS,
    QWEN_TEXT,
    export,
    load_float32,
    omni_thinker,
)
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")
transformers = import_optional("transformers", extra="parity")

pytestmark = [pytest.mark.parity, pytest.mark.slow]

USER, ASSISTANT, SYSTEM, TURN, STOP, BREAK = map(ord, "uas[]\n")
# A chat template for a tokenizer of bytes, none of which is a token of images or audio.
TEMPLATE = "{% for m in messages %}[{{ m.role[0] }}\n{{ m.content }}]{% endfor %}[a{{ '\n' }}"
GROUPS, CODES, WIDTH = 4, 32, 24
TALKER = {
    "text_config": {
        "vocab_size": 1024 + CODES,
        "hidden_size": WIDTH,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "moe_intermediate_size": 12,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 10,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 2, 2]},
    },
    "code_predictor_config": {
        "vocab_size": CODES,
        "hidden_size": WIDTH,
        "intermediate_size": 28,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_code_groups": GROUPS,
    },
    "num_code_groups": GROUPS,
    "thinker_hidden_size": QWEN_TEXT["hidden_size"],
    "accept_hidden_layer": 3,
    **{"codec_eos_token_id": 1040, "codec_nothink_id": 1041, "codec_think_bos_id": 1042, "codec_think_eos_id": 1043},
    **{"codec_pad_id": 1044, "codec_bos_id": 1045, "speaker_id": {"one": 1050, "two": 1051}},
    **{key: value for key, value in OMNI_IDS.items() if "end" not in key},
    "spatial_merge_size": 2,
}
VOCODER = {
    "codebook_size": CODES,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "sliding_window": 3,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_quantizers": GROUPS,
    "upsample_rates": [3, 2],
    "upsampling_ratios": [2, 2],
    "decoder_dim": 12,
}
IDS = {
    **{"im_start_token_id": TURN, "im_end_token_id": STOP, "user_token_id": USER, "assistant_token_id": ASSISTANT},
    **{"system_token_id": SYSTEM, "tts_pad_token_id": 270, "tts_bos_token_id": 271, "tts_eos_token_id": 272},
}
# Turns of the system and of the user with an image of 2 x 3 tokens and a clip of a chunk and 63 frames, and the
# beginning of the response.
FRAMES = 163
GENERATOR = np.random.default_rng(0)
PIXELS = GENERATOR.normal(size=(1, 16, 24, 3)).astype(np.float32)
LOG_MEL = GENERATOR.normal(size=(FRAMES, OMNI_AUDIO["num_mel_bins"])).astype(np.float32)
MEDIA = [BEGIN, *[IMAGE] * 6, END, 3, AUDIO_BEGIN, *[CLIP] * 21]
OPENING = [TURN, SYSTEM, BREAK, 7, STOP, BREAK, TURN, USER, BREAK, 1]
TEXT_PROMPT, MEDIA_PROMPT = ([*OPENING, *middle, 2, STOP, BREAK, TURN, ASSISTANT, BREAK] for middle in ([], MEDIA))
MAX_FRAMES = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with weights that are large enough for every mechanism to matter, but not for a clipped wave."""
    torch.manual_seed(0)
    thinker = omni_thinker(num_hidden_layers=4, vocab_size=300)
    config = transformers.Qwen3OmniMoeConfig(
        thinker_config=thinker, talker_config=TALKER, code2wav_config=VOCODER, **IDS
    )
    model = transformers.Qwen3OmniMoeForConditionalGeneration(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(*((0, 0.3) if weight.ndim > 1 else (0.5, 0.2)))
        for weight in model.code2wav.decoder[-1].parameters():
            weight.mul_(0.005)
    path = tmp_path_factory.mktemp("omni")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    model = transformers.Qwen3OmniMoeForConditionalGeneration
    loaded = model.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    # The talker computes positions of audio from a section that its config lacks.
    loaded.talker.config.audio_config = loaded.config.thinker_config.audio_config
    return loaded


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[ModelDef, Any]:
    return load_float32(folder)


def speaker(loaded: tuple[ModelDef, Any], **options: Any) -> Speaker:
    values = {"speaker": "two", "temperature": 0.0, "max_frames": MAX_FRAMES, **options}
    return Speaker(*loaded, SpeechOutput(**values))


@pytest.mark.exhaustive
def test_waveforms_equal_transformers(reference: Any, loaded: tuple[ModelDef, Any]) -> None:
    """An odd number of frames, in one chunk and in chunks whose last one is shorter."""
    codes = GENERATOR.integers(CODES, size=(11, GROUPS))
    speak = speaker(loaded)
    for chunk, context in ((300, 25), (4, 2)):
        with torch.no_grad():
            tensor = torch.tensor(codes.T[None])
            expected = reference.code2wav.chunked_decode(tensor, chunk_size=chunk, left_context_size=context).numpy()
        assert np.abs(expected).mean() > 0.05 and np.mean(np.abs(expected) < 1) > 0.9
        np.testing.assert_allclose(speak.waveform(codes, chunk=chunk, context=context), expected[0, 0], atol=1e-4)


def test_talker_and_code_predictor_equal_transformers(reference: Any, loaded: tuple[ModelDef, Any]) -> None:
    model, params = loaded
    talk, weights = model.speech, params["speech"]
    assert talk is not None
    inputs = GENERATOR.normal(size=(2, 7, WIDTH)).astype(np.float32)
    codes = GENERATOR.integers(CODES, size=(2, GROUPS))
    positions = jnp.broadcast_to(jnp.arange(7), (2, 7))
    ctx = Context(positions=positions, segments=None, sharder=Sharder.single(), cache=None, dropout_key=None)
    hidden, logits, _ = jax.jit(talk.talk)(weights, inputs, ctx)
    with torch.no_grad():
        talker, predictor = reference.talker, reference.talker.code_predictor
        expected = talker(inputs_embeds=torch.tensor(inputs), output_hidden_states=True)
        np.testing.assert_allclose(logits, expected.logits.numpy(), atol=1e-4)
        np.testing.assert_allclose(hidden, expected.hidden_states[0][-1].numpy(), atol=1e-4)
        tables = [talker.get_input_embeddings(), *predictor.get_input_embeddings()]
        embedded = [table(torch.tensor(codes[:, i])) for i, table in enumerate(tables)]
        for number in range(1, GROUPS):
            frame = torch.stack([torch.tensor(np.asarray(hidden[:, -1])), *embedded[:number]], dim=1)
            row = predictor(inputs_embeds=frame).logits[:, -1].numpy()
            np.testing.assert_allclose(
                jax.jit(talk.predictor_logits)(weights, hidden[:, -1], codes)[:, number - 1], row, atol=1e-4
            )


@pytest.mark.default_cases("False")
@pytest.mark.parametrize("has_media", [False, True])
def test_speech_of_a_response_equals_transformers(
    reference: Any, loaded: tuple[ModelDef, Any], has_media: bool
) -> None:
    """Greedy text, codes and waveform of one call of transformers."""
    prompt = MEDIA_PROMPT if has_media else TEXT_PROMPT
    media: dict[str, Any] = {}
    if has_media:
        patches = merged_patches(PIXELS, patch_size=4, merge_size=2, temporal_patch_size=2)
        media = {
            "pixel_values": torch.tensor(patches),
            "image_grid_thw": torch.tensor([[1, 4, 6]]),
            "input_features": torch.tensor(LOG_MEL.T[None]),
            "feature_attention_mask": torch.ones((1, FRAMES), dtype=torch.long),
        }
    codes: list[np.ndarray] = []
    handle = reference.code2wav.register_forward_pre_hook(lambda _, inputs: codes.append(inputs[0].numpy()))
    with torch.no_grad():
        sequences, waveform = reference.generate(
            input_ids=torch.tensor([prompt]),
            speaker="two",
            thinker_max_new_tokens=6,
            thinker_do_sample=False,
            thinker_eos_token_id=None,
            talker_do_sample=False,
            talker_max_new_tokens=MAX_FRAMES + 1,
            **media,
        )
    handle.remove()
    # transformers does not speak the last token, which usually ends the response.
    response = sequences[0, len(prompt) : -1].tolist()
    given: dict[str, Any] = {}
    if has_media:
        images = patch_inputs(PIXELS, loaded[0].config.vision)
        given = {"images": images, "audio": Clips(LOG_MEL[None], np.array([FRAMES]))}
    speak = speaker(loaded)
    utterance = Utterance(prompt, response, **given)
    frames = list(speak.frames(speak.inputs(utterance), seed=0))
    np.testing.assert_array_equal(np.stack(frames, axis=1), codes[0][0])
    np.testing.assert_allclose(speak.speak(utterance, seed=0), waveform[0, 0].numpy(), atol=1e-4)


@pytest.mark.exhaustive
def test_decode_writes_a_wav_file_for_each_sample(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    run_ok(
        *("task=decode", "model=from_hf_speech", f"model.path={folder}", f"checkpoint.load_parameters={folder}"),
        *("data.tokenizer.kind=byte", f"data.tokenizer.chat_template={tmp_path / 'chat.jinja'}", "train.seq_len=64"),
        *("task.prompt=hello", "task.sampling.max_tokens=4", "task.engine.max_context=64", "task.samples=2"),
        *(f"task.speech.folder={tmp_path / 'speech'}", f"task.speech.max_frames={MAX_FRAMES}"),
        cwd=tmp_path,
    )
    files = sorted((tmp_path / "speech").iterdir())
    assert [file.name for file in files] == ["0.wav", "1.wav"]
    for file in files:
        with wave.open(str(file)) as opened:
            assert opened.getframerate() == 24000 and opened.getnframes() > 24
            samples = np.frombuffer(opened.readframes(opened.getnframes()), "<i2")
        assert np.abs(samples).mean() > 100


@pytest.mark.parametrize(
    ("option", "overrides", "message"),
    [
        ("from_hf_media", [], "task.speech.folder=speech: requires a model that speaks (model.speech)"),
        ("from_hf_speech", ["task.speech.speaker=three"], "task.speech.speaker=three: is not one of"),
        ("from_hf_speech", ["task.prompt=null"], "task.speech.folder=speech: requires a prompt"),
    ],
)
def test_speech_without_a_talker_a_voice_or_a_prompt_is_rejected(
    folder: Path, option: str, overrides: list[str], message: str
) -> None:
    model = [f"model={option}", f"model.path={folder}", f"checkpoint.load_parameters={folder}", "train.seq_len=64"]
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose(["task=decode", *model, "task.prompt=hello", "task.speech.folder=speech", *overrides])


def test_a_talker_without_voices_is_rejected(loaded: tuple[ModelDef, Any]) -> None:
    model = loaded[0].config
    talker = dataclasses.replace(model.speech.talker, speakers={})
    silent = dataclasses.replace(model, speech=dataclasses.replace(model.speech, talker=talker))
    task = DecodeTask(prompt="hello", speech=SpeechOutput(folder="speech"))
    assert [problem.path for problem in task.check_model(silent)] == ["speech.folder"]
    assert not list(task.check_model(model))


@pytest.mark.exhaustive
def test_cached_frames_equal_one_forward_pass(loaded: tuple[ModelDef, Any]) -> None:
    """The talker's inputs of all frames at once give the codes that were sampled with its cache."""
    (model, params), speak = loaded, speaker(loaded, repetition_penalty=1.0)
    assert model.speech is not None
    inputs = speak.inputs(Utterance(TEXT_PROMPT, [3, 4, 5]))
    frames = np.stack(list(speak.frames(inputs, seed=0)))
    tables = params["speech"]["talker"]["embedding"], params["speech"]["code_predictor"]["embeddings"]
    summed = tables[0][frames[:, 0]] + sum(tables[1][i][frames[:, i + 1]] for i in range(GROUPS - 1))
    text = [*inputs.text_FD, *[inputs.pad_D] * len(frames)][: len(frames)]
    x = jnp.concatenate([inputs.prompt_BTD, (summed + jnp.stack(text))[None]], axis=1)
    positions = jnp.arange(x.shape[1])[None]
    ctx = Context(positions=positions, segments=None, sharder=Sharder.single(), cache=None, dropout_key=None)
    _, logits, _ = jax.jit(model.speech.talk)(params["speech"], x, ctx)
    first = inputs.prompt_BTD.shape[1] - 1
    np.testing.assert_array_equal(jnp.argmax(logits[0, first:-1, :CODES], axis=-1), frames[:, 0])


def test_logits_that_are_not_finite_are_reported(loaded: tuple[ModelDef, Any]) -> None:
    model, params = loaded
    speech = {**params["speech"], "code_predictor": jax.tree.map(jnp.zeros_like, params["speech"]["code_predictor"])}
    speech["code_predictor"]["heads"] += jnp.nan
    with pytest.raises(SpeechError, match="the logits of frame 0 are not finite"):
        speaker((model, {**params, "speech": speech})).speak(Utterance(TEXT_PROMPT, [3, 4, 5]), seed=0)


def test_export_is_bit_identical(folder: Path, tmp_path: Path) -> None:
    exported = export(folder, tmp_path)
    assert exported.model_type == "qwen3_omni_moe" and not exported.missing
    before, after = (transformers.AutoConfig.from_pretrained(path).to_dict() for path in (folder, tmp_path))
    for key in ("talker_config", "code2wav_config", *speech.TOKENS.values()):
        assert _without_dtypes(after[key]) == _without_dtypes(before[key])


def _without_dtypes(settings: Any) -> Any:
    if not isinstance(settings, dict):
        return settings
    return {key: _without_dtypes(value) for key, value in settings.items() if key != "dtype"}
