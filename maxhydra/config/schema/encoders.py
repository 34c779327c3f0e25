"""Checks of image and audio encoders that need the rest of the model."""

from collections.abc import Iterator, Mapping

from maxhydra.config.errors import Problem
from maxhydra.config.schema.audio import Audio
from maxhydra.config.schema.data import AUDIO_TYPES, PackingMethod
from maxhydra.config.schema.layer_kind import Kind, Mixer
from maxhydra.config.schema.speech import Speech
from maxhydra.config.schema.vision import Vision

# Names of the keys of tokens that the outputs of an encoder replace.
PLACEHOLDERS = ("placeholder_id", "video_id")


def placeholders(vision: Vision, audio: Audio) -> tuple[int, ...]:
    """Placeholders of the tokens of all media that a model takes."""
    images = () if vision.num_layers is None else vision.placeholders
    return (*images, *(() if audio.num_layers is None or audio.placeholder_id is None else (audio.placeholder_id,)))


def has_audio(record_type: str, vision: Vision | None) -> bool:
    """Whether rows of a record type have audio: that of the record, or that of its videos."""
    is_in_video = vision is not None and vision.num_layers is not None and vision.videos.use_audio_in_video
    return record_type in AUDIO_TYPES or (record_type == "image_chat" and is_in_video)


def packing_methods(record_type: str, vision: Vision) -> list[PackingMethod]:
    """Packing methods of a record type with images or audio. Audio and preference pairs fill rows alone."""
    packs = record_type == "image_chat" and not has_audio(record_type, vision)
    packed = [PackingMethod.first_fit, PackingMethod.best_fit] if packs else []
    return [PackingMethod.auto, PackingMethod.none, *packed]


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
        yield from _vocabulary_problems(path, encoder.token_ids, vocab_size)
        for name in (name for name, is_used in {**conflicts, **lookups}.items() if is_used):
            reason = f"is not supported together with model.{name}"
            yield Problem(f"{path}.num_layers", reason, value=encoder.num_layers, accepted="null")
    yield from _equal_id_problems({path: each for path, each in encoders.items() if each.num_layers is not None})
    if vision.num_layers is not None and vision.videos.use_audio_in_video:
        yield from _video_audio_problems(vision, audio)
    if vision.num_layers is not None and vision.bidirectional:
        for name, kind in kinds.items():
            if kind.mixer is not Mixer.attention or kind.attention.chunk is not None:
                reason = f"requires mixer=attention without chunks, which model.kinds.{name} does not have"
                yield Problem("vision.bidirectional", reason, value=True, accepted="false")


def _vocabulary_problems(path: str, token_ids: Mapping[str, int | None], vocab_size: int) -> Iterator[Problem]:
    for name, value in token_ids.items():
        if value is not None and value >= vocab_size:
            reason = f"is not in the vocabulary of {vocab_size} tokens"
            yield Problem(f"{path}.{name}", reason, value=value, accepted=f"0 to {vocab_size - 1}")


def _equal_id_problems(encoders: Mapping[str, Vision | Audio]) -> Iterator[Problem]:
    """Problems of placeholders with the id of another token: a placeholder says which encoder replaces the token."""
    ids = {f"{path}.{name}": id for path, each in encoders.items() for name, id in each.token_ids.items()}
    first: dict[int, str] = {}
    for path, id in ids.items():
        if id is None:
            continue
        other = first.setdefault(id, path)
        if other != path and any(key.endswith(PLACEHOLDERS) for key in (path, other)):
            taken = ", ".join(sorted({str(each) for each in ids.values() if each is not None}, key=int))
            reason = f"equals {other}, but a placeholder needs an id that no other token has"
            yield Problem(path, reason, value=id, accepted=f"an id other than {taken}")


def _video_audio_problems(vision: Vision, audio: Audio) -> Iterator[Problem]:
    """Problems of settings that audio in videos needs: both encoders, and tokens around the audio."""
    needed = {"vision.video_id": vision.video_id, "audio.num_layers": audio.num_layers}
    needed |= {f"audio.{name}": getattr(audio, name) for name in ("begin_id", "end_id")}
    for path, value in needed.items():
        if value is None:
            reason = "is needed with vision.videos.use_audio_in_video"
            yield Problem(path, reason, value=None, hint="set it, or model.vision.videos.use_audio_in_video=false")


def speech_problems(speech: Speech, vision: Vision, *, vocab_size: int, num_layers: int) -> Iterator[Problem]:
    """Problems of tokens outside the vocabulary, and of a talker that reads a layer before all images are added."""
    if speech.codebooks is None:
        return
    yield from _vocabulary_problems("speech", speech.token_ids, vocab_size)
    first = len(vision.deepstack) + 1
    if not first <= speech.talker.hidden_layer < num_layers:
        reason = "must be after the layers that add outputs of the image encoder, and before the last one"
        value, accepted = speech.talker.hidden_layer, f"{first} to {num_layers - 1}"
        yield Problem("speech.talker.hidden_layer", reason, value=value, accepted=accepted)
