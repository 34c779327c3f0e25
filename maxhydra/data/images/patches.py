"""Patches of processed pixels, in the two orders that vision encoders read.

Shapes: F frames, H and W pixels, P patch size, T frames per patch.
"""

import numpy as np


def merged_patches(pixels: np.ndarray, *, patch_size: int, merge_size: int, temporal_patch_size: int) -> np.ndarray:
    """Flatten [F, H, W, 3] into [patches, 3 * T * P * P], with the patches that are merged next to each other.

    The last frame is repeated up to a multiple of T: an image is a video of T equal frames.
    """
    padding = -len(pixels) % temporal_patch_size
    pixels = np.concatenate([pixels, np.repeat(pixels[-1:], padding, axis=0)])
    frames, height, width, channels = pixels.shape
    merged_rows, merged_columns = height // patch_size // merge_size, width // patch_size // merge_size
    split = pixels.reshape(
        frames // temporal_patch_size,
        temporal_patch_size,
        *(merged_rows, merge_size, patch_size),
        *(merged_columns, merge_size, patch_size),
        channels,
    )
    return split.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, channels * temporal_patch_size * patch_size**2)


def merged_coordinates(rows: int, columns: int, *, merge_size: int) -> np.ndarray:
    """[patches, 2] row and column of each patch in the order of `merged_patches`."""
    blocks = np.indices((rows, columns)).reshape(2, rows // merge_size, merge_size, columns // merge_size, merge_size)
    return blocks.transpose(1, 3, 2, 4, 0).reshape(-1, 2)


def padded_patches(pixels: np.ndarray, *, patch_size: int, max_patches: int) -> tuple[np.ndarray, np.ndarray]:
    """Flatten [count, H, W, 3] into patches [count, max_patches, P * P * 3] and positions [count, max_patches, 2].

    Positions are column and row; those of padding are -1.
    """
    count, height, width, channels = pixels.shape
    rows, columns = height // patch_size, width // patch_size
    split = pixels.reshape(count, rows, patch_size, columns, patch_size, channels).swapaxes(2, 3)
    positions = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), axis=-1).reshape(1, -1, 2)
    padding = ((0, 0), (0, max_patches - rows * columns), (0, 0))
    patches = np.pad(split.reshape(count, rows * columns, -1), padding)
    return patches, np.pad(positions.repeat(count, axis=0), padding, constant_values=-1)
