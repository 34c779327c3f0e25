"""Placeholder tokens: the text that takes the place of an image, a video or an audio clip in a prompt.

A chat template writes one marker for each of them. `expand` replaces the markers by as many placeholder tokens as the
encoder yields features, with the tokens around and between them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maxhydra.data.images.processor import ProcessedImage
from maxhydra.data.images.video import ProcessedVideo
from maxhydra.data.media import MediaError, class_entry, parse_settings, setting


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a text")
    return value


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Text of one medium: `marker` is replaced, `token` repeats, `begin` and `end` surround it.

    An image with crops has three texts: before the image, before its crops, and between crops. Tiles have separators
    after each column but the last and after each row; `global_tile` precedes the tile with the whole image.
    `timestamp` is a format of `timestamp_values` before each step of a video, and `step_separator` the text between
    two steps.
    """

    marker: str = setting(_text)
    token: str = setting(_text)
    begin: str = setting(_text, "")
    end: str = setting(_text, "")
    crop_texts: tuple[str, str, str] | None = setting(tuple, None)
    column_separator: str | None = setting(_text, None)
    row_separator: str = setting(_text, "")
    global_tile: str = setting(_text, "")
    timestamp: str | None = setting(_text, None)
    step_separator: str = setting(_text, "")

    def enclose(self, tokens: int) -> str:
        """Return `tokens` placeholder tokens between `begin` and `end`."""
        return f"{self.begin}{self.token * tokens}{self.end}"


@dataclass(frozen=True)
class Layouts:
    """Layouts of the media of a model; None if it does not use one."""

    image: Layout | None = None
    video: Layout | None = None
    audio: Layout | None = None


def make_layouts(settings: Mapping[str, Any], tokenizer_config: Mapping[str, Any] | None = None) -> Layouts:
    """Return the layouts of the class that the key `processor_class` of the settings names.

    Special tokens that `tokenizer_config.json` names, such as `boi_token`, take the place of the usual ones.
    """
    entry = class_entry("processor_class", settings)
    tokens = dict(entry.get("tokens", {}))
    named = tokenizer_config or {}
    tokens |= {key: named[key] for key in tokens if isinstance(named.get(key), str)}

    def parse(medium: str) -> Layout | None:
        if medium not in entry:
            return None
        texts = {
            key: value.format(**tokens) if isinstance(value, str) else value for key, value in entry[medium].items()
        }
        return parse_settings(Layout, texts)

    return Layouts(image=parse("image"), video=parse("video"), audio=parse("audio"))


def image_text(image: ProcessedImage, layout: Layout) -> str:
    """Text of an image: its crops or tiles, each with its share of the placeholder tokens."""
    count = len(image.pixels)
    tokens = image.tokens // count
    if layout.column_separator is not None and image.grid is not None:
        rows, columns = image.grid if count > 1 else (0, 0)
        row = layout.column_separator.join([layout.token * tokens] * columns) + layout.row_separator
        return f"{layout.begin}{row * rows}{layout.global_tile}{layout.token * tokens}{layout.end}"
    whole = layout.enclose(tokens)
    if layout.crop_texts is None or count == 1:
        return whole
    before, before_crops, between = layout.crop_texts
    return f"{before}{whole}{before_crops}{between.join([whole] * (count - 1))}"


def video_text(video: ProcessedVideo, layout: Layout) -> str:
    """Text of a video: all placeholder tokens, or those of each step in time after its timestamp."""
    if layout.timestamp is None:
        return layout.enclose(video.tokens)
    step = layout.enclose(video.tokens // video.grid[0])
    return layout.step_separator.join(layout.timestamp % timestamp_values(each) + step for each in video.timestamps)


def timestamp_values(seconds: float) -> dict[str, float]:
    """Values for a format of timestamps: seconds, or whole minutes and the rest in whole seconds."""
    return {"seconds": seconds, "minutes": seconds // 60, "rest": seconds % 60}


def expand(text: str, replacements: Sequence[str], layout: Layout) -> str:
    """Replace the markers of a text in order; their number must be that of the replacements."""
    parts = text.split(layout.marker)
    if len(parts) - 1 != len(replacements):
        reason = f"has {len(parts) - 1} times {layout.marker} for {len(replacements)} files"
        raise MediaError("prompt", reason, accepted="one marker for each file")
    return parts[0] + "".join(new + part for new, part in zip(replacements, parts[1:], strict=True))
