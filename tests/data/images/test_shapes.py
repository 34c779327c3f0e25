"""Generated shapes: determinism, and replies that connected components of the pixels confirm."""

import numpy as np
import pytest
from scipy import ndimage

from maxhydra.data.images.shapes import COLOURS, SHAPES, ShapeExample, shape_example


def test_examples_depend_on_seed_and_index_alone() -> None:
    for index in (0, 5, 10**12):
        first, again = shape_example(1, index), shape_example(1, index)
        np.testing.assert_array_equal(first.pixels, again.pixels)
        assert (first.question, first.reply) == (again.question, again.reply)
    assert not np.array_equal(shape_example(1, 0).pixels, shape_example(2, 0).pixels)


def components(example: ShapeExample) -> list[tuple[str, str]]:
    """Shape and colour of each connected component; a shape is known by the part of its bounding box that it fills."""
    found = []
    for colour, value in COLOURS.items():
        labels, _ = ndimage.label((example.pixels == value).all(axis=-1))
        for number, box in enumerate(ndimage.find_objects(labels), 1):
            filled = (labels[box] == number).mean()
            found.append(("square" if filled > 0.95 else "circle" if filled > 0.66 else "triangle", colour))
    return found


def test_replies_are_right() -> None:
    examples = [shape_example(3, index, size=120) for index in range(200)]
    for example in examples:
        found = components(example)
        if "colour" in example.question:
            assert [colour for _, colour in found] == [example.reply]
            assert found[0][0] in example.question
        else:
            counted = next(shape for shape in SHAPES if shape in example.question)
            assert sum(shape == counted for shape, _ in found) == int(example.reply)
    assert {example.reply for example in examples} == {*COLOURS, *map(str, range(7))}


def test_impossible_sizes_are_rejected() -> None:
    with pytest.raises(ValueError, match="accepted: size from 12"):
        shape_example(0, 0, size=4)
