"""Images in conversations: their pixels, their places in the text, and their placeholder tokens.

A content part {"type": "image"} becomes MARKER in the text that a chat template renders, and one placeholder in its
tokens, which `insert_images` replaces by the tokens of the image. Their number depends on the image if it has tiles.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from maxhydra.config.schema.vision import Vision
from maxhydra.data.images import (
    ProcessedImage,
    Processor,
    make_processor,
    merged_coordinates,
    merged_patches,
    read_image,
    settings_processor,
)
from maxhydra.data.images.settings import TokenBudgetSettings
from maxhydra.data.media import MediaError
from maxhydra.data.placeholders import Layout, image_text
from maxhydra.data.tokenizers import Tokenizer

# Unicode's OBJECT REPLACEMENT CHARACTER, the placeholder of an embedded object.
MARKER = "\ufffc"
# The tokens of an image as letters.
SQUARE = Layout(marker=MARKER, token="p", begin="b", end="e")
TILED = dataclasses.replace(SQUARE, column_separator="c", row_separator="r", global_tile="w")
# Pillow's resampling filter of images with different sizes.
BICUBIC = 3
# Types of content parts that are images.
IMAGE_PARTS = ("image", "image_url", "input_image")


def read_images(sources: Sequence[Any], vision: Vision) -> list[ProcessedImage]:
    """Pixels of paths, data URLs, bytes, {bytes, path} or arrays of bytes [H, W, 3], each [count, *vision.image_shape].

    Raises MediaError if one cannot be read.
    """
    if vision.max_patches is not None:
        patches = (vision.patch_size, vision.block_size, vision.max_patches)
        process = _full_processor(*patches) if vision.fill_patches else _patch_processor(*patches, vision.min_patches)
        images = [process(read_image(source)) for source in sources]
        return [dataclasses.replace(image, pixels=patch_inputs(image.pixels, vision)) for image in images]
    sizes = (vision.image_size, vision.patch_size, vision.token_rows, vision.tiles.max_tiles or 0)
    return [_processor(*sizes)(read_image(source)) for source in sources]


@cache
def _patch_processor(patch_size: int, block_size: int, max_patches: int, min_patches: int) -> Processor:
    pixels = {"shortest_edge": min_patches * patch_size**2, "longest_edge": max_patches * patch_size**2}
    sizes = {"size": pixels, "patch_size": patch_size, "merge_size": block_size, "temporal_patch_size": 1}
    return make_processor({"mechanism": "dynamic", "resample": BICUBIC, **sizes})


@cache
def _full_processor(patch_size: int, block_size: int, max_patches: int) -> Processor:
    """Images of the largest size within max_patches."""
    tokens = max_patches // block_size**2
    return settings_processor(
        TokenBudgetSettings(
            resample=BICUBIC, patch_size=patch_size, pooling_kernel_size=block_size, max_soft_tokens=tokens
        )
    )


def patch_inputs(pixels: np.ndarray, vision: Vision) -> np.ndarray:
    """[steps, *vision.image_shape] of an image or video of pixels [frames, H, W, 3], a step for each vision.frames."""
    rows, columns = (length // vision.patch_size for length in pixels.shape[1:3])
    count, (most, size) = rows * columns, vision.image_shape
    if count > most:
        reason = f"{rows} x {columns} patches are more than model.vision.max_patches={most}"
        raise MediaError("image", reason, accepted="an aspect ratio nearer to 1, or a larger max_patches")
    options = {"patch_size": vision.patch_size, "merge_size": vision.block_size}
    patches = merged_patches(pixels, **options, temporal_patch_size=vision.frames).reshape(-1, count, size - 2)
    inputs = np.zeros((len(patches), most, size), np.float32)
    inputs[:, :count, :2] = merged_coordinates(rows, columns, merge_size=vision.block_size) + 1
    inputs[:, :count, 2:] = patches
    return inputs


def image_sizes(images: np.ndarray, vision: Vision) -> np.ndarray:
    """[images, 2] rows and columns of the tokens of images [images, *vision.image_shape]."""
    if vision.max_patches is None:
        return np.full((len(images), 2), vision.token_rows)
    sizes: np.ndarray = images[:, :, :2].max(axis=1).astype(np.int64) // vision.block_size
    return sizes


@cache
def _processor(size: int, patch_size: int, token_rows: int, max_tiles: int) -> Processor:
    square = {"size": {"height": size, "width": size}}
    if not max_tiles:
        return make_processor({**square, "mechanism": "square", "image_seq_length": token_rows**2})
    patches = {"patch_size": patch_size, "pixel_shuffle_ratio": token_rows / (size // patch_size)}
    return make_processor({**square, **patches, "mechanism": "tiles", "max_patches": max_tiles})


def image_ids(image: ProcessedImage, vision: Vision) -> list[int]:
    """The tokens of one image or video."""
    if image.ids is not None:
        return list(image.ids)
    tiles = vision.tiles
    ids = {"p": vision.placeholder_id, "b": vision.begin_id, "e": vision.end_id}
    ids |= {"c": tiles.column_id, "r": tiles.row_id, "w": tiles.whole_id}
    symbols = image_text(image, SQUARE if tiles.max_tiles is None else TILED)
    return [id for symbol in symbols if (id := ids[symbol]) is not None]


def insert_images(
    tokens: np.ndarray, images: Sequence[ProcessedImage], vision: Vision
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens in which the single placeholder of each image is replaced by the image's tokens.

    Also returns the index that each of them had before. Raises MediaError if the numbers differ.
    """
    places = np.flatnonzero(tokens == vision.placeholder_id)
    if len(places) != len(images):
        raise MediaError("messages", f"has {len(images)} images, but {len(places)} image parts in its messages")
    if not images:
        return tokens, np.arange(len(tokens))
    inserted = [image_ids(image, vision) for image in images]
    counts = np.ones(len(tokens), np.int64)
    counts[places] = [len(ids) for ids in inserted]
    index = np.repeat(np.arange(len(tokens)), counts)
    expanded = tokens[index]
    expanded[np.isin(index, places)] = np.concatenate(inserted)
    return expanded, index


def join_pixels(images: Sequence[ProcessedImage]) -> np.ndarray | None:
    """[count, *vision.image_shape] of all images in order; None without images."""
    return np.concatenate([image.pixels for image in images]) if images else None


def with_markers(messages: Any, parts: Sequence[str] = IMAGE_PARTS, marker: str = MARKER) -> Any:
    """Messages whose content is text: text parts joined, parts of media as the marker.

    Values that are not messages are returned unchanged; the chat template rejects them.
    """
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        return messages
    return [{**message, "content": _text(message.get("content"), parts, marker)} for message in messages]


def _text(content: Any, parts: Sequence[str], marker: str) -> Any:
    if isinstance(content, (str, bytes)) or not isinstance(content, Sequence):
        return content
    texts: list[Any] = []
    for part in content:
        values = part if isinstance(part, Mapping) else {"text": part}
        texts.append(marker if values.get("type") in parts else values.get("text"))
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content


class ImageTokenizer:
    """A tokenizer of rendered conversations that replaces each marker by one placeholder; see `insert_images`."""

    marker = MARKER

    def __init__(self, tokenizer: Tokenizer, vision: Vision):
        self._tokenizer, self._ids = tokenizer, np.array([vision.placeholder_id], np.int32)
        self._separator = vision.separator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_with_special_tokens(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Tokenize the text between markers; the span of a placeholder is that of its marker.

        A separator is tokenized together with the text that it follows or precedes, and has no characters in its span.
        """
        ids, spans, start = [np.array([], np.int32)], [np.zeros((0, 2), np.int64)], 0
        pieces = text.split(self.marker)
        for number, piece in enumerate(pieces):
            before = self._separator if number else ""
            after = self._separator if number < len(pieces) - 1 else ""
            if number:
                ids.append(self._ids)
                spans.append(np.tile(np.array([[start - 1, start]], np.int64), (len(self._ids), 1)))
            if before + piece + after:
                piece_ids, piece_spans = self._tokenizer.encode_with_special_tokens(before + piece + after)
                ids.append(piece_ids)
                spans.append(np.clip(piece_spans - len(before), 0, len(piece)) + start)
            start += len(piece) + 1
        return np.concatenate(ids), np.concatenate(spans)
