"""Image encoder and projector: pooling, placeholders without an image, text without images, adapters."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.options import model_option
from maxhydra.config.schema.model import Model, Pooling
from maxhydra.config.schema.quantization import Adapter, AdapterKind
from maxhydra.layers import Context, VisionSpec
from maxhydra.layers.params import ParamBuilder
from maxhydra.layers.vision import Projector
from maxhydra.model import build
from maxhydra.sharding import Sharder

SINGLE = Sharder.single()
TEXT = jnp.arange(12).reshape(1, 12)


def with_pooling(pooling: Pooling) -> Model:
    model = model_option("gemma3-tiny-vision")
    projector = dataclasses.replace(model.vision.projector, pooling=pooling)
    return dataclasses.replace(model, vision=dataclasses.replace(model.vision, projector=projector))


def context(tokens: jax.Array, images: jax.Array | None = None) -> Context:
    batch = {"positions": jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)}
    return Context.of_batch(batch | ({} if images is None else {"images": images}), SINGLE, None)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", list(Pooling))
def test_the_projector_pools_square_blocks_of_patches(pooling: Pooling) -> None:
    spec = VisionSpec.of(with_pooling(pooling))
    assert spec is not None
    make = ParamBuilder(
        jax.random.key(0),
        dtype=np.dtype("float32"),
        layers=None,
        matmul_spec=build(with_pooling(pooling))._spec.matmul_spec,
    )
    projector = Projector(spec, make)
    x = np.random.default_rng(0).normal(size=(2, 16, 32)).astype(np.float32)
    grid = x.reshape(2, 4, 4, 32)
    blocks = [grid[:, i : i + 2, j : j + 2] for i in (0, 2) for j in (0, 2)]
    if pooling is Pooling.average:
        pooled = np.stack([block.mean(axis=(1, 2)) for block in blocks], axis=1)
    else:
        pooled = np.stack([block.reshape(2, -1) for block in blocks], axis=1)
    normed = pooled / np.sqrt((pooled**2).mean(axis=-1, keepdims=True) + spec.norm_eps)
    expected = normed @ np.asarray(projector.out.kernel[...])
    np.testing.assert_allclose(projector(jnp.asarray(x), context(TEXT)), expected, atol=1e-5)


@pytest.mark.slow
def test_a_placeholder_without_an_image_gives_nan() -> None:
    model = build(model_option("gemma3-tiny-vision"))
    params = jax.jit(model.init)(jax.random.key(0))
    vision = model.config.vision
    tokens = jnp.array([[1, *[vision.placeholder_id] * 5, 2]])
    images = jnp.zeros((1, 1, vision.image_size, vision.image_size, 3))
    hidden = jax.jit(lambda params: model.hidden(params, tokens, context(tokens, images))[0])(params)
    assert not np.isfinite(hidden[0, -1]).all()


@pytest.mark.slow
def test_text_compiles_to_the_program_of_the_text_model() -> None:
    def program(name: str) -> str:
        model = build(model_option(name))
        params = model.init(None)
        vision = {"vision": params.pop("vision")} if "vision" in params else {}

        def hidden(text: Any, tokens: jax.Array) -> jax.Array:
            return model.hidden({**text, **vision}, tokens, context(tokens))[0]

        return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(hidden)(params, TEXT)))

    assert program("gemma3-tiny") == program("gemma3-tiny-vision")


def test_adapters_reach_the_encoder_by_name() -> None:
    adapter = Adapter(kind=AdapterKind.lora, rank=2, alpha=4, dropout=0.0, targets=["vision/"])
    model = build(model_option("gemma3-tiny-vision"), adapter)

    def adapted(tree: Any) -> bool:
        return isinstance(tree, dict) and any(key == "lora" or adapted(value) for key, value in tree.items())

    assert adapted(model.shapes["vision"]["layers"]) and not adapted(model.shapes["pattern"])


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("model.vision.patch_size=5", "does not divide image_size=32"),
        ("model.vision.num_heads=3", "does not divide vision.emb_dim=32"),
        ("model.vision={num_heads: 16, rope_theta: 100.0}", "cannot divide by 4"),
        ("model.vision.projector.tokens=5", "into equal squares"),
        ("model.vision.placeholder_id=320", "is not in the vocabulary"),
        ("model.vision.placeholder_id=null", "is needed by models with an image encoder"),
        ("model.mtp.depth=1", "is not supported together with model.mtp.depth"),
    ],
)
def test_sizes_that_do_not_fit(override: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        compose(["model=gemma3-tiny-vision", override])


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("model.vision.axis_positions=11", "less than the 12 patches of the longest side"),
        ("model.vision.layers.bias=true", "is not supported with clipped"),
        ("model.vision.min_patches=4", "model.vision.fill_patches=false"),
        ("model.vision.causal_without_window=true", "model.vision.bidirectional"),
    ],
)
def test_options_of_images_of_different_sizes(override: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        compose(["model=gemma4-tiny-vision", override])


@pytest.mark.parametrize(
    ("key", "value", "other"),
    [
        ("vision.video_id", 300, "vision.placeholder_id"),
        ("audio.placeholder_id", 301, "vision.video_id"),
        ("audio.begin_id", 300, "vision.placeholder_id"),
        ("audio.placeholder_id", 303, "vision.end_id"),
    ],
)
def test_media_with_equal_tokens_are_rejected(key: str, value: int, other: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"model\.{key}={value}: equals {other}, .*\n +accepted: an id other than 30"
    ):
        compose(["model=qwen3-omni-tiny-media", f"model.{key}={value}"])


def test_marks_of_media_may_be_equal() -> None:
    model = compose(["model=qwen3-omni-tiny-media", "model.audio.begin_id=302"]).config.model
    assert model.audio.begin_id == model.vision.begin_id
