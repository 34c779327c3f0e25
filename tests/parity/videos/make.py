"""Writes processor.npz: tokens, pixels and grids that the processor of Qwen3-VL makes of a prompt with a video.

    PYTHONPATH=. python tests/parity/videos/make.py

It needs torchvision; the tests read the file and do not.
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import Qwen3VLProcessor, Qwen3VLVideoProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.parity.test_videos import BUDGET, FPS, FRAMES, PICTURE, SIZES, TEXT, make_tokenizer


def main() -> None:
    pixels = {**SIZES, "size": BUDGET, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    videos = Qwen3VLVideoProcessor(**SIZES, size=BUDGET)
    processor = Qwen3VLProcessor(Qwen2VLImageProcessorPil(**pixels), make_tokenizer(), videos)
    inputs = processor(
        # Without the tokens that chat templates write around a video, which Qwen3-VL has around each step instead.
        text=[TEXT.format(video="<|video_pad|>", image="<|vision_start|><|image_pad|><|vision_end|>")],
        images=[Image.fromarray(PICTURE)],
        videos=[torch.tensor(FRAMES).permute(0, 3, 1, 2)],
        video_metadata=[{"total_num_frames": len(FRAMES), "fps": FPS, "frames_indices": list(range(len(FRAMES)))}],
        return_tensors="pt",
    )
    arrays = {key: value.numpy() for key, value in inputs.items() if isinstance(value, torch.Tensor)}
    np.savez_compressed(Path(__file__).with_name("processor.npz"), **arrays)


if __name__ == "__main__":
    main()
