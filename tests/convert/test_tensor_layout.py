"""TensorLayout against NumPy transcriptions of how transformers models split their tensors."""

import numpy as np
import pytest

from maxhydra.convert.name_table import Join, Weight
from maxhydra.convert.param_map import TensorLayout

RNG = np.random.default_rng(0)


def check(row: Weight, tensor: np.ndarray, expected: list[np.ndarray], heads: int = 1) -> None:
    """The tensor gives the expected parameters, and they give the tensor, bit for bit."""
    layout = TensorLayout(row, [array.shape for array in expected], heads)
    assert layout.hf_shape == tensor.shape
    params = layout.from_hf(tensor, interleaved_rope=row.interleaved_rope)
    for param, want in zip(params, expected, strict=True):
        np.testing.assert_array_equal(param, want)
    np.testing.assert_array_equal(layout.to_hf(params, interleaved_rope=row.interleaved_rope), tensor)


def test_matrices_are_transposed_vectors_and_embeddings_are_not() -> None:
    tensor = RNG.normal(size=(12, 5))
    check(Weight("query", "q"), tensor, [tensor.T.reshape(5, 3, 4)])
    check(Weight("out", "o", inputs=2), tensor.T, [tensor.reshape(3, 4, 5)])
    check(Weight("table", "e", transposed=False), tensor, [tensor])
    check(Weight("scale", "n"), tensor[0], [tensor[0]])
    check(Weight("bias", "b", inputs=0), tensor[:, 0], [tensor[:, 0].reshape(3, 4)])


def test_fused_gate_and_up_of_experts_concatenated_or_interleaved() -> None:
    """Experts first and not transposed: gate_up[..., :F] and [..., F:], or [..., ::2] and [..., 1::2]."""
    tensor, bias = RNG.normal(size=(3, 5, 8)), RNG.normal(size=(3, 8))
    halves = Weight(("gate", "up"), "gate_up", leading=1, transposed=False)
    check(halves, tensor, [tensor[..., :4], tensor[..., 4:]])
    interleaved = Weight(("gate", "up"), "gate_up", leading=1, transposed=False, join=Join.interleaved)
    check(interleaved, tensor, [tensor[..., ::2], tensor[..., 1::2]])
    check(Weight(("gate", "up"), "b", leading=1, inputs=0, join=Join.interleaved), bias, [bias[:, ::2], bias[:, 1::2]])
    transposed = np.swapaxes(tensor, 1, 2)
    check(Weight(("gate", "up"), "gate_up", leading=1), transposed, [tensor[..., :4], tensor[..., 4:]])


def test_fused_parameters_of_different_sizes_are_concatenated() -> None:
    tensor = RNG.normal(size=(7, 5))
    check(Weight(("latent", "key"), "kv_a"), tensor, [tensor[:4].T, tensor[4:].T])


def test_query_key_value_and_gate_are_fused_per_head() -> None:
    """Two value heads per key head, as in Gated DeltaNet."""
    keys, values, size, wide, width = 2, 4, 3, 5, 6
    tensor = RNG.normal(size=(keys * (2 * size + 2 * (values // keys) * wide), width))
    grouped = tensor.reshape(keys, -1, width)
    parts = np.split(grouped, np.cumsum([size, size, 2 * wide]), axis=1)
    shapes = [(keys, size), (keys, size), (values, wide), (values, wide)]
    expected = [part.reshape(*shape, width).transpose(2, 0, 1) for part, shape in zip(parts, shapes, strict=True)]
    check(Weight(("q", "k", "v", "z"), "qkvz", join=Join.heads), tensor, expected, heads=keys)
    tensor = RNG.normal(size=(2 * values, width))
    grouped = tensor.reshape(keys, 2, values // keys, width)
    expected = [grouped[:, which].reshape(values, width).T for which in (0, 1)]
    check(Weight(("b", "a"), "ba", join=Join.heads, heads="q"), tensor, expected, heads=keys)


def test_interleaved_rope_pairs_become_halves() -> None:
    tensor = RNG.normal(size=(12, 5))
    expected = tensor.reshape(3, 2, 2, 5).swapaxes(1, 2).reshape(12, 5).T.reshape(5, 3, 4)
    check(Weight("query", "q", interleaved_rope=True), tensor, [expected])


@pytest.mark.parametrize("shape", [(6, 1, 4)])
def test_a_singleton_axis_is_dropped(shape: tuple[int, ...]) -> None:
    tensor = RNG.normal(size=shape)
    check(Weight("conv", "c", transposed=False, singleton_axis=1), tensor, [tensor[:, 0]])
    check(Weight("conv", "c", singleton_axis=1), tensor, [tensor[:, 0].T])
