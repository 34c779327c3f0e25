"""Checks of image and audio encoders that need the rest of the model."""

from collections.abc import Iterator, Mapping

from maxhydra.config.errors import Problem
from maxhydra.config.schema.audio import Audio
from maxhydra.config.schema.layer_kind import Kind, Mixer
from maxhydra.config.schema.vision import Vision


def placeholders(vision: Vision, audio: Audio) -> tuple[int, ...]:
    """Placeholders of the tokens of all media that a model takes."""
    images = () if vision.num_layers is None else vision.placeholders
    return (*images, *(() if audio.num_layers is None or audio.placeholder_id is None else (audio.placeholder_id,)))


def encoder_problems(
    vision: Vision, audio: Audio, *, vocab_size: int, kinds: Mapping[str, Kind], conflicts: Mapping[str, bool]
) -> Iterator[Problem]:
    """Placeholders are tokens of the vocabulary, and mechanisms that look up tokens again see no other media.

    `kinds`: those that the model uses. `conflicts`: keys of `model`, and whether they are used.
    """
    lookups = {f"kinds.{name}.engram": bool(kind.engram.vocab_sizes) for name, kind in kinds.items()}
    blocks = {f"kinds.{name}.attention.moba": kind.attention.moba.block_size for name, kind in kinds.items()}
    lookups |= {path: size is not None for path, size in blocks.items()}
    encoders: dict[str, Vision | Audio] = {"vision": vision, "audio": audio}
    for path, encoder in encoders.items():
        if encoder.num_layers is None:
            continue
        for name, value in encoder.token_ids.items():
            if value is not None and value >= vocab_size:
                reason = f"is not in the vocabulary of {vocab_size} tokens"
                yield Problem(f"{path}.{name}", reason, value=value, accepted=f"0 to {vocab_size - 1}")
        for name in (name for name, is_used in {**conflicts, **lookups}.items() if is_used):
            reason = f"is not supported together with model.{name}"
            yield Problem(f"{path}.num_layers", reason, value=encoder.num_layers, accepted="null")
    if vision.num_layers is not None and vision.bidirectional:
        for name, kind in kinds.items():
            if kind.mixer is not Mixer.attention or kind.attention.chunk is not None:
                reason = f"requires mixer=attention without chunks, which model.kinds.{name} does not have"
                yield Problem("vision.bidirectional", reason, value=True, accepted="false")
