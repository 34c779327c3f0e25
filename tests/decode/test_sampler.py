"""Draws have the frequencies of the softmax, filters and penalty do what transformers' do, seeds what they say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.decode.sampler import ALTERNATIVES, SampledTokens, SamplingFeatures, Settings, choose, filtered, penalised
from tests.support.skips import import_optional

ALL = SamplingFeatures(draws=True, filters=True, penalises=True, reports=True)
DRAW = SamplingFeatures(draws=True, filters=False, penalises=False, reports=False)


def settings(rows: int, **changes) -> Settings:
    """Plain sampling at temperature 1, seed 0, position = row; scalars are the same for all rows."""
    fields = {"temperature_B": 1.0, "top_k_B": 0, "top_p_B": 1.0, "min_p_B": 0.0, "penalty_B": 1.0, **changes}
    kinds = {"top_k_B": np.int32, "position_B": np.int32, "seed_B2": np.uint32}
    fields = {"position_B": np.arange(rows), "seed_B2": np.zeros((rows, 2)), **fields}
    shaped = {
        name: np.broadcast_to(np.asarray(value, kinds.get(name, np.float32)), (rows, 2) if name == "seed_B2" else rows)
        for name, value in fields.items()
    }
    return Settings(**{name: jnp.asarray(value) for name, value in shaped.items()})


run = jax.jit(choose, static_argnames="steps")


def one_each(logits: np.ndarray, steps: SamplingFeatures, seen: np.ndarray | None = None, **changes) -> SampledTokens:
    return run(
        jnp.asarray(logits), None if seen is None else jnp.asarray(seen), settings(len(logits), **changes), steps
    )


def softmax(logits: np.ndarray) -> np.ndarray:
    shares = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def transcribed(logits: np.ndarray, *, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The shares that are drawn from, by sorting, one row at a time, in float64."""
    shares = softmax(logits)
    order = np.argsort(-shares, kind="stable")
    kept = np.zeros(len(shares), bool)
    kept[order[: top_k or None]] = True
    shares = np.where(kept, shares, 0) / shares[kept].sum()
    before = np.cumsum(shares[order]) - shares[order]
    kept[order[before >= top_p]] = False
    kept &= shares >= min_p * shares.max()
    return np.where(kept, shares, 0) / shares[kept].sum()


FILTERS = [
    {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"top_k": 5, "top_p": 1.0, "min_p": 0.0},
    {"top_k": 0, "top_p": 0.8, "min_p": 0.0},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.3},
    {"top_k": 9, "top_p": 0.7, "min_p": 0.1},
    {"top_k": 1, "top_p": 0.01, "min_p": 1.0},
    {"top_k": 1000, "top_p": 1e-6, "min_p": 0.0},
]


@pytest.mark.parametrize("how", FILTERS, ids=str)
def test_filters_equal_their_transcription(how):
    logits = 3 * np.random.default_rng(0).normal(size=(64, 50)).astype(np.float32)
    arrays = [np.full(64, how[name], kind) for name, kind in (("top_k", "i4"), ("top_p", "f4"), ("min_p", "f4"))]
    found = softmax(np.asarray(jax.jit(filtered)(logits, *arrays)))
    expected = np.stack([transcribed(row, **how) for row in logits])
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parity
@pytest.mark.parametrize("how", FILTERS, ids=str)
def test_filters_equal_those_of_transformers(how):
    torch = import_optional("torch", extra="parity")
    processors = import_optional("transformers.generation.logits_process", extra="parity")
    logits = 3 * np.random.default_rng(1).normal(size=(32, 300)).astype(np.float32)
    expected = torch.from_numpy(logits)
    if how["top_k"]:
        expected = processors.TopKLogitsWarper(how["top_k"])(None, expected)
    if how["top_p"] < 1:
        expected = processors.TopPLogitsWarper(how["top_p"])(None, expected)
    if how["min_p"]:
        expected = processors.MinPLogitsWarper(how["min_p"])(None, expected)
    arrays = [np.full(32, how[name], kind) for name, kind in (("top_k", "i4"), ("top_p", "f4"), ("min_p", "f4"))]
    np.testing.assert_array_equal(jax.jit(filtered)(logits, *arrays), expected.numpy())


@pytest.mark.parity
def test_penalty_equals_that_of_transformers():
    torch = import_optional("torch", extra="parity")
    processors = import_optional("transformers.generation.logits_process", extra="parity")
    rng = np.random.default_rng(2)
    logits, ids = rng.normal(size=(4, 60)).astype(np.float32), rng.integers(0, 60, (4, 11))
    seen = np.zeros((4, 60), bool)
    np.put_along_axis(seen, ids, True, axis=1)
    for penalty in (1.3, 0.7):
        expected = processors.RepetitionPenaltyLogitsProcessor(penalty)(torch.from_numpy(ids), torch.from_numpy(logits))
        found = penalised(jnp.asarray(logits), jnp.asarray(seen), jnp.full(4, penalty))
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)


def chi_square(drawn: np.ndarray, shares: np.ndarray) -> float:
    """Standard deviations by which the statistic lies off its mean; about normal for many categories."""
    assert not np.any(drawn[shares == 0]), "a token that was filtered out was drawn"
    expected = shares[shares > 0] * drawn.sum()
    freedom = len(expected) - 1
    statistic = np.sum((drawn[shares > 0] - expected) ** 2 / expected)
    return (statistic - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("temperature", "how"), [(1.0, FILTERS[0]), (0.6, FILTERS[0]), (1.5, {"top_k": 12, "top_p": 0.9, "min_p": 0.05})]
)
@pytest.mark.parametrize("by", ["position", "seed"])
def test_draws_have_the_frequencies_of_the_softmax(temperature, how, by):
    """20,000 draws of one distribution, at as many positions of a seed or with as many seeds."""
    rows = 20_000
    logits = np.random.default_rng(3).normal(size=20).astype(np.float32)
    seeds = np.stack([np.zeros(rows), np.arange(rows)], 1) if by == "seed" else np.array([0, 7])
    choice = one_each(
        np.tile(logits, (rows, 1)),
        SamplingFeatures(draws=True, filters=True, penalises=False, reports=False),
        temperature_B=temperature,
        top_k_B=how["top_k"],
        top_p_B=how["top_p"],
        min_p_B=how["min_p"],
        seed_B2=seeds,
        position_B=np.arange(rows) if by == "position" else np.full(rows, 5),
    )
    drawn = np.bincount(np.asarray(choice.token_B), minlength=20)
    assert abs(chi_square(drawn, transcribed(logits / temperature, **how))) < 4
    wrong = transcribed(logits / (1.15 * temperature), **{**how, "top_k": 0, "top_p": 1.0, "min_p": 0.0})
    assert chi_square(np.where(wrong > 0, drawn, 0), wrong) > 10, "the test would not notice"


def test_a_row_is_drawn_by_its_own_settings_alone():
    """Greedy, plain and filtered rows mixed: each as in a batch of its own kind."""
    rng = np.random.default_rng(4)
    logits, seen = rng.normal(size=(6, 40)).astype(np.float32), rng.random((6, 40)) < 0.3
    mixed = {
        "temperature_B": [0, 1, 0.5, 0, 1, 2],
        "top_k_B": [0, 0, 3, 7, 0, 0],
        "top_p_B": [1, 1, 1, 1, 0.5, 1],
        "penalty_B": [1, 1, 1, 1.8, 1, 1.2],
        "seed_B2": [[0, i] for i in range(6)],
    }
    together = np.asarray(one_each(logits, ALL, seen, **mixed).token_B)
    for row in range(6):
        own = {name: [values[row]] for name, values in mixed.items()}
        alone = one_each(logits[row : row + 1], ALL, seen[row : row + 1], **own, position_B=[row])
        assert int(alone.token_B[0]) == together[row]
    assert together[0] == logits[0].argmax()
    assert int(one_each(logits[1:2], DRAW, seed_B2=[[0, 1]], position_B=[1]).token_B[0]) == together[1]


def test_seeds_use_all_their_bits():
    logits = np.zeros((64, 1000), np.float32)
    for seeds in ([[0, i] for i in range(64)], [[i, 0] for i in range(64)]):
        drawn = one_each(logits, DRAW, seed_B2=np.array(seeds), position_B=np.zeros(64)).token_B
        assert len(np.unique(drawn)) > 55


def test_logprobs_are_those_of_the_model_before_any_setting():
    rng = np.random.default_rng(5)
    logits, seen = 2 * rng.normal(size=(3, 64)).astype(np.float32), rng.random((3, 64)) < 0.5
    choice = one_each(logits, ALL, seen, temperature_B=0.3, top_k_B=2, penalty_B=1.5)
    expected = np.log(softmax(logits))
    np.testing.assert_allclose(choice.logprob_B, expected[np.arange(3), choice.token_B], atol=1e-5)
    np.testing.assert_array_equal(choice.alternatives_BA, np.argsort(-logits, axis=1)[:, :ALTERNATIVES])
    np.testing.assert_allclose(choice.alternative_logprobs_BA, -np.sort(-expected, axis=1)[:, :ALTERNATIVES], atol=1e-5)


def test_logits_that_are_no_numbers_give_no_token():
    logits = np.zeros((3, 8), np.float32)
    logits[1, 3], logits[2, 5] = np.nan, np.inf
    assert list(one_each(logits, DRAW).token_B[1:]) == [-1, -1]
    assert int(one_each(logits, DRAW).token_B[0]) >= 0
