"""The kernels for the experts of a few tokens against NumPy in float64, in every storage format, in interpret mode."""

import itertools
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxhydra.kernels.grouped_matmul import few_rows
from maxhydra.kernels.grouped_matmul.expert_weights import Matrices, can_pack, pack_int4, pack_mxfp4, unpack

E, K, D, F = 6, 2, 128, 192
Stored = tuple[Matrices, np.ndarray]


def bfloat16(rng: np.random.Generator, inputs: int, outputs: int) -> Stored:
    values = jnp.asarray(0.1 * rng.normal(size=(E, inputs, outputs)), jnp.bfloat16)
    return Matrices(values), np.asarray(values, np.float64)


def int8(rng: np.random.Generator, inputs: int, outputs: int) -> Stored:
    codes, scales = rng.integers(-127, 128, (E, inputs, outputs)), rng.uniform(5e-4, 2e-3, (E, outputs))
    stored = Matrices(jnp.asarray(codes, jnp.int8), jnp.asarray(scales, jnp.float32))
    return stored, codes * scales.astype(np.float32)[:, None].astype(np.float64)


def int4(rng: np.random.Generator, inputs: int, outputs: int, group: int = 64) -> Stored:
    codes = rng.integers(-8, 8, (E, inputs, outputs))
    scales = rng.uniform(0.01, 0.04, (E, inputs // group, outputs)).astype(np.float32)
    values = codes * np.repeat(scales, group, axis=1).astype(np.float64)
    return pack_int4(jnp.asarray(codes & 15, jnp.uint8), jnp.asarray(scales)), values


def mxfp4(rng: np.random.Generator, inputs: int, outputs: int) -> Stored:
    codes = rng.integers(0, 16, (E, inputs, outputs)).astype(np.uint8)
    exponents = rng.integers(120, 126, (E, inputs // 32, outputs)).astype(np.uint8)
    scales = np.repeat(exponents.view(ml_dtypes.float8_e8m0fnu).astype(np.float64), 32, axis=1)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * scales
    return pack_mxfp4(jnp.asarray(codes), jnp.asarray(exponents)), values


FORMATS: dict[str, Callable[..., Stored]] = {"bfloat16": bfloat16, "int8": int8, "int4": int4, "mxfp4": mxfp4}
# INT4 in groups of a part of a block, and of several blocks.
GROUPED = {"int4_16": partial(int4, group=16), "int4_192": partial(int4, group=192)}


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


@pytest.mark.slow
@pytest.mark.parametrize("format", GROUPED)
def test_matmuls_of_other_groups_equal_numpy(format: str) -> None:
    """Ten rows of one expert, and two of the last."""
    rng = np.random.default_rng(0)
    stored, values = GROUPED[format](rng, 192, 128)
    x = jnp.asarray(rng.normal(size=(12, 192)), jnp.bfloat16)
    tile, table = few_rows.Tile(16, 128, 64, splits=3, warps=4, stages=1), jnp.asarray([[2, 0, 10], [E - 1, 10, 2]])
    options = {"table_G3": table, "R": 12, "tile": tile, "interpret": True}
    found = few_rows.multiply_rows(x, jnp.arange(12), (stored,), **options)[0].sum(axis=0)
    rows = np.asarray(x, np.float64)
    expected = np.concatenate([rows[:10] @ values[2], rows[10:] @ values[E - 1]])
    assert np.linalg.norm(found - expected) <= 5e-3 * np.linalg.norm(expected)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("is_gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "none"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.default_cases("int8-none-gated-1", "int4-bias-gated-3")
def test_experts_equal_numpy(format: str, has_bias: bool, is_gated: bool, tokens: int) -> None:
    """The last token is padding, except for a single one with biases."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(tokens, D)), jnp.bfloat16)
    ids = np.argsort(rng.random((tokens, E)), axis=1)[:, :K]
    if tokens > 1 or not has_bias:
        ids[-1] = -1
    factors = rng.uniform(0.1, 1, (tokens, K)).astype(np.float32)
    matrices, wide = zip(*[FORMATS[format](rng, *size) for size in ((D, F), (D, F), (F, D))], strict=True)
    biases = [rng.normal(size=(E, F)).astype(np.float32) if has_bias else np.zeros((E, F)) for _ in range(2)]
    gate, up = (
        m._replace(bias_EN=jnp.asarray(b)) if has_bias else m for m, b in zip(matrices[:2], biases, strict=True)
    )

    def activation(gate: jax.Array | None, up: jax.Array) -> jax.Array:
        return jax.nn.silu(up) if gate is None else jax.nn.silu(gate) * up

    experts = few_rows.Experts(gate if is_gated else None, up, matrices[2])
    found = few_rows.apply_experts(x, jnp.asarray(ids), jnp.asarray(factors), experts, activation, interpret=True)
    expected, rows = np.zeros((tokens, D)), np.asarray(x, np.float64)
    for token, pair in np.argwhere(ids >= 0):
        expert = ids[token, pair]
        from_gate, from_up = (rows[token] @ wide[i][expert] + biases[i][expert] for i in range(2))
        hidden = silu(from_gate) * from_up if is_gated else silu(from_up)
        expected[token] += factors[token, pair] * (hidden @ wide[2][expert])
    # Hidden values, and INT4 weights with their scales, are rounded to bfloat16.
    assert np.linalg.norm(found - expected) <= 5e-3 * np.linalg.norm(expected)
    assert not np.any(found[ids[:, 0] < 0])


@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_int4_weights_are_packed_in_groups_of_a_fraction_or_multiple_of_a_block(group: int) -> None:
    assert can_pack(128, 128 // group)
    stored, values = int4(np.random.default_rng(0), 128, 24, group)
    np.testing.assert_array_equal(unpack(stored, jnp.dtype(jnp.float32)), values.astype(np.float32))
    assert stored.size == (128, 24) and stored.values.nbytes == E * 128 * 24 // 2


def test_other_groups_are_not_packed() -> None:
    assert not can_pack(96, 3) and not can_pack(192, 2) and not can_pack(128, 16)


@pytest.mark.slow
def test_mxfp4_weights_are_exact_in_the_kernel() -> None:
    """All codes with scales from 2^-95, from which on all numbers in the kernel are normal, to 2^31."""
    exponents = np.minimum(np.arange(32, 160), 158).astype(np.uint8)
    codes = np.broadcast_to(np.tile(np.arange(16, dtype=np.uint8), 4)[None, :, None], (1, 64, exponents.size))
    stored = pack_mxfp4(jnp.asarray(codes), jnp.asarray(np.broadcast_to(exponents, (1, 2, exponents.size))))
    scales = exponents.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    expected = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * scales
    np.testing.assert_array_equal(unpack(stored, jnp.dtype(jnp.float32)), expected)
    # Rows of a unit matrix: each selects the weights of one input.
    tile, table = few_rows.Tile(64, 64, 64, splits=1, warps=4, stages=1), jnp.asarray([[0, 0, 64]])
    index, options = jnp.arange(64), {"table_G3": table, "R": 64, "tile": tile, "interpret": True}
    found = few_rows.multiply_rows(jnp.eye(64, dtype=jnp.bfloat16), index, (stored,), **options)
    np.testing.assert_array_equal(found[0, 0], expected[0])


def test_gate_and_up_in_different_formats_are_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel reads both. INT4 and MXFP4 are both packed, and down has a separate kernel."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    rng = np.random.default_rng(0)
    into, down = {name: make(rng, D, F)[0] for name, make in FORMATS.items()}, int8(rng, F, D)[0]
    for gate, up in itertools.product(FORMATS, FORMATS):
        expected = gate == up or {gate, up} == {"int4", "mxfp4"}
        experts = few_rows.Experts(into[gate], into[up], down)
        assert few_rows.is_supported(3, experts, "bfloat16") == expected, (gate, up)
