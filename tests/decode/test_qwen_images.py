"""Images of different sizes in prompts: their tokens, and RoPE positions that are behind the slots of the cache."""

import base64
import dataclasses
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import soundfile
from PIL import Image

from maxhydra.config.compose.composer import compose
from maxhydra.config.options import model_option
from maxhydra.config.schema.decode import Engine as EngineConfig
from maxhydra.config.schema.decode import Sampling
from maxhydra.config.schema.hardware import RULES, Mesh
from maxhydra.config.schema.model import Model
from maxhydra.data.audio.tokens import CLIP_MARKER
from maxhydra.data.tokenizers.byte import ByteTokenizer
from maxhydra.decode.engine import Engine
from maxhydra.decode.openai_server.http11 import HttpError
from maxhydra.decode.openai_server.messages import parse_audios, parse_images, parse_messages
from maxhydra.decode.request import Request, RequestRejectedError
from maxhydra.decode.sampling_params import MediaPrompt, PromptEncoder, PromptError, make_requests
from maxhydra.layers import Context
from maxhydra.model import build
from maxhydra.sharding import Sharder, build_mesh
from tests.support.containers import matroska

MODEL = model_option("qwen3-vl-tiny")
# A model that reads the audio of videos.
OMNI = model_option("qwen3-omni-tiny-media")
HEARD = dataclasses.replace(
    OMNI,
    vision=dataclasses.replace(OMNI.vision, videos=dataclasses.replace(OMNI.vision.videos, use_audio_in_video=True)),
)
BEGIN, IMAGE, END = 302, 300, 303
SIZES = ((9, 23), (16, 16))
MESSAGES = [{"role": "user", "content": "a\ufffcb\ufffcc"}]


def data_url(width: int, height: int) -> str:
    pixels = np.random.default_rng(width).integers(0, 255, (height, width, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def video_url() -> str:
    """A second of eight frames, of which four are seen, as two steps of 2 x 1 tokens."""
    frames = [Image.new("RGB", (8, 16), (30 * number, 0, 0)) for number in range(8)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "WEBP", save_all=True, append_images=frames[1:], duration=125, lossless=True)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()


def wav(count: int) -> bytes:
    samples, buffer = np.random.default_rng(0).uniform(-0.5, 0.5, count), io.BytesIO()
    soundfile.write(buffer, samples, 16000, format="WAV")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def prompts() -> PromptEncoder:
    data = compose(["data.tokenizer.chat_template=lines"]).config.data
    return PromptEncoder(data, vocab_size=320, vision=MODEL.vision)


def test_tokens_follow_from_the_size_of_an_image(prompts: PromptEncoder) -> None:
    """Tokens of 8 x 8 pixels; 60 x 40 pixels are reduced to 2 x 3 tokens, the most that max_patches allows."""
    ids = prompts.encode_messages(MESSAGES)
    prompt, images = prompts.insert_images(ids, prompts.read_images([data_url(9, 23), data_url(60, 40)]))
    tall, wide = ([BEGIN, *[IMAGE] * count, END] for count in (3, 6))
    assert prompt == [256, ord("a"), *tall, ord("b"), *wide, ord("c"), ord("\n")]
    assert images is not None and images.shape == (2, *MODEL.vision.image_shape)
    with pytest.raises(PromptError, match="aspect ratio"):
        prompts.read_images([data_url(800, 8)])


def test_a_video_has_its_steps_with_their_times(prompts: PromptEncoder) -> None:
    ids = prompts.encode_messages(MESSAGES)
    prompt, images = prompts.insert_images(ids, prompts.read_images([{"video": video_url()}, data_url(9, 23)]))
    step = [BEGIN, 301, 301, END]
    video = [*b"<0.1 seconds>", *step, *b"<0.8 seconds>", *step]
    assert prompt == [256, ord("a"), *video, ord("b"), BEGIN, *[IMAGE] * 3, END, ord("c"), ord("\n")]
    assert images is not None and images.shape == (3, *MODEL.vision.image_shape)
    without = PromptEncoder(prompts.data, vocab_size=320, vision=dataclasses.replace(MODEL.vision, video_id=None))
    with pytest.raises(PromptError, match="takes no videos"):
        without.read_images([{"video": video_url()}])


def heard_prompts(encoder: PromptEncoder) -> list[MediaPrompt]:
    """A clip, a video with 2.1 seconds of audio and another clip; the same with the frames of the video alone."""
    text = {"type": "text", "text": "a"}
    samples = np.random.default_rng(1).integers(-9000, 9000, (2, 33600)).astype(np.int16)
    content = matroska(np.full((4, 16, 8, 3), 200, np.uint8), 1, samples)
    url = "data:video/x-matroska;base64," + base64.b64encode(content).decode()
    made = []
    for is_heard in (None, False):
        given = {"type": "video_url", "video_url": {"url": url}, "use_audio_in_video": is_heard}
        clip = {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav(6400)).decode(), "format": "wav"}}
        request = {"messages": [{"role": "user", "content": [clip, given, text, clip]}]}
        ids = encoder.encode_messages(parse_messages(request))
        made.append(encoder.insert_media(ids, images=parse_images(request), audios=parse_audios(request)))
    return made


def test_the_audio_of_a_video_is_between_its_steps(prompts: PromptEncoder) -> None:
    """Clips in the order of the prompt: 40 frames are 5 tokens, and 210 are 28, of which 26 precede the next step."""
    encoder = PromptEncoder(prompts.data, vocab_size=320, vision=HEARD.vision, audio=HEARD.audio)
    with_audio, without = heard_prompts(encoder)
    clip, step = [305, *[304] * 5, 306], [301] * 2
    heard = [BEGIN, 305, *step, *[304] * 26, *step, *[304] * 2, 306, END]
    assert with_audio.prompt == [256, *clip, *heard, ord("a"), *clip, ord("\n")]
    assert without.prompt == [256, *clip, BEGIN, *step, *step, END, ord("a"), *clip, ord("\n")]
    assert with_audio.audio is not None and with_audio.audio.lengths.tolist() == [40, 210, 40]
    assert without.audio is not None and without.audio.lengths.tolist() == [40, 40]
    for value in (1, "yes"):
        part = {"type": "video_url", "video_url": {"url": video_url()}, "use_audio_in_video": value}
        with pytest.raises(HttpError, match=r"use_audio_in_video=.*; accepted: true or false"):
            parse_images({"messages": [{"role": "user", "content": [part]}]})


def check_completions(config: Model, cases: list[MediaPrompt], rejected: dict[str, MediaPrompt]) -> None:
    """Decode prompts together, and compare each with a forward pass without a cache."""
    model = build(config)
    sharder = Sharder(build_mesh(Mesh(), jax.devices()[:1]), RULES)
    params = jax.tree.map(lambda weight: 3 * weight, jax.jit(model.init)(jax.random.key(0)))
    settings = EngineConfig(max_batch=4, cache_tokens=512, page_size=4, max_context=96, prefill_chunk=96)
    placed = jax.device_put(params, sharder.tree(model.axes))
    engine = Engine(model, placed, ByteTokenizer(), settings, sharder=sharder, eos=())
    try:
        for reason, case in rejected.items():
            with pytest.raises(RequestRejectedError, match=reason):
                engine.submit(request(case))
        handles = engine.submit_all([request(case) for case in (*cases, MediaPrompt([256, 65, 66], None, None))])
        completions = [handle.result() for handle in handles]
    finally:
        engine.close()

    @jax.jit
    def forward(tokens: jax.Array, media: dict[str, jax.Array]) -> jax.Array:
        batch = {"positions": jnp.arange(tokens.shape[1])[None], **{key: value[None] for key, value in media.items()}}
        hidden, _ = model.hidden(params, tokens, Context.of_batch(batch, Sharder.single(), None))
        return jax.nn.log_softmax(model.logits(params, hidden, Sharder.single())[0])

    for (prompt, images, audio), completion in zip(cases, completions, strict=False):
        tokens = np.zeros((1, 96), np.int32)
        tokens[0, : len(prompt) + 4] = [*prompt, *completion.tokens[:-1]]
        media = {"images": jnp.asarray(images)}
        media |= {} if audio is None else {"audio": audio.frames, "audio_lengths": audio.lengths}
        expected = np.asarray(forward(jnp.asarray(tokens), media))[len(prompt) - 1 :][:5]
        assert completion.tokens == tuple(expected.argmax(axis=1).tolist())
        np.testing.assert_allclose([each.logprob for each in completion.logprobs], expected.max(axis=1), atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen3-vl-tiny", "qwen3.5-tiny-vision"])
def test_completions_equal_one_forward_pass(name: str, prompts: PromptEncoder) -> None:
    ids = prompts.encode_messages(MESSAGES)
    sources = [[data_url(*size), data_url(60, 40)] for size in SIZES]
    cases = [
        prompts.insert_media(ids, images=each, audios=[])
        for each in (*sources, [{"video": video_url()}, data_url(9, 23)])
    ]
    rejected = cases[0]._replace(images=cases[0].images[:1])
    check_completions(model_option(name), cases, {"9 image tokens, but 1 images, which have 3": rejected})


@pytest.mark.slow
@pytest.mark.exhaustive
def test_completions_with_images_a_video_and_audio_equal_one_forward_pass(prompts: PromptEncoder) -> None:
    encoder = PromptEncoder(prompts.data, vocab_size=320, vision=HEARD.vision, audio=HEARD.audio)
    ids = encoder.encode_messages([{"role": "user", "content": f"a\ufffcb{CLIP_MARKER}c\ufffc"}])
    # The video has two steps of 2 x 1 tokens, 26 positions apart, more than it has tokens.
    cases = [
        encoder.insert_media(ids, images=images, audios=[wav(6400)])
        for images in ([data_url(9, 23), data_url(60, 40)], [data_url(9, 23), {"video": video_url()}])
    ]
    assert cases[1].prompt[-8:] == [ord("c"), BEGIN, *[301] * 4, END, ord("\n")]
    check_completions(HEARD, [*cases, *heard_prompts(encoder)], {})


def request(media: MediaPrompt) -> Request:
    sampling = Sampling(max_tokens=5, temperature=0.0, ignore_eos=True)
    (made,) = make_requests(media.prompt, sampling, samples=1, seed=0, number=0, logprobs=0)
    return Request(**{**vars(made), "images": media.images, "audio": media.audio})
