"""Images in conversations: their pixels, their places in the text, and their placeholder tokens.

A content part {"type": "image"} becomes MARKER in the text that a chat template renders. The tokenizer replaces every
marker by one placeholder, which is repeated for all tokens of the image once its size is known.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from maxhydra.config.schema.vision import Vision
from maxhydra.data.images import Processor, make_processor, merged_coordinates, merged_patches, read_image
from maxhydra.data.media import MediaError
from maxhydra.data.tokenizers import Tokenizer

# Unicode's OBJECT REPLACEMENT CHARACTER, the placeholder of an embedded object.
MARKER = "\ufffc"
# Types of content parts that are images.
IMAGE_PARTS = ("image", "image_url", "input_image")


def image_input(source: Any, vision: Vision) -> np.ndarray:
    """[*vision.image_shape] of a path, data URL, bytes, {bytes, path} or array of bytes [H, W, 3].

    Pixels are from -1 to 1. Raises MediaError if the image cannot be read.
    """
    image = read_image(source)
    if vision.max_patches is None:
        return _square_processor(vision.image_size, vision.projector.tokens)(image).pixels[0]
    sizes = vision.patch_size, vision.block_size, vision.min_patches, vision.max_patches
    return patch_inputs(_patch_processor(*sizes)(image).pixels, vision)[0]


@cache
def _square_processor(size: int, tokens: int) -> Processor:
    return make_processor({"mechanism": "square", "size": {"height": size, "width": size}, "image_seq_length": tokens})


@cache
def _patch_processor(patch_size: int, block_size: int, min_patches: int, max_patches: int) -> Processor:
    pixels = {"shortest_edge": min_patches * patch_size**2, "longest_edge": max_patches * patch_size**2}
    sizes = {"size": pixels, "patch_size": patch_size, "merge_size": block_size, "temporal_patch_size": 1}
    return make_processor({"mechanism": "dynamic", "resample": 3, **sizes})


def patch_inputs(pixels: np.ndarray, vision: Vision) -> np.ndarray:
    """[steps, *vision.image_shape] of an image or video of pixels [frames, H, W, 3], one step for vision.frames."""
    rows, columns = (length // vision.patch_size for length in pixels.shape[1:3])
    most, size = vision.image_shape
    if rows * columns > most:
        reason = f"{rows} x {columns} patches are more than model.vision.max_patches={most}"
        raise MediaError("image", reason, accepted="an aspect ratio nearer to 1, or a larger max_patches")
    options = {"patch_size": vision.patch_size, "merge_size": vision.block_size}
    patches = merged_patches(pixels, **options, temporal_patch_size=vision.frames).reshape(-1, rows * columns, size - 2)
    inputs = np.zeros((len(patches), most, size), np.float32)
    inputs[:, : rows * columns, :2] = merged_coordinates(rows, columns, merge_size=vision.block_size) + 1
    inputs[:, : rows * columns, 2:] = patches
    return inputs


def image_sizes(images: np.ndarray, vision: Vision) -> np.ndarray:
    """[images, 2] rows and columns of the tokens of images [images, *vision.image_shape]."""
    if vision.max_patches is None:
        return np.full((len(images), 2), vision.token_rows)
    sizes: np.ndarray = images[:, :, :2].max(axis=1).astype(np.int64) // vision.block_size
    return sizes


def image_repeats(tokens: np.ndarray, images: np.ndarray, vision: Vision) -> np.ndarray | None:
    """How often each token occurs once every placeholder stands for one token of an image.

    None if the number of placeholders is not that of the images.
    """
    is_image = tokens == vision.placeholder_id
    if np.count_nonzero(is_image) != len(images):
        return None
    repeats = np.ones(len(tokens), np.int64)
    repeats[is_image] = image_sizes(images, vision).prod(axis=1)
    return repeats


def image_ids(vision: Vision, tokens: int) -> list[int]:
    """The ids of an image with this many tokens."""
    assert vision.placeholder_id is not None
    begin = [] if vision.begin_id is None else [vision.begin_id]
    end = [] if vision.end_id is None else [vision.end_id]
    return [*begin, *[vision.placeholder_id] * tokens, *end]


def with_markers(messages: Any) -> Any:
    """Messages whose content is text: text parts joined, image parts as MARKER.

    Values that are not messages are returned unchanged; the chat template rejects them.
    """
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        return messages
    return [{**message, "content": _text(message.get("content"))} for message in messages]


def _text(content: Any) -> Any:
    if isinstance(content, (str, bytes)) or not isinstance(content, Sequence):
        return content
    texts: list[Any] = []
    for part in content:
        values = part if isinstance(part, Mapping) else {"text": part}
        texts.append(MARKER if values.get("type") in IMAGE_PARTS else values.get("text"))
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content


class ImageTokenizer:
    """A tokenizer that replaces markers in rendered conversations by one placeholder, and the tokens around it."""

    def __init__(self, tokenizer: Tokenizer, vision: Vision):
        self._tokenizer, self._ids = tokenizer, np.array(image_ids(vision, 1), np.int32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_with_special_tokens(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Tokenize the text between markers; the span of an image's tokens is that of its marker."""
        ids, spans, start = [], [], 0
        for number, piece in enumerate(text.split(MARKER)):
            if number:
                ids.append(self._ids)
                spans.append(np.tile(np.array([[start - 1, start]], np.int64), (len(self._ids), 1)))
            if piece:
                piece_ids, piece_spans = self._tokenizer.encode_with_special_tokens(piece)
                ids.append(piece_ids)
                spans.append(piece_spans + start)
            start += len(piece) + 1
        return np.concatenate(ids) if ids else np.array([], np.int32), np.concatenate(
            spans or [np.zeros((0, 2), np.int64)]
        )
