"""Layouts of tensors against NumPy transcriptions of how the models of others take their tensors apart."""

import numpy as np
import pytest

from maxhydra.convert.name_table import Join, Weight
from maxhydra.convert.param_map import TensorLayout

RNG = np.random.default_rng(0)


def checked(row: Weight, theirs: np.ndarray, wanted: list[np.ndarray], heads: int = 1) -> None:
    """The arrays that are wanted, and the tensor again from them, to the last bit."""
    layout = TensorLayout(row, [array.shape for array in wanted], heads)
    assert layout.hf_shape == theirs.shape
    ours = layout.from_hf(theirs, interleaved_rope=row.interleaved_rope)
    for got, want in zip(ours, wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(layout.to_hf(ours), theirs)


def test_a_matrix_is_turned_a_vector_and_an_embedding_are_kept() -> None:
    theirs = RNG.normal(size=(12, 5))
    checked(Weight("query", "q"), theirs, [theirs.T.reshape(5, 3, 4)])
    checked(Weight("out", "o", inputs=2), theirs.T, [theirs.reshape(3, 4, 5)])
    checked(Weight("table", "e", transposed=False), theirs, [theirs])
    checked(Weight("scale", "n"), theirs[0], [theirs[0]])
    checked(Weight("bias", "b", inputs=0), theirs[:, 0], [theirs[:, 0].reshape(3, 4)])


def test_gate_and_up_of_experts_in_one_tensor_in_halves_or_interleaved() -> None:
    """Experts first and not turned: gate_up[..., :F] and [..., F:], or [..., ::2] and [..., 1::2]."""
    theirs, bias = RNG.normal(size=(3, 5, 8)), RNG.normal(size=(3, 8))
    halves = Weight(("gate", "up"), "gate_up", leading=1, transposed=False)
    checked(halves, theirs, [theirs[..., :4], theirs[..., 4:]])
    woven = Weight(("gate", "up"), "gate_up", leading=1, transposed=False, join=Join.interleaved)
    checked(woven, theirs, [theirs[..., ::2], theirs[..., 1::2]])
    checked(
        Weight(("gate", "up"), "b", leading=1, inputs=0, join=Join.interleaved), bias, [bias[:, ::2], bias[:, 1::2]]
    )
    transposed = np.swapaxes(theirs, 1, 2)
    checked(Weight(("gate", "up"), "gate_up", leading=1), transposed, [theirs[..., :4], theirs[..., 4:]])


def test_parts_of_different_sizes_lie_one_after_the_other() -> None:
    theirs = RNG.normal(size=(7, 5))
    checked(Weight(("latent", "key"), "kv_a"), theirs, [theirs[:4].T, theirs[4:].T])


def test_query_key_value_and_gate_lie_head_by_head() -> None:
    """Two value heads to each key head, as a gated delta net groups them."""
    keys, values, size, wide, width = 2, 4, 3, 5, 6
    theirs = RNG.normal(size=(keys * (2 * size + 2 * (values // keys) * wide), width))
    grouped = theirs.reshape(keys, -1, width)
    cut = np.split(grouped, np.cumsum([size, size, 2 * wide]), axis=1)
    shapes = [(keys, size), (keys, size), (values, wide), (values, wide)]
    wanted = [part.reshape(*shape, width).transpose(2, 0, 1) for part, shape in zip(cut, shapes, strict=True)]
    checked(Weight(("q", "k", "v", "z"), "qkvz", join=Join.heads), theirs, wanted, heads=keys)
    theirs = RNG.normal(size=(2 * values, width))
    grouped = theirs.reshape(keys, 2, values // keys, width)
    wanted = [grouped[:, which].reshape(values, width).T for which in (0, 1)]
    checked(Weight(("b", "a"), "ba", join=Join.heads, heads="q"), theirs, wanted, heads=keys)


def test_rotary_pairs_of_neighbours_become_halves() -> None:
    theirs = RNG.normal(size=(12, 5))
    wanted = theirs.reshape(3, 2, 2, 5).swapaxes(1, 2).reshape(12, 5).T.reshape(5, 3, 4)
    checked(Weight("query", "q", interleaved_rope=True), theirs, [wanted])


@pytest.mark.parametrize("shape", [(6, 1, 4)])
def test_an_axis_of_one_is_left_out(shape: tuple[int, ...]) -> None:
    theirs = RNG.normal(size=shape)
    checked(Weight("conv", "c", transposed=False, singleton_axis=1), theirs, [theirs[:, 0]])
    checked(Weight("conv", "c", singleton_axis=1), theirs, [theirs[:, 0].T])
