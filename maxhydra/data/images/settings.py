"""Preprocessing settings of images and videos, as `preprocessor_config.json` of a Hugging Face folder names them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maxhydra.data.media import boolean, class_entry, number, parse_settings, positive_int, positive_number, setting

# Settings with one supported value.
_REQUIRED = {"do_resize": True, "do_convert_rgb": True, "do_center_crop": False, "do_pad": False}
# Pillow's resampling filters.
_FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}


def _resampling_filter(value: Any) -> int:
    if isinstance(value, bool) or value not in _FILTERS:
        raise ValueError(", ".join(f"{code} ({name})" for code, name in _FILTERS.items()))
    return int(value)


def _channels(value: Any) -> tuple[float, ...]:
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        raise ValueError("three numbers, one per channel")
    return tuple(map(number, value))


def _deviations(value: Any) -> tuple[float, ...]:
    if any(item <= 0 for item in _channels(value)):
        raise ValueError("three numbers above 0, one per channel")
    return _channels(value)


def _pair(first: str, second: str) -> Any:
    def read(value: Any) -> tuple[int, int]:
        if not isinstance(value, Mapping) or {first, second} != {
            key for key, item in value.items() if item is not None
        }:
            raise ValueError(f"{{{first}: N, {second}: N}}")
        return positive_int(value[first]), positive_int(value[second])

    return read


_height_and_width = _pair("height", "width")
_pixel_range = _pair("shortest_edge", "longest_edge")


def _square(value: Any) -> tuple[int, int]:
    height, width = _height_and_width(value)
    if height != width:
        raise ValueError("{height: N, width: N} of a square")
    return height, width


def _token_budget(value: Any) -> int:
    if value not in (70, 140, 280, 560, 1120):
        raise ValueError("70, 140, 280, 560 or 1120")
    return int(value)


@dataclass(frozen=True)
class PixelSettings:
    """How pixels are resampled, and how bytes become numbers: scaled, then normalized per channel."""

    resample: int = setting(_resampling_filter, 2)
    do_rescale: bool = setting(boolean, True)
    rescale_factor: float = setting(positive_number, 1 / 255)
    do_normalize: bool = setting(boolean, True)
    image_mean: tuple[float, ...] = setting(_channels, (0.5, 0.5, 0.5))
    image_std: tuple[float, ...] = setting(_deviations, (0.5, 0.5, 0.5))


@dataclass(frozen=True, kw_only=True)
class SquareSettings(PixelSettings):
    """One size for every image, with optional crops of long images (pan and scan)."""

    size: tuple[int, int] = setting(_height_and_width)
    image_seq_length: int = setting(positive_int)
    do_pan_and_scan: bool = setting(boolean, False)
    pan_and_scan_min_crop_size: int = setting(positive_int, 256)
    pan_and_scan_max_num_crops: int = setting(positive_int, 4)
    pan_and_scan_min_ratio_to_activate: float = setting(positive_number, 1.2)


@dataclass(frozen=True, kw_only=True)
class TokenBudgetSettings(PixelSettings):
    """The aspect ratio is preserved; the size is the largest whose pooled patches fit `max_soft_tokens`."""

    patch_size: int = setting(positive_int)
    pooling_kernel_size: int = setting(positive_int)
    max_soft_tokens: int = setting(_token_budget)


@dataclass(frozen=True, kw_only=True)
class TileSettings(PixelSettings):
    """Square tiles of the best-fitting canvas, and a tile with the whole image if there are several.

    `max_patches` is the maximum number of tiles; patches have `patch_size` pixels, and pixel shuffle reduces their
    number by `pixel_shuffle_ratio` squared.
    """

    size: tuple[int, int] = setting(_square)
    max_patches: int = setting(positive_int)
    resize_to_max_canvas: bool = setting(boolean, False)
    patch_size: int = setting(positive_int)
    pixel_shuffle_ratio: float = setting(positive_number)


@dataclass(frozen=True, kw_only=True)
class DynamicSettings(PixelSettings):
    """Sides are multiples of `patch_size * merge_size`, within a range of pixels: `size` is (min, max)."""

    size: tuple[int, int] = setting(_pixel_range)
    patch_size: int = setting(positive_int)
    temporal_patch_size: int = setting(positive_int)
    merge_size: int = setting(positive_int)


@dataclass(frozen=True, kw_only=True)
class VideoSettings(DynamicSettings):
    """Frames per second or a number of frames are sampled; `budget` is the scope of the range of pixels.

    `pixels_per_frame` resizes each frame as an image, `pixels_per_video` counts the pixels of all frames.
    """

    budget: str = setting(str)
    do_sample_frames: bool = setting(boolean, True)
    fps: float | None = setting(positive_number, None)
    num_frames: int | None = setting(positive_int, None)
    min_frames: int = setting(positive_int, 4)
    max_frames: int = setting(positive_int, 768)
    cap_pixels_per_frame: bool = setting(boolean, False)
    max_video_tokens: int = setting(positive_int, 768)


@dataclass(frozen=True, kw_only=True)
class FrameSettings(TokenBudgetSettings):
    """A video whose frames are images of `token_budget`, each a step of the video.

    `num_frames` frames are sampled, or with `fps` frames per second, at least `min_frames` and at most `num_frames`.
    """

    do_sample_frames: bool = setting(boolean, True)
    fps: float | None = setting(positive_number, None)
    num_frames: int = setting(positive_int)
    min_frames: int = setting(positive_int, 1)

    @property
    def temporal_patch_size(self) -> int:
        """Frames of a step."""
        return 1

    @property
    def merge_size(self) -> int:
        """Rows and columns of the patches of a token."""
        return self.pooling_kernel_size


ImageSettings = SquareSettings | TokenBudgetSettings | TileSettings | DynamicSettings
MECHANISMS: dict[str, type[ImageSettings]] = {
    "square": SquareSettings,
    "token_budget": TokenBudgetSettings,
    "tiles": TileSettings,
    "dynamic": DynamicSettings,
}


def image_settings(settings: Mapping[str, Any]) -> ImageSettings:
    """Parse settings of an image processor; its class, or the key `mechanism`, selects the dataclass."""
    entry = class_entry("image_processor_type", settings)
    return _parse(MECHANISMS[entry["mechanism"]], settings, entry.get("defaults", {}))


def video_settings(settings: Mapping[str, Any]) -> VideoSettings | FrameSettings:
    """Parse settings of a video processor."""
    entry = class_entry("video_processor_type", settings)
    defaults = entry.get("defaults", {})
    if entry["mechanism"] == "tokens_per_frame":
        return _parse(FrameSettings, settings, defaults)
    return _parse(VideoSettings, settings, {**defaults, "budget": entry["mechanism"]})


def _parse(kind: Any, settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> Any:
    """Parse settings; `min_pixels` and `max_pixels` are earlier names of the two values of `size`."""
    settings = dict(settings)
    if issubclass(kind, DynamicSettings):
        size = dict(settings.get("size") or defaults.get("size", {}))
        for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            earlier = settings.pop(old, None)
            size.pop(old, None)
            if earlier is not None:
                size[new] = earlier
        settings["size"] = size
    return parse_settings(kind, settings, defaults=defaults, required=_REQUIRED, others=("audio", "processor"))
