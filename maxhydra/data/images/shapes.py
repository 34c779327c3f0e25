"""Generated images of coloured shapes, with questions about their colour and number.

An example depends on seed and index alone, so any process can make any part of the data. Shapes are placed in the
cells of a grid and never overlap.
"""

from dataclasses import dataclass

import numpy as np

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 200, 40),
    "purple": (150, 60, 190),
    "orange": (240, 130, 30),
}
SHAPES = ("circle", "square", "triangle")
# Rows and columns of cells; a cell holds one shape at most.
CELLS = 3


@dataclass(frozen=True)
class ShapeExample:
    """Pixels [size, size, 3] in bytes, a question about them, and its reply."""

    pixels: np.ndarray
    question: str
    reply: str


def shape_example(seed: int, index: int, *, size: int = 48, max_count: int = 6) -> ShapeExample:
    """Make example `index`: one shape and its colour, or several shapes and the number of one kind.

    Counts are uniform from 0 to `max_count`, which is 9 at most, so that no reply is more frequent.
    """
    if size < 4 * CELLS or not 1 <= max_count <= CELLS**2:
        raise ValueError(
            f"size={size}, max_count={max_count}: accepted: size from {4 * CELLS}, max_count 1 to {CELLS**2}"
        )
    generator = np.random.default_rng((seed, index))
    pixels = np.full((size, size, 3), 255, np.uint8) - generator.integers(0, 24, 3, dtype=np.uint8)
    names = list(COLOURS)
    if generator.random() < 0.5:
        shape, colour = str(generator.choice(SHAPES)), str(generator.choice(names))
        _paint(pixels, int(generator.integers(CELLS**2)), shape, colour, generator)
        return ShapeExample(pixels, f"Which colour has the {shape}?", colour)
    counted = str(generator.choice(SHAPES))
    count = int(generator.integers(max_count + 1))
    distractors = int(generator.integers(CELLS**2 - count + 1))
    others = [shape for shape in SHAPES if shape != counted]
    cells = generator.permutation(CELLS**2)
    for number in range(count + distractors):
        shape = counted if number < count else str(generator.choice(others))
        _paint(pixels, int(cells[number]), shape, str(generator.choice(names)), generator)
    return ShapeExample(pixels, f"How many {counted}s are there?", str(count))


def _paint(pixels: np.ndarray, cell: int, shape: str, colour: str, generator: np.random.Generator) -> None:
    """Paint one shape into a cell, with random size and position."""
    cell_size = len(pixels) / CELLS
    radius = cell_size * generator.uniform(0.28, 0.42)
    row, column = divmod(cell, CELLS)
    margin = cell_size / 2 - radius
    y_center, x_center = (cell_size * (at + 0.5) + generator.uniform(-margin, margin) for at in (row, column))
    y, x = np.mgrid[: len(pixels), : len(pixels)] + 0.5
    y, x = (y - y_center) / radius, (x - x_center) / radius
    inside = {
        "circle": x**2 + y**2 <= 1,
        "square": np.maximum(abs(x), abs(y)) <= 0.85,
        "triangle": (y <= 0.8) & (2 * abs(x) <= y + 1),
    }[shape]
    pixels[inside] = COLOURS[colour]
