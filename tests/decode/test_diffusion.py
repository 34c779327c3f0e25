"""The engine of block diffusion models, with a model that has learned a text by heart."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.decode import Sampling
from maxhydra.data.tokenizers.byte import ByteTokenizer
from maxhydra.decode.diffusion import DiffusionEngine
from maxhydra.decode.request import Request, RequestRejectedError
from maxhydra.decode.sampling_params import make_requests
from maxhydra.model import build
from maxhydra.model.block_decoder import BlockDecoder
from maxhydra.sharding import Sharder
from maxhydra.train import likelihood_loss

TEXT, EOS, MASK = "to be, or not to be?", ByteTokenizer.eos, 259
STEPS, ROWS = 200, 4
MODEL = ["model=micro", "model.num_layers=1", "model.diffusion.block_size=4", f"model.diffusion.mask_token={MASK}"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine() -> Iterator[DiffusionEngine]:
    """Trained on one row, with EOS behind the text."""
    config, sharder = compose(MODEL).config, Sharder.single()
    model, ids = build(config.model), np.array([*TEXT.encode(), EOS, EOS, EOS, EOS, EOS], np.int32)
    length = len(ids) - 1
    row = {"tokens": ids[:-1], "targets": ids[1:], "weights": np.ones(length), "positions": np.arange(length)}
    batch = {name: jnp.asarray(np.tile(x, (ROWS, 1))) for name, x in row.items()}
    loss, optimizer = likelihood_loss(model, sharder, config.train), optax.adam(5e-3)

    @jax.jit
    def train(params: Any) -> tuple[Any, jax.Array]:
        def step(carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
            params, state = carry
            value, gradients = jax.value_and_grad(lambda p: loss(p, batch, key)["loss"] / (ROWS * length))(params)
            updates, state = optimizer.update(gradients, state)
            return (optax.apply_updates(params, updates), state), value

        (params, _), losses = jax.lax.scan(
            step, (params, optimizer.init(params)), jax.random.split(jax.random.key(1), STEPS)
        )
        return params, losses

    params, losses = train(jax.jit(model.init)(jax.random.key(0)))
    assert losses[-20:].mean() < 0.1 < 3 < losses[0]
    decoder = BlockDecoder(model, params, sharder, 2)
    made = DiffusionEngine(decoder, ByteTokenizer(), eos=frozenset({EOS}), max_context=64)
    yield made
    made.close()


def request(prompt: str, **changes: Any) -> Request:
    sampling = Sampling(**{"max_tokens": 40, **changes})
    return make_requests(prompt.encode(), sampling, samples=1, seed=0, number=0, logprobs=None)[0]


@pytest.mark.parametrize("length", [1, 3, 5, 8])
def test_a_learned_text_is_continued_to_its_end(engine: DiffusionEngine, length: int) -> None:
    deltas = list(engine.submit(request(TEXT[:length])))
    assert "".join(delta.text for delta in deltas) == TEXT[length:]
    assert deltas[-1].finish == "stop" and deltas[-1].tokens[-1] == EOS
    # A block ends at positions 4, 8, ...: text arrives block by block.
    assert len(deltas[0].tokens) == 4 - (length - 1) % 4


def test_limits_and_stop_strings_end_a_completion(engine: DiffusionEngine) -> None:
    limited = engine.submit(request(TEXT[:4], max_tokens=6)).result()
    assert (limited.text, limited.finish) == (TEXT[4:10], "length")
    stopped = engine.submit(request(TEXT[:4], stop=["not"])).result()
    assert (stopped.text, stopped.finish) == (TEXT[4:].partition("not")[0], "stop")
    endless = engine.submit(request(TEXT[:4], ignore_eos=True, max_tokens=20)).result()
    assert len(endless.tokens) == 20 and endless.finish == "length"


def test_seeds_decide_sampled_tokens(engine: DiffusionEngine) -> None:
    sampled = [engine.submit(request("x", temperature=50.0, seed=seed)).result().tokens for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    assert MASK not in sampled[0]


def test_requests_that_cannot_be_served_are_rejected(engine: DiffusionEngine) -> None:
    with pytest.raises(RequestRejectedError, match="top_k=3 is not supported"):
        engine.submit(request("a", top_k=3))
    with pytest.raises(RequestRejectedError, match="prompt has 64 tokens"):
        engine.submit(request("a" * 64))
    with pytest.raises(RequestRejectedError, match="contains the token"):
        engine.submit(make_requests([1, MASK], Sampling(), samples=1, seed=0, number=0, logprobs=None)[0])
