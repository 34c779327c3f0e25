"""Images in conversations: their pixels, their places in the text, and their placeholder tokens.

A content part {"type": "image"} becomes MARKER in the text that a chat template renders. The tokenizer replaces every
marker by the tokens of one image.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from maxhydra.config.schema.vision import Vision
from maxhydra.data.images import Processor, make_processor, read_image
from maxhydra.data.tokenizers import Tokenizer

# Unicode's OBJECT REPLACEMENT CHARACTER, the placeholder of an embedded object.
MARKER = "\ufffc"
# Types of content parts that are images.
IMAGE_PARTS = ("image", "image_url", "input_image")


def image_pixels(source: Any, vision: Vision) -> np.ndarray:
    """[size, size, 3] pixels from -1 to 1 of a path, data URL, bytes, {bytes, path} or array of bytes [H, W, 3].

    Raises MediaError if it cannot be read.
    """
    return _processor(vision.image_size, vision.projector.tokens)(read_image(source)).pixels[0]


@cache
def _processor(size: int, tokens: int) -> Processor:
    return make_processor({"mechanism": "square", "size": {"height": size, "width": size}, "image_seq_length": tokens})


def image_ids(vision: Vision) -> list[int]:
    """The tokens of one image."""
    assert vision.placeholder_id is not None
    begin = [] if vision.begin_id is None else [vision.begin_id]
    end = [] if vision.end_id is None else [vision.end_id]
    return [*begin, *[vision.placeholder_id] * vision.projector.tokens, *end]


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
    """A tokenizer that replaces markers in rendered conversations by the tokens of an image."""

    marker = MARKER

    def __init__(self, tokenizer: Tokenizer, vision: Vision):
        self._tokenizer, self._ids = tokenizer, np.array(image_ids(vision), np.int32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_with_special_tokens(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Tokenize the text between markers; the span of an image's tokens is that of its marker."""
        ids, spans, start = [], [], 0
        for number, piece in enumerate(text.split(self.marker)):
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
