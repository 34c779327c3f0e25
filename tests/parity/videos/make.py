"""Writes a file for each family: tokens, pixels and grids that its processor makes of a prompt with a video.

    PYTHONPATH=. python tests/parity/videos/make.py

It needs torchvision; the tests read the files and do not.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    Gemma4AudioFeatureExtractor,
    Gemma4Processor,
    Gemma4VideoProcessor,
    Qwen2VLVideoProcessor,
    Qwen3OmniMoeProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    WhisperFeatureExtractor,
)
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.parity.test_videos import CASES, TEXT

SIZES = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
BUDGET = {"size": {"shortest_edge": 256, "longest_edge": 1536}}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
BANDS = 8
SOFT_TOKENS = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}


def processor_of(name: str) -> tuple[Any, dict[str, Any]]:
    """The processor of a family, and options of its call."""
    tokenizer = CASES[name].tokenizer()
    if name == "gemma4":
        image, video = Gemma4ImageProcessorPil(**SOFT_TOKENS), Gemma4VideoProcessor(**SOFT_TOKENS, num_frames=4)
        return Gemma4Processor(Gemma4AudioFeatureExtractor(), image, tokenizer, video), {}
    image = Qwen2VLImageProcessorPil(**SIZES, **BUDGET, **HALF)
    if name == "qwen3-vl":
        return Qwen3VLProcessor(image, tokenizer, Qwen3VLVideoProcessor(**SIZES, **BUDGET)), {}
    video = Qwen2VLVideoProcessor(**SIZES, **BUDGET, **HALF)
    made = Qwen3OmniMoeProcessor(image, video, WhisperFeatureExtractor(feature_size=BANDS), tokenizer)
    return made, {"videos_kwargs": {"fps": 1.0, "do_sample_frames": True, **BUDGET}}


def main() -> None:
    for name, case in CASES.items():
        processor, options = processor_of(name)
        image, video = case.tokens["image_token"], case.tokens.get("video") or case.tokens["video_token"]
        if name != "gemma4":
            # Chat templates write the tokens around an image. Qwen3-VL has them around each step of a video instead.
            image = f"<|vision_start|>{image}<|vision_end|>"
            video = video if name == "qwen3-vl" else f"<|vision_start|>{video}<|vision_end|>"
        frames = torch.tensor(case.frames).permute(0, 3, 1, 2)
        metadata = {"total_num_frames": len(frames), "fps": case.fps, "frames_indices": list(range(len(frames)))}
        sound: dict[str, Any] = {}
        if case.samples is not None:
            samples = (case.samples[0] / 2**15).astype(np.float32)
            sound = {"audio": [samples], "audio_from_video_indices": [0], "load_audio_from_video": True}
        inputs = processor(
            text=[TEXT.format(video=video, image=image)],
            images=[Image.fromarray(case.frames[0])],
            videos=[frames],
            **({} if options else {"video_metadata": [metadata]}),
            **{key: {**value, "video_metadata": [metadata]} for key, value in options.items()},
            **sound,
            return_tensors="pt",
        )
        arrays = {key: np.asarray(value) for key, value in inputs.items()}
        np.savez_compressed(Path(__file__).with_name(f"{name}.npz"), **arrays)


if __name__ == "__main__":
    main()
