"""Writes torchvision.npz: pixels of the processors that transformers implements with torchvision alone.

    PYTHONPATH=. python tests/data/images/golden/make.py

It needs torchvision; the tests read the file and do not.
"""

import json
from pathlib import Path

import numpy as np
from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor
from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from tests.support.pictures import TILE_CASES, TILE_SIZES, VIDEO_CASES, VIDEO_SIZES, frames, picture, video_options


def main() -> None:
    arrays = {}
    for settings in TILE_CASES:
        for size in TILE_SIZES:
            result = Llama4ImageProcessor(**settings)(picture(*size), return_tensors="pt")
            key = json.dumps(["tiles", settings, size, result["aspect_ratios"][0].tolist()])
            arrays[key] = result["pixel_values"].float().numpy().transpose(0, 2, 3, 1)
    kinds = {kind.__name__: kind for kind in (Gemma4VideoProcessor, Qwen2VLVideoProcessor, Qwen3VLVideoProcessor)}
    for name, settings in VIDEO_CASES:
        for count, height, width, fps in VIDEO_SIZES:
            metadata = VideoMetadata(total_num_frames=count, fps=fps, frames_indices=list(range(count)))
            video = np.stack([np.asarray(frame) for frame in frames(count, height, width)]).transpose(0, 3, 1, 2)
            result = kinds[name](**video_options(name), **settings)(
                videos=[video], video_metadata=[metadata], return_tensors="pt", return_metadata=True
            )
            indices = list(map(int, result["video_metadata"][0].frames_indices))
            patches = result["pixel_values_videos"].numpy()
            if name == "Gemma4VideoProcessor":
                rows, columns = 1 + result["video_position_ids"][0].numpy().max(axis=0)[::-1]
                grid, patches = [len(patches), int(rows), int(columns)], patches[:, : rows * columns]
            else:
                grid = result["video_grid_thw"][0].tolist()
            arrays[json.dumps(["video", name, settings, [count, height, width, fps], grid, indices])] = patches
    # Half precision holds bfloat16 values exactly, and others within a tenth of a rounding step of a byte.
    half = {key: value.astype(np.float16) for key, value in arrays.items()}
    np.savez_compressed(Path(__file__).with_name("torchvision.npz"), **half)


if __name__ == "__main__":
    main()
