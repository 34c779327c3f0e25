"""A prompt with an image and a clip for a model that takes both and has per-layer embeddings."""

import base64
import dataclasses
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from maxhydra.config.compose.composer import compose
from maxhydra.config.options import model_option
from maxhydra.config.schema.decode import Engine as EngineConfig
from maxhydra.config.schema.decode import Sampling
from maxhydra.config.schema.hardware import RULES, Mesh
from maxhydra.data.tokenizers.byte import ByteTokenizer
from maxhydra.decode.engine import Engine
from maxhydra.decode.openai_server.messages import parse_audios, parse_images, parse_messages
from maxhydra.decode.request import Request
from maxhydra.decode.sampling_params import MediaPrompt, PromptEncoder, make_requests
from maxhydra.layers import Context
from maxhydra.model import build
from maxhydra.sharding import Sharder, build_mesh
from tests.support.skips import import_optional

soundfile = import_optional("soundfile", extra="audio")

AUDIO = model_option("gemma4-tiny-audio").audio
MODEL = dataclasses.replace(model_option("gemma4-tiny-vision"), audio=AUDIO)
IMAGE, CLIP = 300, 303


def chat() -> dict[str, object]:
    """A request with an image of 11 x 23 pixels and a clip of 0.31 seconds."""
    generator = np.random.default_rng(0)
    png, wav = io.BytesIO(), io.BytesIO()
    Image.fromarray(generator.integers(0, 255, (11, 23, 3), np.uint8)).save(png, "PNG")
    soundfile.write(wav, generator.uniform(-0.5, 0.5, 4960), 16000, format="WAV")
    image, clip = (base64.b64encode(file.getvalue()).decode() for file in (png, wav))
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
        {"type": "text", "text": "a"},
        {"type": "input_audio", "input_audio": {"data": clip, "format": "wav"}},
    ]
    return {"messages": [{"role": "user", "content": parts}]}


def media_prompt() -> MediaPrompt:
    data = compose(["data.tokenizer.chat_template=lines"]).config.data
    prompts = PromptEncoder(data, vocab_size=MODEL.vocab_size, vision=MODEL.vision, audio=AUDIO)
    ids = prompts.encode_messages(parse_messages(chat()))
    return prompts.insert_media(ids, images=parse_images(chat()), audios=parse_audios(chat()))


def test_an_image_fills_its_tokens_and_a_clip_has_one_for_four_frames() -> None:
    """1 x 3 blocks of 8 x 8 pixels are the largest grid near 11 : 23 within 6 blocks; 31 frames less half of one."""
    prompt = media_prompt()
    image, clip = [301, *[IMAGE] * 3, 302], [304, *[CLIP] * 8, 305]
    assert prompt.prompt == [256, *image, ord("a"), *clip, ord("\n")]
    assert prompt.audio is not None and prompt.audio.lengths.tolist() == [30]


@pytest.mark.exhaustive
def test_completions_equal_one_forward_pass() -> None:
    model, prompt = build(MODEL), media_prompt()
    sharder = Sharder(build_mesh(Mesh(), jax.devices()[:1]), RULES)
    params = jax.jit(model.init)(jax.random.key(0))
    settings = EngineConfig(max_batch=1, cache_tokens=128, page_size=4, max_context=64, prefill_chunk=64)
    placed = jax.device_put(params, sharder.tree(model.axes))
    engine = Engine(model, placed, ByteTokenizer(), settings, sharder=sharder, eos=())
    sampling = Sampling(max_tokens=3, temperature=0.0, ignore_eos=True)
    (made,) = make_requests(prompt.prompt, sampling, samples=1, seed=0, number=0, logprobs=0)
    try:
        completion = engine.submit(Request(**{**vars(made), "images": prompt.images, "audio": prompt.audio})).result()
    finally:
        engine.close()
    ids = jnp.asarray([*prompt.prompt, *completion.tokens])[None]
    assert prompt.audio is not None and prompt.images is not None
    frames, lengths = (jnp.asarray(array)[None] for array in prompt.audio)
    batch = {"positions": jnp.arange(ids.shape[1])[None], "images": jnp.asarray(prompt.images)[None]}
    ctx = Context.of_batch(batch | {"audio": frames, "audio_lengths": lengths}, Sharder.single(), None)
    hidden, _ = jax.jit(lambda params: model.hidden(params, ids, ctx))(params)
    logprobs = np.asarray(jax.nn.log_softmax(model.logits(params, hidden, Sharder.single())[0]))
    expected = logprobs[len(prompt.prompt) - 1 : -1]
    assert completion.tokens == tuple(expected.argmax(axis=1).tolist())
    np.testing.assert_allclose([each.logprob for each in completion.logprobs], expected.max(axis=1), atol=1e-4)
