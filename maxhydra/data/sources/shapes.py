"""Generated images of shapes with questions about their number, colour and kind (data.record_type=image_chat).

An image shows one to four shapes of one kind and colour on a dark background of random brightness. A record asks for
one of the three; responses are one word. Held-out records have other random numbers than those to train on.
"""

import numpy as np

from maxhydra.config.schema.data import Corpus, Data
from maxhydra.data.records import Record
from maxhydra.data.rows import RowSpec
from maxhydra.data.sources import RecordSource
from maxhydra.data.sources._generated import generated_source

# Seed of the images.
SEED = 5678
SIZE, CELLS, MIN_RADIUS = 32, 2, 5
COLOURS = {"red": (230, 40, 40), "green": (40, 200, 60), "blue": (60, 80, 240), "yellow": (235, 220, 50)}
KINDS = ("circle", "square", "cross")
MAX_SHAPES = 4


def make_record(index: int) -> Record:
    """The image, question and response of an index."""
    generator = np.random.default_rng((SEED, index))
    count, kind = int(generator.integers(1, MAX_SHAPES + 1)), str(generator.choice(KINDS))
    colour = str(generator.choice(list(COLOURS)))
    questions = {"How many?": str(count), "Which colour?": colour, "Which shape?": kind}
    question = str(generator.choice(list(questions)))
    parts = [{"type": "image"}, {"type": "text", "text": question}]
    user, assistant = {"role": "user", "content": parts}, {"role": "assistant", "content": questions[question]}
    return {
        "messages": [user, assistant],
        "images": [draw(count, kind, colour, generator)],
        "answer": questions[question],
    }


def draw(count: int, kind: str, colour: str, generator: np.random.Generator) -> np.ndarray:
    """An image [SIZE, SIZE, 3] of bytes: each shape is in a separate cell, at a random place and size."""
    image = np.full((SIZE, SIZE, 3), generator.integers(0, 60), np.uint8)
    cell = SIZE // CELLS
    rows, columns = np.mgrid[:SIZE, :SIZE]
    for number in generator.choice(CELLS**2, count, replace=False):
        radius = int(generator.integers(MIN_RADIUS, cell // 2 + 1))
        centre = [int(at * cell + generator.integers(radius, cell - radius + 1)) for at in divmod(int(number), CELLS)]
        down, right = np.abs(rows - centre[0]), np.abs(columns - centre[1])
        inside = np.maximum(down, right) < radius
        masks = {"square": inside, "circle": down**2 + right**2 < radius**2, "cross": inside & (abs(down - right) < 2)}
        image[masks[kind]] = COLOURS[colour]
    return image


def open_source(corpus: Corpus, data: Data, spec: RowSpec) -> RecordSource:
    return generated_source(corpus, make_record, "image")
