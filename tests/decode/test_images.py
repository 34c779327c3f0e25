"""Requests with images: the engine against one forward pass, and bad requests."""

import base64
import contextlib
import io
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

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
from maxhydra.data.image_tokens import image_ids, insert_images, join_pixels, read_images
from maxhydra.data.images import ProcessedImage
from maxhydra.data.tokenizers.byte import ByteTokenizer
from maxhydra.decode.engine import Engine
from maxhydra.decode.openai_server.http11 import HttpError
from maxhydra.decode.openai_server.messages import parse_images, parse_messages
from maxhydra.decode.request import Request, RequestRejectedError
from maxhydra.decode.sampling_params import PromptEncoder, PromptError, make_requests
from maxhydra.layers import Context
from maxhydra.model import ModelDef, build
from maxhydra.sharding import Sharder, build_mesh
from tests.support.pictures import picture

SINGLE = Sharder.single()
VISION = model_option("gemma3-tiny-vision").vision
PIXELS = np.random.default_rng(0).uniform(-1, 1, (3, VISION.image_size, VISION.image_size, 3)).astype(np.float32)
IMAGE = image_ids(ProcessedImage(PIXELS[:1], None, VISION.projector.tokens), VISION)


@cache
def tiny(name: str = "gemma3-tiny-vision") -> tuple[ModelDef, Any]:
    """Random weights, with embeddings and projections large enough for tokens to depend on the image."""
    model = build(model_option(name))
    return model, jax.tree.map(lambda weight: 3 * weight, jax.jit(model.init)(jax.random.key(0)))


@contextlib.contextmanager
def running(name: str) -> Iterator[Engine]:
    model, params = tiny(name)
    sharder = Sharder(build_mesh(Mesh(), jax.devices()[:1]), RULES)
    params = jax.device_put(params, sharder.tree(model.axes))
    settings = EngineConfig(max_batch=4, cache_tokens=512, page_size=4, max_context=64, prefill_chunk=64)
    made = Engine(model, params, ByteTokenizer(), settings, sharder=sharder, eos=())
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running("gemma3-tiny-vision") as engine:
        yield engine


def request(prompt: list[int], images: np.ndarray | None) -> Request:
    sampling = Sampling(max_tokens=5, temperature=0.0, ignore_eos=True)
    (made,) = make_requests(prompt, sampling, samples=1, seed=0, number=0, logprobs=0)
    return Request(**{**vars(made), "images": images})


@partial(jax.jit, static_argnames="name")
def forward(params: Any, ids: jax.Array, images: jax.Array, *, name: str) -> jax.Array:
    """Log-probabilities of one row by a forward pass without a cache."""
    model, _ = tiny(name)
    batch = {"positions": jnp.arange(len(ids))[None], "images": images[None]}
    hidden, _ = model.hidden(params, ids[None], Context.of_batch(batch, SINGLE, None))
    return jax.nn.log_softmax(model.logits(params, hidden, SINGLE)[0])


def logprobs_of(
    prompt: list[int], images: np.ndarray | None, tokens: tuple[int, ...], name: str = "gemma3-tiny-vision"
) -> np.ndarray:
    """Log-probabilities of the next tokens; padding behind them and images without placeholders change nothing."""
    size = tiny(name)[0].config.vision.image_size
    ids, pixels = np.zeros(48, np.int32), np.zeros((4, size, size, 3), np.float32)
    ids[: len(prompt) + len(tokens)] = [*prompt, *tokens]
    if images is not None:
        pixels[: len(images)] = images
    logprobs = forward(tiny(name)[1], jnp.asarray(ids), jnp.asarray(pixels), name=name)
    return np.asarray(logprobs)[len(prompt) - 1 :][: len(tokens)]


@pytest.mark.slow
def test_completions_equal_one_forward_pass(engine: Engine) -> None:
    """Prompts with equal tokens and different images are decoded together, and do not share pages."""
    one = [256, 40, *IMAGE, 65, 66]
    cases = [(one, PIXELS[:1]), (one, PIXELS[1:2]), ([*one, *IMAGE, 67], PIXELS[1:]), ([256, 65, 66, 67], None)]
    handles = engine.submit_all([request(*case) for case in cases])
    completions = [handle.result() for handle in handles]
    for case, completion in zip(cases, completions, strict=True):
        expected = logprobs_of(*case, completion.tokens)
        assert completion.tokens == tuple(expected.argmax(axis=1).tolist())
        np.testing.assert_allclose([each.logprob for each in completion.logprobs], expected.max(axis=1), atol=1e-4)
    first, second = ([each.logprob for each in completion.logprobs] for completion in completions[:2])
    assert not np.allclose(first, second, rtol=0.1, atol=0)


@pytest.mark.exhaustive
def test_completions_about_tiles_equal_one_forward_pass() -> None:
    """Images of three squares and of one, in prompts longer than a chunk of attention."""
    name = "llama4-tiny-vision"
    vision = model_option(name).vision
    with running(name) as engine:
        for size in ((30, 10), (12, 16)):
            images = read_images([np.asarray(picture(*size))], vision)
            ids, _ = insert_images(np.array([256, *b"this is an image: ", 300, 70, 71]), images, vision)
            pixels = join_pixels(images)
            completion = engine.submit(request(ids.tolist(), pixels)).result()
            assert vision.placeholder_id not in completion.tokens, "which a forward pass would replace by an image"
            expected = logprobs_of(ids.tolist(), pixels, completion.tokens, name)
            assert completion.tokens == tuple(expected.argmax(axis=1).tolist())
            np.testing.assert_allclose([each.logprob for each in completion.logprobs], expected.max(axis=1), atol=1e-4)


def test_requests_that_cannot_be_served(engine: Engine) -> None:
    prompt = [256, *IMAGE, 65]
    for made, reason in (
        (request(prompt, None), "4 image tokens, but 0 images"),
        (request(prompt, PIXELS[:2]), "4 image tokens, but 2 images, which have 8"),
        (request(prompt, PIXELS[:1, :16]), "images have shape"),
        (request([65] * 60 + prompt, PIXELS[:1]), "raise task.engine.prefill_chunk"),
    ):
        with pytest.raises(RequestRejectedError, match=reason):
            engine.submit(made)


def data_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def png(size: tuple[int, int] = (7, 5)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (255, 0, 127)).save(buffer, "PNG")
    return buffer.getvalue()


def chat(url: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": "look: "}, {"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": parts}]}


def test_image_urls_of_chat_requests() -> None:
    url = data_url(png())
    assert parse_images(chat(url)) == [url]
    data = compose(["data.tokenizer.chat_template=lines"]).config.data
    prompts = PromptEncoder(data, vocab_size=320, vision=VISION)
    ids = prompts.encode_messages(parse_messages(chat(url)))
    prompt, pixels = prompts.insert_images(ids, prompts.read_images([url]))
    assert prompt == [256, *b"look: \n\n", *IMAGE, *b"\n\n\n"]
    assert pixels is not None and pixels.shape == (1, VISION.image_size, VISION.image_size, 3)
    np.testing.assert_allclose(pixels[0, 3, 4], [1, -1, -1 / 255], atol=1e-6)


def test_video_urls_of_chat_requests() -> None:
    def message(url: str) -> dict[str, Any]:
        parts = [{"type": "video_url", "video_url": {"url": url}}, {"type": "image_url", "image_url": data_url(png())}]
        return {"messages": [{"role": "user", "content": parts}]}

    given = message("data:video/mp4;base64,AA==")
    assert parse_images(given) == [{"video": "data:video/mp4;base64,AA=="}, data_url(png())]
    assert parse_messages(given) == [{"role": "user", "content": "\ufffc\ufffc"}]
    for url in ("https://example.com/a.mp4", "file:///etc/passwd", "/etc", "data:text/html;base64,AA"):
        with pytest.raises(HttpError, match="a video URL other than data:video/"):
            parse_images(message(url))


@pytest.mark.slow
def test_the_number_of_tokens_depends_on_the_tiles_of_an_image() -> None:
    """An image of 2 x 1 tiles and the whole image, then one of one tile."""
    vision = model_option("llama4-tiny-vision").vision
    prompts = PromptEncoder(compose(["data.tokenizer.chat_template=lines"]).config.data, vocab_size=320, vision=vision)
    urls = [data_url(png((10, 30))), data_url(png((16, 9)))]
    images = prompts.read_images(urls)
    ids = prompts.encode_messages([*parse_messages(chat(urls[0])), *parse_messages(chat(urls[1]))])
    prompt, pixels = prompts.insert_images(ids, images)
    tile = [300] * 4
    large, small = [301, *tile, 304, *tile, 304, 305, *tile, 302], [301, 305, *tile, 302]
    assert prompt == [256, *b"look: ", *large, *b"\nlook: ", *small, ord("\n")]
    assert pixels is not None and pixels.shape == (4, 16, 16, 3)
    with pytest.raises(PromptError, match="has 1 images, but 2 image parts"):
        prompts.insert_images(ids, images[:1])


@pytest.mark.slow
def test_bad_image_urls(tmp_path) -> None:
    for url in ("https://example.com/a.png", "file:///etc/passwd", "/etc/passwd", "data:text/html;base64,AA"):
        with pytest.raises(HttpError, match="URLs are not fetched"):
            parse_images(chat(url))
    with pytest.raises(HttpError, match="text, image_url"):
        parse_messages(chat(7))
    prompts = PromptEncoder(compose(["data.tokenizer.chat_template=lines"]).config.data, vocab_size=320, vision=VISION)
    for value, reason in (
        ("data:image/png;base64,!", "not base64"),
        (data_url(png()[:40]), "not an image of a supported format"),
        (data_url(b"GIF89"), "not an image of a supported format"),
        (str(tmp_path / "no.png"), "no such file"),
    ):
        with pytest.raises(PromptError, match=reason):
            prompts.read_images([value])
    with pytest.raises(PromptError, match="takes no images"):
        PromptEncoder(prompts.data, vocab_size=320).read_images([data_url(png())])
