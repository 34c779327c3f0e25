"""Audio encoder: clips are independent of their batch, placeholders without audio, text alone, adapters, sizes."""

import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.options import model_option
from maxhydra.config.schema.quantization import Adapter, AdapterKind
from maxhydra.layers import Context
from maxhydra.model import ModelDef, build
from maxhydra.sharding import Sharder

SINGLE = Sharder.single()
TEXT = jnp.arange(12).reshape(1, 12)
MODEL = model_option("micro-audio")
AUDIO = MODEL.audio


def context(tokens: jax.Array, frames: Any = None, lengths: Any = None) -> Context:
    batch = {"positions": jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)}
    audio = {} if frames is None else {"audio": jnp.asarray(frames), "audio_lengths": jnp.asarray(lengths)}
    return Context.of_batch(batch | audio, SINGLE, None)


@cache
def tiny() -> tuple[ModelDef, Any]:
    model = build(MODEL)
    return model, jax.jit(model.init)(jax.random.key(0))


def hidden(tokens: Any, frames: np.ndarray, lengths: Any) -> np.ndarray:
    model, params = tiny()

    @jax.jit
    def run(params: Any) -> jax.Array:
        return model.hidden(params, jnp.asarray(tokens), context(jnp.asarray(tokens), frames, lengths))[0]

    return np.asarray(run(params))


@pytest.mark.exhaustive
def test_clips_do_not_depend_on_padding_and_neighbours() -> None:
    """Two clips of one row, one shorter than a chunk and one over two windows, as in separate rows."""
    lengths = [AUDIO.chunk_frames - 5, AUDIO.chunk_frames * AUDIO.window_chunks + 3]
    counts = [AUDIO.num_tokens(length) for length in lengths]
    frames = np.random.default_rng(0).normal(size=(2, 100, AUDIO.num_bands)).astype(np.float32)
    rows = [[1, *[AUDIO.placeholder_id] * count, 2] for count in counts]
    alone = [hidden([row], frames[None, [i], : lengths[i]], [[lengths[i]]]) for i, row in enumerate(rows)]
    size = max(map(len, rows))
    padded = [[*row, *[0] * (size - len(row))] for row in rows]
    batched = hidden(padded, frames[:, None], [[length] for length in lengths])
    for i, row in enumerate(rows):
        np.testing.assert_allclose(batched[i, : len(row)], alone[i][0], atol=1e-5)
    # In one row the second clip has other tokens before it; the tokens of the first are the same.
    both = hidden([[*rows[0], *rows[1]]], frames[None], [lengths])
    np.testing.assert_allclose(both[0, : len(rows[0])], alone[0][0], atol=1e-5)


@pytest.mark.slow
def test_a_placeholder_without_audio_gives_nan() -> None:
    tokens = [[1, *[AUDIO.placeholder_id] * (AUDIO.num_tokens(9) + 1), 2]]
    frames = np.ones((1, 2, 16, AUDIO.num_bands), np.float32)
    assert not np.isfinite(hidden(tokens, frames, [[9, 0]])[0, -1]).all()
    assert np.isfinite(hidden(tokens, frames, [[9, 1]])).all()


@pytest.mark.slow
def test_text_compiles_to_the_program_of_the_text_model() -> None:
    def program(name: str) -> str:
        model = build(model_option(name))
        params = model.init(None)
        audio = {"audio": params.pop("audio")} if "audio" in params else {}
        params["embedding"]["table"] = params["embedding"]["table"][:260]

        def run(text: Any, tokens: jax.Array) -> jax.Array:
            return model.hidden({**text, **audio}, tokens, context(tokens))[0]

        return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(run)(params, TEXT)))

    assert program("micro") == program("micro-audio")


def test_adapters_reach_the_encoder_by_name() -> None:
    adapter = Adapter(kind=AdapterKind.lora, rank=2, alpha=4, dropout=0.0, targets=["audio/"])
    model = build(MODEL, adapter)

    def adapted(tree: Any) -> bool:
        return isinstance(tree, dict) and any(key == "lora" or adapted(value) for key, value in tree.items())

    assert adapted(model.shapes["audio"]["layers"]) and not adapted(model.shapes["pattern"])


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("model.audio.num_heads=3", "does not divide audio.emb_dim=64"),
        ("model.audio.emb_dim=65", "is odd"),
        ("model.audio.placeholder_id=320", "is not in the vocabulary"),
        ("model.audio.placeholder_id=null", "is needed by models with an audio encoder"),
        ("model.mtp.depth=1", "is not supported together with model.mtp.depth"),
    ],
)
def test_sizes_that_do_not_fit(override: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        compose(["model=micro-audio", override])


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("model.audio.conformer.conv_dims=[]", "is empty"),
        ("model.audio.chunk_frames=50", "model.audio.encoder=transformer"),
    ],
)
def test_options_of_a_conformer(override: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        compose(["model=gemma4-tiny-audio", override])
