"""Positions of image tokens, and RoPE over three axes."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema import model as config
from maxhydra.layers.image_positions import ImagePlaces, VideoSteps
from maxhydra.layers.rope import Rotation, pair_axes, rotate


def expected_positions(row: str, sizes: list[tuple[int, int]]) -> np.ndarray:
    """Positions of text "." and of images, each of them a letter, by counting."""
    at, number, out = 0, 0, []
    while len(out) < len(row):
        if row[len(out)] == ".":
            out.append((at, at, at))
            at += 1
        else:
            rows, columns = sizes[number]
            out += [(at, at + i, at + j) for i in range(rows) for j in range(columns)]
            at, number = at + max(rows, columns), number + 1
    return np.array(out)


@pytest.mark.slow
def test_images_take_as_many_positions_as_rows_or_columns():
    rows = ["..aaaaaa...bbbb.", "aaaabbbbbbbbb..."]
    sizes = [[(2, 3), (4, 1)], [(1, 4), (3, 3)]]
    is_image = np.array([[letter != "." for letter in row] for row in rows])
    padded = np.zeros((2, 3, 2), np.int32)
    padded[:, :2] = sizes
    positions = np.broadcast_to(np.arange(16), (2, 16))
    out = ImagePlaces.of(jnp.asarray(is_image), jnp.asarray(padded)).axis_positions(jnp.asarray(positions))
    np.testing.assert_array_equal(out, [expected_positions(*each) for each in zip(rows, sizes, strict=True)])


@pytest.mark.slow
def test_images_of_earlier_sequences_in_a_row_do_not_count():
    rows, sizes = ["..aaaaaa...", "bbbb..aaa"], [[(2, 3)], [(1, 4), (3, 1)]]
    is_image = np.array([[letter != "." for letter in "".join(rows)]])
    positions = np.array([[*range(11), *range(9)]])
    places = ImagePlaces.of(jnp.asarray(is_image), jnp.asarray([[*sizes[0], *sizes[1]]]))
    expected = [expected_positions(*each) for each in zip(rows, sizes, strict=True)]
    np.testing.assert_array_equal(places.axis_positions(jnp.asarray(positions))[0], np.concatenate(expected))


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2, 5])
def test_steps_of_a_video_share_rows_and_columns(step: int):
    """A video of three steps, an image, a video of two, and two images next to each other; another row is padded."""
    rows = ["..vvvvvvvvvvvv.aa.vvvvvv.aaaa..", "..............................."]
    sizes = [[(2, 2)] * 3 + [(1, 2)] + [(3, 1)] * 2 + [(2, 1)] * 2, [(0, 0)] * 8]

    def video(start: int, count: int, size: tuple[int, int]) -> list[tuple[int, int, int]]:
        return [(start + k * step, start + i, start + j) for k in range(count) for i, j in np.ndindex(*size)]

    after = 2 + max(2 * step + 1, 2)
    second = after + 4
    later = second + max(step + 1, 3)
    expected = [
        *[(0, 0, 0), (1, 1, 1), *video(2, 3, (2, 2)), (after,) * 3, *video(after + 1, 1, (1, 2)), (after + 3,) * 3],
        *[*video(second, 2, (3, 1)), (later,) * 3, *video(later + 1, 1, (2, 1)), *video(later + 3, 1, (2, 1))],
        *[(later + 5,) * 3, (later + 6,) * 3],
    ]
    letters = np.array([list(row) for row in rows])
    steps = VideoSteps(jnp.asarray(letters == "v"), step)
    places = ImagePlaces.of(jnp.asarray(letters != "."), jnp.asarray(sizes), steps)
    positions = jnp.broadcast_to(jnp.arange(31), (2, 31))
    out = places.axis_positions(positions)
    np.testing.assert_array_equal(out[0], expected)
    np.testing.assert_array_equal(out[1], np.arange(31)[:, None].repeat(3, axis=1))


def test_axes_interleave_until_a_section_ends():
    assert pair_axes([4, 2, 1]) == (0, 1, 2, 0, 1, 0, 0)
    assert pair_axes([]) == ()


@pytest.mark.slow
def test_equal_axes_rotate_as_one_axis_bit_for_bit():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 3, 16)), jnp.float32)
    positions = jnp.asarray(np.random.default_rng(1).integers(0, 1000, (2, 5)))
    rotation = Rotation.of(config.Rope(sections=[4, 2, 2]), 16)
    assert rotation is not None
    three = rotate(x, jnp.broadcast_to(positions[:, :, None], (2, 5, 3)), rotation)
    plain = Rotation.of(config.Rope(), 16)
    assert plain is not None
    np.testing.assert_array_equal(three, rotate(x, positions, plain))


def test_a_pair_turns_with_the_position_of_its_axis():
    rotation = Rotation.of(config.Rope(theta=100.0, sections=[2, 1, 1]), 8)
    assert rotation is not None
    x = np.random.default_rng(0).normal(size=(1, 1, 1, 8))
    out = rotate(jnp.asarray(x, jnp.float32), jnp.asarray([[[7, 3, 5]]]), rotation)[0, 0, 0]
    turned = (x[0, 0, 0, :4] + 1j * x[0, 0, 0, 4:]) * np.exp(1j * np.array([7, 3, 5, 7]) * 100.0 ** (-np.arange(4) / 4))
    np.testing.assert_allclose(out, np.concatenate([turned.real, turned.imag]), atol=1e-5)


@pytest.mark.parametrize(
    ("sections", "reason"),
    [("[8]", "three axes"), ("[2,3,3]", "three axes"), ("[4,2,1]", "does not have the 8 rotated pairs")],
)
def test_bad_sections(sections: str, reason: str):
    with pytest.raises(ConfigError, match=reason):
        compose([f"model.kinds.layer.attention.rope.sections={sections}", "model.head_dim=16"])
