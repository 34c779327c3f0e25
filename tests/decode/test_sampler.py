"""Sample frequencies follow the softmax; filters and penalty equal those of transformers; seeds are reproducible."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.decode.sampler import (
    MAX_LOGPROBS,
    LogitControls,
    SampledTokens,
    SamplingArrays,
    SamplingFeatures,
    _apply_controls,
    apply_filters,
    apply_penalty,
    sample,
)
from tests.support.skips import import_optional

ALL = SamplingFeatures(random=True, filters=True, penalties=True, logprobs=True)
RANDOM = SamplingFeatures(random=True, filters=False, penalties=False, logprobs=False)


def sampling_arrays(rows: int, **changes) -> SamplingArrays:
    """Return plain sampling at temperature 1, seed 0, position = row; scalars are broadcast to all rows."""
    fields = {"temperature_B": 1.0, "top_k_B": 0, "top_p_B": 1.0, "min_p_B": 0.0, "penalty_B": 1.0, **changes}
    fields = {"frequency_B": 0.0, "presence_B": 0.0, "num_bias_B": 0, **fields}
    kinds = {"top_k_B": np.int32, "position_B": np.int32, "seed_B2": np.uint32, "num_bias_B": np.int32}
    fields = {"position_B": np.arange(rows), "seed_B2": np.zeros((rows, 2)), **fields}
    shaped = {
        name: np.broadcast_to(np.asarray(value, kinds.get(name, np.float32)), (rows, 2) if name == "seed_B2" else rows)
        for name, value in fields.items()
    }
    return SamplingArrays(**{name: jnp.asarray(value) for name, value in shaped.items()})


jitted_sample = jax.jit(sample, static_argnames="features")


def sample_rows(
    logits: np.ndarray, features: SamplingFeatures, seen: np.ndarray | None = None, **changes
) -> SampledTokens:
    controls = LogitControls(None if seen is None else jnp.asarray(seen, jnp.uint16))
    return jitted_sample(jnp.asarray(logits), controls, sampling_arrays(len(logits), **changes), features)


def softmax(logits: np.ndarray) -> np.ndarray:
    probs = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return probs / probs.sum(-1, keepdims=True)


def reference_probs(logits: np.ndarray, *, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Return the filtered probabilities of one row, computed by sorting in float64."""
    probs = softmax(logits)
    order = np.argsort(-probs, kind="stable")
    allowed = np.zeros(len(probs), bool)
    allowed[order[: top_k or None]] = True
    probs = np.where(allowed, probs, 0) / probs[allowed].sum()
    before = np.cumsum(probs[order]) - probs[order]
    allowed[order[before >= top_p]] = False
    allowed &= probs >= min_p * probs.max()
    return np.where(allowed, probs, 0) / probs[allowed].sum()


FILTERS = [
    {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"top_k": 5, "top_p": 1.0, "min_p": 0.0},
    {"top_k": 0, "top_p": 0.8, "min_p": 0.0},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.3},
    {"top_k": 9, "top_p": 0.7, "min_p": 0.1},
    {"top_k": 1, "top_p": 0.01, "min_p": 1.0},
    {"top_k": 1000, "top_p": 1e-6, "min_p": 0.0},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_equal_the_reference(filters):
    logits = 3 * np.random.default_rng(0).normal(size=(64, 50)).astype(np.float32)
    arrays = [np.full(64, filters[name], kind) for name, kind in (("top_k", "i4"), ("top_p", "f4"), ("min_p", "f4"))]
    actual = softmax(np.asarray(jax.jit(apply_filters)(logits, *arrays)))
    expected = np.stack([reference_probs(row, **filters) for row in logits])
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parity
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_equal_those_of_transformers(filters):
    torch = import_optional("torch", extra="parity")
    processors = import_optional("transformers.generation.logits_process", extra="parity")
    logits = 3 * np.random.default_rng(1).normal(size=(32, 300)).astype(np.float32)
    expected = torch.from_numpy(logits)
    if filters["top_k"]:
        expected = processors.TopKLogitsWarper(filters["top_k"])(None, expected)
    if filters["top_p"] < 1:
        expected = processors.TopPLogitsWarper(filters["top_p"])(None, expected)
    if filters["min_p"]:
        expected = processors.MinPLogitsWarper(filters["min_p"])(None, expected)
    arrays = [np.full(32, filters[name], kind) for name, kind in (("top_k", "i4"), ("top_p", "f4"), ("min_p", "f4"))]
    np.testing.assert_array_equal(jax.jit(apply_filters)(logits, *arrays), expected.numpy())


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
        actual = apply_penalty(jnp.asarray(logits), jnp.asarray(seen), jnp.full(4, penalty))
        np.testing.assert_allclose(actual, expected.numpy(), rtol=1e-6)


@pytest.mark.parity
def test_bias_and_penalties_equal_a_transcription_of_their_definitions():
    """logit + bias, repetition penalty of transformers, then minus frequency * count and presence * (count > 0)."""
    torch = import_optional("torch", extra="parity")
    processors = import_optional("transformers.generation.logits_process", extra="parity")
    rng = np.random.default_rng(6)
    logits, prompt, completion = rng.normal(size=60).astype(np.float32), rng.integers(0, 60, 9), rng.integers(0, 20, 15)
    bias = {3: 4.0, 17: -100.0, 40: 0.5}
    processor = processors.SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    seen = torch.from_numpy(np.concatenate([prompt, completion])[None])
    expected = processor(seen, torch.from_numpy(logits[None]))
    expected = processors.RepetitionPenaltyLogitsProcessor(1.3)(seen, expected).numpy()[0].copy()
    counts = np.bincount(completion, minlength=60)
    expected -= 0.4 * counts + 0.7 * (counts > 0)

    usage = 2 * counts + np.isin(np.arange(60), prompt)
    # One id outside the vocabulary, which is padding.
    ids, values = np.array([[*bias, 60]], np.int32), np.array([[*bias.values(), 9.0]], np.float32)
    controls = LogitControls(jnp.asarray(usage[None], jnp.uint16), (ids, values))
    arrays = sampling_arrays(1, penalty_B=1.3, frequency_B=0.4, presence_B=0.7)
    actual = jax.jit(_apply_controls)(jnp.asarray(logits[None]), controls, arrays)
    np.testing.assert_allclose(actual[0], expected, rtol=1e-5, atol=1e-5)


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """Return the deviation of the chi-square statistic from its mean, in standard deviations."""
    assert not np.any(counts[probs == 0]), "a token that was filtered out was sampled"
    expected = probs[probs > 0] * counts.sum()
    freedom = len(expected) - 1
    statistic = np.sum((counts[probs > 0] - expected) ** 2 / expected)
    return (statistic - freedom) / np.sqrt(2 * freedom)


@pytest.mark.slow
@pytest.mark.default_cases("position-1.5-filters2", "seed-0.6-filters1")
@pytest.mark.parametrize(
    ("temperature", "filters"),
    [(1.0, FILTERS[0]), (0.6, FILTERS[0]), (1.5, {"top_k": 12, "top_p": 0.9, "min_p": 0.05})],
)
@pytest.mark.parametrize("by", ["position", "seed"])
def test_samples_have_the_frequencies_of_the_softmax(temperature, filters, by):
    """20,000 samples of one distribution, at different positions of a seed or with different seeds."""
    rows = 20_000
    logits = np.random.default_rng(3).normal(size=20).astype(np.float32)
    seeds = np.stack([np.zeros(rows), np.arange(rows)], 1) if by == "seed" else np.array([0, 7])
    sampled = sample_rows(
        np.tile(logits, (rows, 1)),
        SamplingFeatures(random=True, filters=True, penalties=False, logprobs=False),
        temperature_B=temperature,
        top_k_B=filters["top_k"],
        top_p_B=filters["top_p"],
        min_p_B=filters["min_p"],
        seed_B2=seeds,
        position_B=np.arange(rows) if by == "position" else np.full(rows, 5),
    )
    counts = np.bincount(np.asarray(sampled.token_B), minlength=20)
    assert abs(chi_square(counts, reference_probs(logits / temperature, **filters))) < 4
    wrong = reference_probs(logits / (1.15 * temperature), **{**filters, "top_k": 0, "top_p": 1.0, "min_p": 0.0})
    assert chi_square(np.where(wrong > 0, counts, 0), wrong) > 10, "the test has no power"


@pytest.mark.slow
def test_a_row_depends_only_on_its_own_parameters():
    """Greedy, plain and filtered rows in one batch give the same tokens as alone."""
    rng = np.random.default_rng(4)
    logits, seen = rng.normal(size=(6, 40)).astype(np.float32), rng.random((6, 40)) < 0.3
    parameters = {
        "temperature_B": [0, 1, 0.5, 0, 1, 2],
        "top_k_B": [0, 0, 3, 7, 0, 0],
        "top_p_B": [1, 1, 1, 1, 0.5, 1],
        "penalty_B": [1, 1, 1, 1.8, 1, 1.2],
        "seed_B2": [[0, i] for i in range(6)],
    }
    batched = np.asarray(sample_rows(logits, ALL, seen, **parameters).token_B)
    for row in range(6):
        row_parameters = {name: [values[row]] for name, values in parameters.items()}
        alone = sample_rows(logits[row : row + 1], ALL, seen[row : row + 1], **row_parameters, position_B=[row])
        assert int(alone.token_B[0]) == batched[row]
    assert batched[0] == logits[0].argmax()
    assert int(sample_rows(logits[1:2], RANDOM, seed_B2=[[0, 1]], position_B=[1]).token_B[0]) == batched[1]


def test_seeds_use_all_their_bits():
    logits = np.zeros((64, 1000), np.float32)
    for seeds in ([[0, i] for i in range(64)], [[i, 0] for i in range(64)]):
        tokens = sample_rows(logits, RANDOM, seed_B2=np.array(seeds), position_B=np.zeros(64)).token_B
        assert len(np.unique(tokens)) > 55


@pytest.mark.slow
def test_logprobs_are_those_of_the_unmodified_model():
    rng = np.random.default_rng(5)
    logits, seen = 2 * rng.normal(size=(3, 64)).astype(np.float32), rng.random((3, 64)) < 0.5
    sampled = sample_rows(logits, ALL, seen, temperature_B=0.3, top_k_B=2, penalty_B=1.5)
    expected = np.log(softmax(logits))
    np.testing.assert_allclose(sampled.logprob_B, expected[np.arange(3), sampled.token_B], atol=1e-5)
    np.testing.assert_array_equal(sampled.alternatives_BA, np.argsort(-logits, axis=1)[:, :MAX_LOGPROBS])
    np.testing.assert_allclose(
        sampled.alternative_logprobs_BA, -np.sort(-expected, axis=1)[:, :MAX_LOGPROBS], atol=1e-5
    )


def test_logits_that_are_not_finite_give_token_minus_one():
    logits = np.zeros((3, 8), np.float32)
    logits[1, 3], logits[2, 5] = np.nan, np.inf
    assert list(sample_rows(logits, RANDOM).token_B[1:]) == [-1, -1]
    assert int(sample_rows(logits, RANDOM).token_B[0]) >= 0
