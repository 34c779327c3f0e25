"""Requests with audio: the engine against one forward pass, and bad requests."""

import base64
import io
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.options import model_option
from maxhydra.config.schema.decode import Engine as EngineConfig
from maxhydra.config.schema.decode import Sampling
from maxhydra.config.schema.hardware import RULES, Mesh
from maxhydra.data.audio.tokens import Clips, stack_clips
from maxhydra.data.tokenizers.byte import ByteTokenizer
from maxhydra.decode.chat_cli import complete
from maxhydra.decode.engine import Engine
from maxhydra.decode.openai_server.http11 import HttpError
from maxhydra.decode.openai_server.messages import parse_audios, parse_messages
from maxhydra.decode.request import Request, RequestRejectedError
from maxhydra.decode.sampling_params import PromptClient, PromptEncoder, PromptError, make_requests
from maxhydra.layers import Context
from maxhydra.model import ModelDef, build
from maxhydra.sharding import Sharder, build_mesh
from tests.support.skips import import_optional

soundfile = import_optional("soundfile", extra="audio")

SINGLE = Sharder.single()
AUDIO = model_option("micro-audio").audio
LENGTHS = (10, 19, 5)
FRAMES = [np.random.default_rng(n).normal(size=(n, AUDIO.num_bands)).astype(np.float32) for n in LENGTHS]


def clips(*indices: int, frames: int = 19) -> Clips:
    return stack_clips([FRAMES[i] for i in indices], count=len(indices), shape=(frames, AUDIO.num_bands))


def tokens(*indices: int) -> list[int]:
    return [AUDIO.placeholder_id or 0] * sum(AUDIO.num_tokens(LENGTHS[i]) for i in indices)


@cache
def tiny() -> tuple[ModelDef, Any]:
    """Random weights, with embeddings and projections large enough for tokens to depend on the audio."""
    model = build(model_option("micro-audio"))
    return model, jax.tree.map(lambda weight: 2 * weight, jax.jit(model.init)(jax.random.key(0)))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    model, params = tiny()
    sharder = Sharder(build_mesh(Mesh(), jax.devices()[:1]), RULES)
    params = jax.device_put(params, sharder.tree(model.axes))
    settings = EngineConfig(max_batch=4, cache_tokens=512, page_size=4, max_context=64, prefill_chunk=64)
    made = Engine(model, params, ByteTokenizer(), settings, sharder=sharder, eos=())
    yield made
    made.close()


def request(prompt: list[int], audio: Clips | None) -> Request:
    sampling = Sampling(max_tokens=5, temperature=0.0, ignore_eos=True)
    (made,) = make_requests(prompt, sampling, samples=1, seed=0, number=0, logprobs=0)
    return Request(**{**vars(made), "audio": audio})


@jax.jit
def forward(params: Any, ids: jax.Array, audio: Clips) -> jax.Array:
    """Log-probabilities of one row by a forward pass without a cache."""
    model, _ = tiny()
    frames, lengths = (array[None] for array in audio)
    batch = {"positions": jnp.arange(len(ids))[None], "audio": frames, "audio_lengths": lengths}
    hidden, _ = model.hidden(params, ids[None], Context.of_batch(batch, SINGLE, None))
    return jax.nn.log_softmax(model.logits(params, hidden, SINGLE)[0])


def logprobs_of(prompt: list[int], audio: Clips | None, sampled: tuple[int, ...]) -> np.ndarray:
    """Log-probabilities of the next tokens; padding behind them and clips without placeholders change nothing."""
    ids = np.zeros(32, np.int32)
    ids[: len(prompt) + len(sampled)] = [*prompt, *sampled]
    given = [] if audio is None else [clip[:length] for clip, length in zip(*audio, strict=True)]
    logprobs = forward(tiny()[1], jnp.asarray(ids), stack_clips(given, count=2, shape=(19, AUDIO.num_bands)))
    return np.asarray(logprobs)[len(prompt) - 1 :][: len(sampled)]


@pytest.mark.exhaustive
def test_completions_equal_one_forward_pass(engine: Engine) -> None:
    """Prompts with equal tokens and different clips are decoded together, and do not share pages."""
    first, other = [256, 40, *tokens(0), 65, 66], clips(0)
    changed = Clips(-other.frames, other.lengths)
    cases = [(first, other), (first, changed), ([*first, *tokens(1), 67], clips(0, 1)), ([256, 65, 66, 67], None)]
    handles = engine.submit_all([request(*case) for case in cases])
    completions = [handle.result() for handle in handles]
    for case, completion in zip(cases, completions, strict=True):
        expected = logprobs_of(*case, completion.tokens)
        assert completion.tokens == tuple(expected.argmax(axis=1).tolist())
        np.testing.assert_allclose([each.logprob for each in completion.logprobs], expected.max(axis=1), atol=1e-4)
    one, two = ([each.logprob for each in completion.logprobs] for completion in completions[:2])
    assert not np.allclose(one, two, rtol=0.1, atol=0)


def test_requests_that_cannot_be_served(engine: Engine) -> None:
    prompt = [256, *tokens(1), 65]
    for made, reason in (
        (request(prompt, None), "3 audio tokens, but 0 clips"),
        (request(prompt, clips(0)), "3 audio tokens, but 1 clips, which have 2"),
        (request(prompt, Clips(clips(1).frames[..., :7], clips(1).lengths)), "audio has shape"),
        (request([65] * 62 + prompt, clips(1)), "raise task.engine.prefill_chunk"),
    ):
        with pytest.raises(RequestRejectedError, match=reason):
            engine.submit(made)


def wav(seconds: float = 0.5) -> str:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.random.default_rng(0).uniform(-0.5, 0.5, round(16000 * seconds)), 16000, format="WAV")
    return base64.b64encode(buffer.getvalue()).decode()


def chat(clip: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": "hear: "}, {"type": "input_audio", "input_audio": clip}]
    return {"messages": [{"role": "user", "content": parts}]}


def encoder(**media: Any) -> PromptEncoder:
    return PromptEncoder(compose(["data.tokenizer.chat_template=lines"]).config.data, vocab_size=264, **media)


def test_audio_of_chat_requests() -> None:
    given = chat({"data": wav(), "format": "wav"})
    (url,) = parse_audios(given)
    prompts = encoder(audio=AUDIO)
    prompt, _, audio = prompts.insert_media(prompts.encode_messages(parse_messages(given)), images=[], audios=[url])
    assert audio is not None and audio.lengths.tolist() == [10] and audio.frames.shape == (1, 10, AUDIO.num_bands)
    assert prompt == [256, *b"hear: ", *tokens(0), ord("\n")]


@pytest.mark.slow
def test_files_of_task_audios(engine: Engine, tmp_path: Path) -> None:
    """task.audios are the clips before the text of task.prompt."""
    (tmp_path / "a.wav").write_bytes(base64.b64decode(wav()))
    audios = f"task.audios=[{tmp_path / 'a.wav'}]"
    sampling = ["task.sampling.max_tokens=5", "task.sampling.temperature=0", "task.sampling.ignore_eos=true"]
    task = compose(["task=decode", "task.prompt=hi", audios, *sampling]).config.task
    prompts, texts = encoder(audio=AUDIO), list[str]()
    complete(PromptClient(engine, prompts, task, seed=0), "hi", texts.append)
    audio = stack_clips(prompts.read_audio([str(tmp_path / "a.wav")]), count=1, shape=(10, AUDIO.num_bands))
    expected = engine.submit(request([256, *tokens(0), *b"hi", ord("\n")], audio)).result()
    assert "".join(texts).rstrip("\n") == expected.text.rstrip("\n")
    with pytest.raises(ConfigError, match="requires a prompt that is a message of a chat"):
        compose(["task=decode", audios])


@pytest.mark.slow
def test_bad_audio_of_chat_requests(tmp_path: Path) -> None:
    for clip, reason in (
        (7, "without data"),
        ({"data": 7, "format": "wav"}, "without data"),
        ({"data": wav(), "format": "mp3"}, "accepted: wav, flac"),
        ({"data": wav()}, "accepted: wav, flac"),
    ):
        with pytest.raises(HttpError, match=reason):
            parse_audios(chat(clip))
    many = chat({"data": "", "format": "wav"})
    many["messages"] *= 65
    with pytest.raises(HttpError, match="65 audio clips; accepted: at most 64"):
        parse_audios(many)
    prompts = encoder(audio=AUDIO)
    for value, reason in (
        ("data:audio/wav;base64,!", "not base64"),
        (f"data:audio/wav;base64,{wav()[:40]}", "not readable"),
        (str(tmp_path / "no.wav"), "no such file"),
    ):
        with pytest.raises(PromptError, match=reason):
            prompts.read_audio([value])
    clip = prompts.read_audio([f"data:audio/wav;base64,{wav()}"])
    with pytest.raises(PromptError, match="has 1 audio clips, but 0 audio parts"):
        prompts.with_audio_tokens([65], clip)
    with pytest.raises(PromptError, match="takes no audio"):
        encoder().read_audio(["a.wav"])
