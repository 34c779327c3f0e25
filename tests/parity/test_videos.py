"""Videos against the processors and the models of transformers: from frames in a file to logits."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from maxhydra.config.compose.composer import compose
from maxhydra.convert.hf import hf_source
from maxhydra.data.image_tokens import MARKER, ImageTokenizer
from maxhydra.decode.sampling_params import PromptEncoder
from maxhydra.layers import AudioClips
from tests.support.containers import matroska
from tests.support.media_models import (
    GEMMA4_VISION,
    QWEN_EXPERTS,
    QWEN_TEXT,
    QWEN_VISION,
    forward_logits,
    load_float32,
    randomize,
)
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")
transformers = import_optional("transformers", extra="parity")

pytestmark = [pytest.mark.parity, pytest.mark.slow]

# Written by videos/make.py.
PROCESSED = Path(__file__).parent / "videos"
LETTERS = "abc<>. 0123456789secondf:"
TEXT = "a{video}b{image}c"


def vocabulary(special: list[str]) -> dict[str, int]:
    """Characters and special tokens."""
    return {token: id for id, token in enumerate([*dict.fromkeys(LETTERS), *special])}


@dataclasses.dataclass(frozen=True)
class Case:
    """A family: its tiny model, its special tokens by the names of its tokenizer, and a video."""

    model: str
    """Prefix of the classes of model and config."""
    settings: dict[str, Any]
    tokens: dict[str, str]
    ids: dict[str, str]
    """Key of config.json -> special token."""
    frames: np.ndarray
    fps: float
    videos: dict[str, Any]
    """Values of model.vision.videos other than those of the published model."""
    samples: np.ndarray | None = None
    """int16 [1, count] of the audio of the video at 16 kHz; None: no audio."""

    @property
    def vocabulary(self) -> dict[str, int]:
        return vocabulary(list(self.tokens.values()))

    def tokenizer(self) -> Any:
        """A tokenizer of characters and special tokens."""
        made = tokenizers.Tokenizer(tokenizers.models.BPE(self.vocabulary, []))
        made.add_special_tokens(list(self.tokens.values()))
        named = {name: token for name, token in self.tokens.items() if name != "video"}
        return transformers.PreTrainedTokenizerFast(tokenizer_object=made, extra_special_tokens=named, pad_token="a")

    def reference(self, name: str) -> Any:
        return getattr(transformers, self.model + name)


QWEN_TOKENS = {
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
}
OMNI_TOKENS = {
    **QWEN_TOKENS,
    "audio_token": "<|audio_pad|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
QWEN_IDS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
OMNI_IDS = {
    **QWEN_IDS,
    "audio_token_id": "<|audio_pad|>",
    "audio_start_token_id": "<|audio_start|>",
    "audio_end_token_id": "<|audio_end|>",
}
GEMMA_TOKENS = {
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "image_token": "<|image|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "audio_token": "<|audio|>",
    "video": "<|video|>",
}
GENERATOR = np.random.default_rng(0)
# Frames of a whole number of tokens, which are not resized: torchvision and Pillow resample differently.
FRAMES = GENERATOR.integers(0, 256, (9, 16, 24, 3), np.uint8)
# 7 x 10 tokens, the smallest number that the processor of Gemma 4 accepts.
LARGE_FRAMES = GENERATOR.integers(0, 256, (9, 14, 20, 3), np.uint8).repeat(4, axis=1).repeat(4, axis=2)
CASES = {
    "qwen3-vl": Case(
        model="Qwen3VL",
        settings={"text_config": QWEN_TEXT, "vision_config": QWEN_VISION},
        tokens=QWEN_TOKENS,
        ids=QWEN_IDS,
        frames=FRAMES,
        fps=4.0,
        videos={"min_patches": 16, "max_patches": 96},
    ),
    # Three steps of two frames, 26 positions apart.
    "qwen3-omni": Case(
        model="Qwen3OmniMoeThinker",
        settings={
            "text_config": QWEN_TEXT | QWEN_EXPERTS,
            "vision_config": QWEN_VISION,
            "audio_config": {
                "num_mel_bins": 8,
                "encoder_layers": 1,
                "encoder_attention_heads": 1,
                "encoder_ffn_dim": 8,
                "d_model": 8,
                "output_dim": 32,
                "downsample_hidden_size": 2,
            },
            "position_id_per_seconds": 13,
        },
        tokens=OMNI_TOKENS,
        ids=OMNI_IDS,
        frames=FRAMES,
        fps=1.5,
        videos={"min_patches": 16, "max_patches": 96},
    ),
    # Four frames of 70 tokens, 20 seconds apart.
    "gemma4": Case(
        model="Gemma4",
        settings={
            "text_config": {
                **{key: value for key, value in QWEN_TEXT.items() if key != "rope_parameters"},
                "num_hidden_layers": 2,
                "global_head_dim": 16,
                "hidden_size_per_layer_input": 0,
                "attention_k_eq_v": True,
                "use_bidirectional_attention": "vision",
                "sliding_window": 90,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "vision_config": GEMMA4_VISION,
            "audio_config": None,
            "vision_soft_tokens_per_image": 70,
        },
        tokens=GEMMA_TOKENS,
        ids={"boi_token_id": "<|image>", "eoi_token_id": "<image|>", "image_token_id": "<|image|>"}
        | {"video_token_id": "<|video|>", "audio_token_id": "<|audio|>"},
        frames=LARGE_FRAMES,
        fps=0.1,
        videos={"max_frames": 4},
    ),
}
# 3.3 seconds of audio, whose 43 tokens end between the second and the third step.
CASES["qwen3-omni-audio"] = dataclasses.replace(
    CASES["qwen3-omni"],
    videos={**CASES["qwen3-omni"].videos, "use_audio_in_video": True},
    samples=GENERATOR.integers(-20000, 20000, (1, 52800)).astype(np.int16),
)


def make_folder(name: str, path: Path) -> None:
    """Write a random model with its tokenizer, and its video."""
    torch.manual_seed(0)
    case = CASES[name]
    ids = {key: case.vocabulary[token] for key, token in case.ids.items()}
    model = case.reference("ForConditionalGeneration")(case.reference("Config")(**case.settings, **ids))
    randomize(model).save_pretrained(path)
    case.tokenizer().save_pretrained(path)
    np.save(path / "video.npy", case.frames)
    if case.samples is not None:
        (path / "video.mkv").write_bytes(matroska(case.frames, case.fps, case.samples))


# test_omni.py and test_gemma4_vision.py have the mechanisms of the others.
@pytest.mark.default_cases("qwen3-vl")
@pytest.mark.parametrize("name", CASES)
def test_tokens_and_logits_of_a_prompt_with_a_video_equal_transformers(name: str, tmp_path: Path) -> None:
    make_folder(name, tmp_path)
    case, section = CASES[name], hf_source("", str(tmp_path), tmp_path).model.vision
    limits = {} if section.fill_patches else {"min_patches": 16, "max_patches": 96}
    vision = dataclasses.replace(section, **limits, videos=dataclasses.replace(section.videos, **case.videos))
    model, params = load_float32(tmp_path, vision=vision)
    data = compose(["data.tokenizer.kind=hf", f"data.tokenizer.path={tmp_path}"]).config.data
    encoder = PromptEncoder(data, vocab_size=64, vision=vision, audio=model.config.audio)
    file = "video.npy" if case.samples is None else "video.mkv"
    video = {"video": str(tmp_path / file), "fps": case.fps}
    text = TEXT.format(video=MARKER, image=MARKER)
    ids = ImageTokenizer(encoder.tokenizer, vision).encode_with_special_tokens(text)[0]
    prompt = encoder.insert_media(ids.tolist(), images=[video, case.frames[0]], audios=[])
    with np.load(PROCESSED / f"{name}.npz") as arrays:
        inputs = {key: torch.tensor(arrays[key]) for key in arrays.files}
    assert prompt.prompt == inputs["input_ids"][0].tolist()
    reference = case.reference("ForConditionalGeneration").from_pretrained(tmp_path, attn_implementation="eager")
    with torch.no_grad():
        logits = reference.eval()(**inputs, **({} if prompt.audio is None else {"use_audio_in_video": True})).logits
    media: dict[str, Any] = {"images": prompt.images[None]}
    media |= {} if prompt.audio is None else {"audio": AudioClips(*(array[None] for array in prompt.audio))}
    own = forward_logits(model, params, np.array([prompt.prompt]), media)
    np.testing.assert_allclose(own, logits.numpy(), atol=1e-4)
    assert np.abs(own).max() > 1
