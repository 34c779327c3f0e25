"""Drafts of the multi-token prediction layer are those of the training forward pass; completions stay the same."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema import model as config
from maxhydra.config.schema.decode import Speculation, SpeculationMethod
from maxhydra.config.schema.run import Train
from maxhydra.decode.drafting import DraftCaches, Drafting, DraftInputs, DraftWeights, TokenHistory
from maxhydra.decode.engine import Engine
from maxhydra.decode.mtp_drafting import MtpDrafter
from maxhydra.decode.request import Completion, Request
from maxhydra.layers import Context, PagedCacheSpec, PageTable
from maxhydra.model import ModelDef, build
from maxhydra.model.mtp_cache import keep_hidden, last_hidden
from maxhydra.sharding import Sharder
from maxhydra.train import next_token_loss
from tests.decode.test_engine import make_request, shared_programs, tiny
from tests.decode.test_engine import start as start_engine
from tests.decode.test_speculation import ENGINES, always_drafts, batches, check_equal, complete, cyclic

__all__ = ["always_drafts", "shared_programs"]
SPECULATION = Speculation(method=SpeculationMethod.mtp, tokens=3)
SINGLE, PAGE, LENGTH = Sharder.single(), 4, 23


def with_mtp(model: config.Model, depth: int = 1) -> ModelDef:
    return build(dataclasses.replace(model, mtp=config.Mtp(depth=depth)))


@functools.cache
def model_with_mtp() -> ModelDef:
    return with_mtp(tiny()[0].config)


def random_params(model: ModelDef, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), model.shapes)


@functools.cache
def mostly_accepted() -> dict:
    """The weights of test_speculation, with an MTP layer that returns the embedding of the next token."""
    mtp = random_params(model_with_mtp())["mtp"]["0"]
    width = tiny()[0].config.emb_dim
    kernel = jnp.eye(2 * width, width, dtype=jnp.float32)
    zeros = {name: jax.tree.map(jnp.zeros_like, mtp[name]) for name in ("attention", "mlp")}
    ones = {name: jax.tree.map(jnp.ones_like, mtp[name]) for name in ("embedding_norm", "norm")}
    return {**cyclic(), "mtp": {"0": {**mtp, **zeros, **ones, "join": {"kernel": kernel}}}}


class CachedModel:
    """A model with a paged cache of two rows."""

    def __init__(self, model: ModelDef, params: dict):
        self.model, self.params = model, params
        self.cache = model.empty_cache(PagedCacheSpec(16, PAGE, slots=2, storage=None), has_mtp=True)
        self.rows = PageTable(jnp.asarray([[3, 1, 0, 9, 8, 7, 6], [2, 4, 5, 10, 11, 12, 13]]), jnp.asarray([1, 0]))

    def run(self, tokens_BT: np.ndarray, start_B: list[int], *, lengths: list[int], accepted: list[int]) -> None:
        """Run tokens of which the first ones are accepted."""
        offsets_T, lengths_B, accepted_B = np.arange(tokens_BT.shape[1]), np.asarray(lengths), np.asarray(accepted)
        positions_BT = np.asarray(start_B)[:, None] + offsets_T
        positions_BT = jnp.asarray(np.where(offsets_T < lengths_B[:, None], positions_BT, -1))
        is_prefill = lengths == accepted
        context = Context(
            positions=positions_BT,
            segments=(positions_BT >= 0).astype(jnp.int32),
            sharder=SINGLE,
            cache=self.cache,
            dropout_key=None,
            rows=self.rows,
            output_index=jnp.asarray(lengths_B) - 1 if is_prefill else None,
            is_fresh=not any(start_B),
        )
        output = jax.jit(self.model.forward)(self.params, jnp.asarray(tokens_BT), context)
        self.cache = output.cache
        if not is_prefill:
            index_B = jnp.asarray(accepted_B) - 1
            self.cache = keep_hidden(self.cache, output.hidden_BTD, positions_BT, index_B, self.rows)

    def draft(self, tokens_B: np.ndarray, position_B: list[int]) -> np.ndarray:
        """Three drafts per row, whose entries are then in the cache."""
        last_B, drafting = jnp.asarray(position_B), Drafting(3, 1, 1, LENGTH, SpeculationMethod.mtp)
        history = TokenHistory.empty(2, LENGTH)._replace(last_N=last_B, remaining_N=jnp.full(2, 4))
        history = history.with_last_token(jnp.asarray(tokens_B))
        drafter = MtpDrafter(self.model, drafting, SINGLE)
        inputs = DraftInputs(history, self.rows, None, sampling=None, slot_state=None)
        drafts, caches = drafter.draft(DraftWeights(self.params, None), DraftCaches(self.cache, None), inputs)
        self.cache = caches.model
        return np.asarray(drafts.tokens_BK)

    def draft_logits(self, tokens_B: np.ndarray, position_B: list[int]) -> np.ndarray:
        """Logits of the first draft, after the last tokens at these positions."""
        context = Context(
            positions=jnp.asarray(position_B)[:, None] - 1,
            segments=jnp.ones((2, 1), jnp.int32),
            sharder=SINGLE,
            cache=self.cache,
            dropout_key=None,
            rows=self.rows,
        )
        hidden_B1D = last_hidden(self.cache, self.rows)
        tokens_B1 = jnp.asarray(tokens_B)[:, None]
        hidden_B1D, _ = jax.jit(self.model.run_mtp_layer)(self.params, hidden_B1D, tokens_B1, context)
        return np.asarray(self.model.logits(self.params, hidden_B1D, SINGLE))[:, 0]


@functools.cache
def latent() -> ModelDef:
    """A prefix layer, latent attention and experts."""
    model = compose(["task=pretrain", "model=deepseek3-tiny"]).config.model
    return build(dataclasses.replace(model, context_length=64))


@pytest.mark.slow
@pytest.mark.default_cases("model_with_mtp")
@pytest.mark.parametrize("make_model", [model_with_mtp, latent])
def test_draft_logits_are_those_of_the_training_forward_pass(make_model) -> None:
    """After fresh and later prefill chunks, single tokens, and steps whose drafts were rejected."""
    model = make_model()
    params, rng = random_params(model), np.random.default_rng(1)
    tokens = rng.integers(0, 200, (2, LENGTH))
    context = Context(
        positions=jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH)),
        segments=None,
        sharder=SINGLE,
        cache=None,
        dropout_key=None,
    )
    trained = jax.jit(functools.partial(model.forward, mtp_hidden=True))(params, jnp.asarray(tokens), context)
    expected = np.asarray(model.logits(params, trained.mtp_hidden[0], SINGLE))
    scale = np.abs(expected).max()
    cached, at = CachedModel(model, params), [0, 0]
    for number, accepted in enumerate(([8, 6], [3, 4], [1, 1], [2, 3], [4, 1], [1, 2])):
        # A step's inputs after the accepted ones are drafts that turn out to be wrong.
        lengths = accepted if number < 3 else [4, 4]
        inputs = rng.integers(0, 200, (2, 8))
        for row, (start, count) in enumerate(zip(at, accepted, strict=True)):
            inputs[row, :count] = tokens[row, start : start + count]
        cached.run(inputs, at, lengths=lengths, accepted=accepted)
        at = [start + count for start, count in zip(at, accepted, strict=True)]
        last = tokens[[0, 1], at]
        found, expected_logits = cached.draft_logits(last, at), expected[[0, 1], np.asarray(at) - 1]
        np.testing.assert_allclose(found / scale, expected_logits / scale, atol=1e-5)
        np.testing.assert_array_equal(cached.draft(last, at)[:, 0], expected_logits.argmax(axis=-1))


def start(params: dict | None = None, **changes) -> Engine:
    sizes = {"max_batch": 3, "prefill_chunk": 16, "deterministic": True, "speculation": SPECULATION}
    params = mostly_accepted() if params is None else params
    return start_engine(params=params, model=model_with_mtp(), **{**sizes, **changes})


@functools.cache
def stop_string() -> str:
    """Text inside the completion of the long prompt."""
    engine = start(speculation=Speculation())
    try:
        long = make_request("to be or not to be, that is the question", max_tokens=25, ignore_eos=True)
        return engine.submit(long).result().text[7:11]
    finally:
        engine.close()


@functools.cache
def plain_completions() -> list[list[Completion]]:
    engine = start(speculation=Speculation())
    try:
        return [complete(engine, batch) for batch in requests()]
    finally:
        engine.close()


def requests() -> list[list[Request]]:
    """Prompts longer than a prefill chunk, and stop strings."""
    long = make_request("to be or not to be, that is the question", max_tokens=25, ignore_eos=True)
    return [*batches(), [long, dataclasses.replace(long, stop=(stop_string(),)), make_request("x", max_tokens=9)]]


CASES = {
    **ENGINES,
    "chosen multi-step": {"burst": 3},
    "random layer": {"burst": 2},
    "chosen random layer": {"burst": 2},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_completions_are_those_of_plain_decoding(case: str, request: pytest.FixtureRequest) -> None:
    """Also if no draft is accepted, and if only some calls have drafts."""
    if not case.startswith("chosen"):
        request.getfixturevalue("always_drafts")
    is_random = case.endswith("random layer")
    params = {**mostly_accepted(), "mtp": random_params(model_with_mtp())["mtp"]} if is_random else None
    engine = start(params, **CASES[case])
    try:
        for batch, expected in zip(requests(), plain_completions(), strict=True):
            check_equal(complete(engine, batch), expected)
        stats = engine.stats()
    finally:
        engine.close()
    assert stats["pages_used"] == stats["running"] == stats["waiting"] == 0
    if case == "chosen random layer":
        assert 0 < stats["steps_speculative"] < stats["steps"] / 2, stats
    else:
        assert stats["tokens_drafted"] > 100 and (stats["tokens_accepted"] > 50) != is_random, stats


# The next token depends on the last two.
PATTERN = np.asarray([1, 2, 1, 3, 1, 4, 2, 3, 2, 4, 3, 5])


@functools.cache
def trained_on_pattern() -> dict:
    """Weights trained with the MTP loss on a text that repeats."""
    model = model_with_mtp()
    params = jax.tree.map(lambda x: 0.3 * x, random_params(model))
    offsets, T = np.arange(8)[:, None], np.arange(32)
    tokens, targets = (jnp.asarray(PATTERN[(offsets + T + shift) % len(PATTERN)]) for shift in (0, 1))
    positions = jnp.broadcast_to(jnp.asarray(T), tokens.shape)
    batch = {"tokens": tokens, "targets": targets, "positions": positions, "segments": jnp.ones_like(tokens)}
    batch["weights"] = jnp.ones(tokens.shape, jnp.float32)
    loss, optimizer = next_token_loss(model, SINGLE, Train(z_loss=0.0, loss_chunk=0)), optax.adam(1e-2)

    @jax.jit
    def train(params: dict, state) -> tuple[dict, jax.Array]:
        def step(carry, _):
            params, state = carry
            grads = jax.grad(lambda params: (sums := loss(params, batch, None))["loss"] / sums["weight"])(params)
            updates, state = optimizer.update(grads, state)
            return (optax.apply_updates(params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (params, state), None, length=150)
        return params, loss(params, batch, None)["mtp_loss"] / batch["weights"].sum()

    params, mtp_loss = train(params, optimizer.init(params))
    assert mtp_loss < 0.2
    return params


@pytest.mark.exhaustive
@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize(("tokens", "least"), [(1, 0.95), (2, 0.5)])
def test_drafts_of_a_trained_layer_are_accepted(tokens: int, least: float) -> None:
    """Also after a prompt whose first pages are shared. The layer is trained for one draft."""
    speculation = dataclasses.replace(SPECULATION, tokens=tokens)
    engine = start(trained_on_pattern(), speculation=speculation, burst=2)
    try:
        prompts = [np.resize(np.roll(PATTERN, n), 20 + n).tolist() for n in range(3)]
        for _ in range(2):
            before = engine.stats()
            found = complete(engine, [make_request(prompt, max_tokens=40, ignore_eos=True) for prompt in prompts])
            for n, completion in enumerate(found):
                assert list(completion.tokens) == np.roll(PATTERN, n)[np.arange(20 + n, 60 + n) % 12].tolist()
            after = engine.stats()
            drafted, accepted = (after[name] - before[name] for name in ("tokens_drafted", "tokens_accepted"))
            assert accepted > least * drafted, after
        # Pages of 8 tokens.
        assert after["prompt_tokens_read"] - before["prompt_tokens_read"] == 63 - 3 * 16
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=qwen3-next-80b-a3b"], r"speculation\.method=mtp: is not supported with recurrent layers"),
        (["model=llama3.2-1b"], r"speculation\.method=mtp: drafts with .* the model has none \(model\.mtp\.depth=0\)"),
        (
            ["model=deepseek3-tiny", "task.engine.speculation.max_ngram=4"],
            r"max_ngram=4: has no effect with method=mtp",
        ),
        (
            ["task=serve", "model=llama3.2-1b", "model.mtp.depth=1", "task.lora.live=true"],
            r"speculation\.method=mtp: is not supported with adapters",
        ),
    ],
)
def test_unsupported_settings_are_rejected(overrides: list[str], message: str) -> None:
    task = ["task=decode", "task.prompt=a"] if "task=serve" not in overrides else []
    with pytest.raises(ConfigError, match=message):
        compose([*task, *overrides, "task.engine.speculation.method=mtp"])
