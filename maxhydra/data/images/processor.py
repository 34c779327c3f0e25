"""Image processors: an image becomes normalized pixels, in one of four mechanisms.

| mechanism | pixels | grid |
|---|---|---|
| square | the image at one size, then its crops (pan and scan) | none |
| token_budget | the image near its aspect ratio | rows and columns of patches |
| tiles | tiles row by row, then the whole image as one tile | rows and columns of tiles |
| dynamic | the image near its size and aspect ratio | rows and columns of patches |

Images are resampled by Pillow, as in the PIL processors of transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import ml_dtypes
import numpy as np

from maxhydra.data.images.geometry import (
    best_canvas,
    pan_and_scan_boxes,
    pixel_range_size,
    size_within_canvas,
    token_budget_size,
)
from maxhydra.data.images.read import pillow, to_rgb
from maxhydra.data.images.settings import (
    DynamicSettings,
    ImageSettings,
    PixelSettings,
    SquareSettings,
    TileSettings,
    TokenBudgetSettings,
    image_settings,
)

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class ProcessedImage:
    """Pixels [count, height, width, 3] in float32, their grid, and the number of placeholder tokens of all of them."""

    pixels: np.ndarray
    grid: tuple[int, int] | None
    tokens: int
    ids: tuple[int, ...] | None = None
    """Tokens of a video, whose steps are the images; None for images, whose tokens follow from the rest."""
    clip: np.ndarray | None = None
    """Log-mel frames [frames, bands] of the audio of a video, whose tokens are among `ids`; None: no audio."""


class Processor(Protocol):
    """Turns images into the pixels of one model."""

    def __call__(self, image: "Image.Image") -> ProcessedImage: ...


def make_processor(settings: Mapping[str, Any]) -> Processor:
    """Return the processor that `preprocessor_config.json` of a Hugging Face folder describes.

    Unknown and unsupported settings raise a ConfigError.
    """
    return settings_processor(image_settings(settings))


def settings_processor(settings: ImageSettings) -> Processor:
    """Return the processor of parsed settings."""
    return _ImageProcessor(settings, _PROCESS[type(settings)])


@dataclass(frozen=True)
class _ImageProcessor:
    settings: ImageSettings
    process: Callable[["Image.Image", Any], ProcessedImage]

    def __call__(self, image: "Image.Image") -> ProcessedImage:
        return self.process(to_rgb(image), self.settings)


def resize(image: "Image.Image", size: tuple[int, int], settings: PixelSettings) -> "Image.Image":
    """Resample an image to (height, width)."""
    return image.resize(size[::-1], resample=pillow().Resampling(settings.resample))


def pixel_values(pixels: np.ndarray, settings: PixelSettings) -> np.ndarray:
    """Scale and normalize bytes [..., 3] in float32; the multiplication is in float64, as in transformers."""
    values: np.ndarray = pixels.astype(np.float32)
    if settings.do_rescale:
        values = (pixels.astype(np.float64) * settings.rescale_factor).astype(np.float32)
    if settings.do_normalize:
        values = (values - np.array(settings.image_mean, np.float32)) / np.array(settings.image_std, np.float32)
    return values


def _square(image: "Image.Image", settings: SquareSettings) -> ProcessedImage:
    boxes = pan_and_scan_boxes(image.height, image.width, settings) if settings.do_pan_and_scan else []
    parts = [image, *(image.crop(box) for box in boxes)]
    pixels = np.stack([np.asarray(resize(part, settings.size, settings)) for part in parts])
    return ProcessedImage(pixel_values(pixels, settings), None, len(parts) * settings.image_seq_length)


def _token_budget(image: "Image.Image", settings: TokenBudgetSettings) -> ProcessedImage:
    size = token_budget_size(image.height, image.width, settings)
    grid = (size[0] // settings.patch_size, size[1] // settings.patch_size)
    pixels = pixel_values(np.asarray(resize(image, size, settings)), settings)
    return ProcessedImage(pixels[None], grid, grid[0] * grid[1] // settings.pooling_kernel_size**2)


def _dynamic(image: "Image.Image", settings: DynamicSettings) -> ProcessedImage:
    multiple = settings.patch_size * settings.merge_size
    size = pixel_range_size(image.height, image.width, multiple=multiple, pixels=settings.size)
    grid = (size[0] // settings.patch_size, size[1] // settings.patch_size)
    pixels = pixel_values(np.asarray(resize(image, size, settings)), settings)
    return ProcessedImage(pixels[None], grid, grid[0] * grid[1] // settings.merge_size**2)


def _tiles(image: "Image.Image", settings: TileSettings) -> ProcessedImage:
    tile = settings.size[0]
    rows, columns = grid = best_canvas(image.height, image.width, settings)
    size = size_within_canvas(image.height, image.width, (rows * tile, columns * tile), settings)
    canvas = np.zeros((rows * tile, columns * tile, 3), np.uint8)
    canvas[: size[0], : size[1]] = np.asarray(resize(image, size, settings))
    tiles = canvas.reshape(rows, tile, columns, tile, 3).swapaxes(1, 2).reshape(-1, tile, tile, 3)
    if len(tiles) > 1:
        tiles = np.concatenate([tiles, np.asarray(resize(image, settings.size, settings))[None]])
    tokens = (tile // settings.patch_size) ** 2 // round(1 / settings.pixel_shuffle_ratio**2)
    return ProcessedImage(_bfloat16_values(tiles, settings), grid, len(tiles) * tokens)


def _bfloat16_values(pixels: np.ndarray, settings: PixelSettings) -> np.ndarray:
    """Scale and normalize with bfloat16 intermediate results, as the models with tiles were trained."""
    if not (settings.do_rescale and settings.do_normalize):
        return pixel_values(pixels, settings)

    def rounded(values: np.ndarray) -> np.ndarray:
        return values.astype(ml_dtypes.bfloat16).astype(np.float32)

    mean, deviation = (rounded(np.array(item, np.float32)) for item in (settings.image_mean, settings.image_std))
    values = rounded(pixels.astype(np.float32) * np.float32(settings.rescale_factor))
    return rounded(rounded(values - mean) / deviation)


_PROCESS: dict[type, Callable[["Image.Image", Any], ProcessedImage]] = {
    SquareSettings: _square,
    TokenBudgetSettings: _token_budget,
    TileSettings: _tiles,
    DynamicSettings: _dynamic,
}
