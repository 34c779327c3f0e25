"""Size arithmetic of the image mechanisms: crops, canvases of tiles, and sizes under a budget of pixels or tokens."""

import itertools
import math

import numpy as np

from maxhydra.data.images.settings import SquareSettings, TileSettings, TokenBudgetSettings
from maxhydra.data.media import MediaError

# Left, top, right, bottom.
Box = tuple[int, int, int, int]
MAX_ASPECT_RATIO = 200


def pan_and_scan_boxes(height: int, width: int, settings: SquareSettings) -> list[Box]:
    """Boxes of the crops along the longer side of an image; none if it is nearly square or its crops are too small."""
    shorter, longer = sorted((height, width))
    if longer / shorter < settings.pan_and_scan_min_ratio_to_activate:
        return []
    count = min(math.floor(longer / shorter + 0.5), longer // settings.pan_and_scan_min_crop_size)
    count = min(max(count, 2), settings.pan_and_scan_max_num_crops)
    step = math.ceil(longer / count)
    if min(step, shorter) < settings.pan_and_scan_min_crop_size:
        return []
    spans = [(start, min(start + step, longer)) for start in range(0, longer, step)]
    if width >= height:
        return [(start, 0, end, height) for start, end in spans]
    return [(0, start, width, end) for start, end in spans]


def best_canvas(height: int, width: int, settings: TileSettings) -> tuple[int, int]:
    """Rows and columns of tiles of the canvas that an image fills best.

    It is the canvas that enlarges the image least (or most, with `resize_to_max_canvas`); if all are smaller than the
    image, the one that reduces it least. The smallest canvas wins ties. Scales are compared in float32, as in
    transformers, because ties decide.
    """
    tile = settings.size[0]
    counts = range(1, settings.max_patches + 1)
    canvases = [(rows, columns) for rows, columns in itertools.product(counts, counts) if rows * columns in counts]
    scales = {
        (rows, columns): min(
            np.float32(rows * tile) / np.float32(height),
            np.float32(columns * tile) / np.float32(width),
        )
        for rows, columns in canvases
    }
    enlarging = [scale for scale in scales.values() if scale >= 1]
    choose = max if settings.resize_to_max_canvas or not enlarging else min
    best = choose(enlarging or scales.values())
    return min((canvas for canvas in canvases if scales[canvas] == best), key=math.prod)


def size_within_canvas(height: int, width: int, canvas: tuple[int, int], settings: TileSettings) -> tuple[int, int]:
    """Size of an image inside its canvas (in pixels), with its aspect ratio.

    An image is enlarged to one tile at most. The scale of a side that the canvas limits is a float32 number, as in
    transformers, which decides how a size just below a whole number is rounded.
    """

    def limit_and_scale(length: int, canvas_length: int) -> tuple[int, float | np.floating]:
        limit = canvas_length if settings.resize_to_max_canvas else max(length, settings.size[0])
        if canvas_length < limit or settings.resize_to_max_canvas:
            return canvas_length, np.float32(canvas_length) / np.float32(length)
        return limit, limit / length

    max_height, scale_height = limit_and_scale(height, canvas[0])
    max_width, scale_width = limit_and_scale(width, canvas[1])
    if scale_width < scale_height:
        return max(min(math.floor(height * scale_width), max_height), 1), max_width
    return max_height, max(min(math.floor(width * scale_height), max_width), 1)


def token_budget_size(height: int, width: int, settings: TokenBudgetSettings) -> tuple[int, int]:
    """Largest size in multiples of the pooled patch that stays within the budget and near the aspect ratio.

    An image too long for that has one row or column of tokens.
    """
    multiple = settings.pooling_kernel_size * settings.patch_size
    scale = math.sqrt(settings.max_soft_tokens * multiple**2 / (height * width))
    rows, columns = math.floor(scale * height / multiple), math.floor(scale * width / multiple)
    if rows == 0:
        rows, columns = 1, min(width // height, settings.max_soft_tokens)
    elif columns == 0:
        rows, columns = min(height // width, settings.max_soft_tokens), 1
    return rows * multiple, columns * multiple


def pixel_range_size(
    height: int,
    width: int,
    *,
    multiple: int,
    pixels: tuple[int, int],
    frames: tuple[int, int] = (1, 1),
    name: str = "image",
) -> tuple[int, int]:
    """Size in multiples of `multiple` whose number of pixels is in a range, near the aspect ratio.

    `frames` are the number of frames and its multiple: the range applies to all frames together.
    """
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        reason = f"{width}x{height} pixels have an aspect ratio above {MAX_ASPECT_RATIO}"
        raise MediaError(name, reason, accepted=f"aspect ratios up to {MAX_ASPECT_RATIO}")
    count, count_multiple = frames
    rounded_count = round(count / count_multiple) * count_multiple
    rounded = (round(height / multiple) * multiple, round(width / multiple) * multiple)
    if rounded_count * math.prod(rounded) > pixels[1]:
        scale = math.sqrt(count * height * width / pixels[1])
        lengths = (max(multiple, math.floor(length / scale / multiple) * multiple) for length in (height, width))
    elif rounded_count * math.prod(rounded) < pixels[0]:
        scale = math.sqrt(pixels[0] / (count * height * width))
        lengths = (math.ceil(length * scale / multiple) * multiple for length in (height, width))
    else:
        return rounded
    new_height, new_width = lengths
    return new_height, new_width
