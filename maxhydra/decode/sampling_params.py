"""Builds engine requests from prompts and sampling parameters, for the CLI, files, the server and RL alike.

Prompts and conversations are encoded as token ids, with the tokens that end a completion. `PromptClient` builds
requests according to task=decode: chat template, sampling parameters and seeds.
"""

import dataclasses
import hashlib
import itertools
import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.errors import did_you_mean
from maxhydra.config.fields import FieldType, fields
from maxhydra.config.schema.audio import Audio
from maxhydra.config.schema.data import Data
from maxhydra.config.schema.decode import Sampling
from maxhydra.config.schema.tasks.inference import Chat, DecodeTask
from maxhydra.config.schema.vision import Vision
from maxhydra.data import load_tokenizer
from maxhydra.data.audio.tokens import CLIP_MARKER, Clips, ClipTokenizer, clip_frames, placeholder_counts, stack_clips
from maxhydra.data.chat import ChatTemplate, ChatTemplateError, Tools, compile_chat_template
from maxhydra.data.image_tokens import MARKER, ImageTokenizer, insert_images, join_pixels
from maxhydra.data.images import ProcessedImage
from maxhydra.data.media import MediaError
from maxhydra.data.tokenizers import count_token_bytes, special_token_pattern
from maxhydra.data.video_tokens import VideoAudio, clips_in_order, read_media
from maxhydra.decode.request import Engine, Request

log = logging.getLogger("maxhydra")

# Length of an audio clip in a prompt.
MAX_CLIP_SECONDS = 600.0


class PromptError(ValueError):
    """A prompt that cannot be encoded; the message says why."""


class MediaPrompt(NamedTuple):
    """A prompt with the tokens of its images and audio clips."""

    prompt: list[int]
    images: np.ndarray | None
    """[images, *model.vision.image_shape], or None without images."""
    audio: Clips | None


class PromptEncoder:
    """Encodes prompts with the tokenizer and chat template of a run. Thread-safe."""

    def __init__(self, data: Data, *, vocab_size: int, vision: Vision | None = None, audio: Audio | None = None):
        self.data, self.vocab_size = data, vocab_size
        self.vision = None if vision is None or vision.num_layers is None else vision
        """Images that the model takes; None: none."""
        self.audio = None if audio is None or audio.num_layers is None else audio
        """Audio that the model takes; None: none."""
        self.tokenizer = load_tokenizer(data)
        with_clips: Any = ClipTokenizer(self.tokenizer, self.audio) if self.audio else self.tokenizer
        self._chat_tokenizer = ImageTokenizer(with_clips, self.vision) if self.vision else with_clips
        if self.tokenizer.vocab_size > vocab_size:
            reason = (
                f"is smaller than the {self.tokenizer.vocab_size} tokens of data.tokenizer.kind={data.tokenizer.kind}"
            )
            accepted = f"{self.tokenizer.vocab_size} or more; use the vocabulary size of the weights"
            raise ConfigError(Problem("model.vocab_size", reason, value=vocab_size, accepted=accepted))
        bos = self.tokenizer.bos if data.tokenizer.add_bos else None
        self._bos = [] if bos is None else [bos]
        self._names = {id: name for name, id in self.tokenizer.special_token_ids.items()}

    @property
    def has_template(self) -> bool:
        return self.tokenizer.chat_template is not None

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template; ConfigError if the tokenizer has none."""
        return compile_chat_template(self.tokenizer)

    def encode_text(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Encode plain text, with a BOS token if data.tokenizer.add_bos is set.

        A text that cannot fit into `max_tokens` is rejected without tokenizing it.
        """
        if not text:
            raise PromptError("the prompt is empty")
        _reject_surrogates(text)
        self._check_length(text, max_tokens)
        return [*self._bos, *self.tokenizer.encode(text)]

    def encode_and_count(self, text: str) -> tuple[list[int], np.ndarray]:
        """Encode plain text as `encode_text` does; also return the bytes of the text that each token stands for."""
        ids = self.encode_text(text)
        return ids, count_token_bytes(self.tokenizer, np.array(ids, np.int64), len(text.encode()))

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Tools = None, max_tokens: int | None = None
    ) -> list[int]:
        """Encode a conversation up to the beginning of the next assistant turn; `max_tokens` as for `encode_text`.

        An image is one placeholder, which `insert_images` replaces.
        """
        for message in messages:
            _reject_surrogates(str(message.get("content")))
        try:
            text = self.template.prompt(messages, tools=tools or None)
        except ChatTemplateError as error:
            raise PromptError(str(error)) from None
        self._check_length(text, max_tokens)
        ids: list[int] = self._chat_tokenizer.encode_with_special_tokens(text)[0].tolist()
        return ids

    def read_images(self, images: Sequence[Any]) -> list[ProcessedImage]:
        """Images of paths or data URLs, and videos {"video": path or data URL}."""
        if not images:
            return []
        if self.vision is None:
            raise PromptError("the model takes no images: choose one with model.vision")
        try:
            audio = None if self.audio is None else VideoAudio(self.audio, MAX_CLIP_SECONDS)
            return read_media(images, self.vision, self.tokenizer.encode, audio)
        except MediaError as error:
            raise PromptError(str(error)) from None

    def insert_images(self, prompt: list[int], images: Sequence[ProcessedImage]) -> tuple[list[int], np.ndarray | None]:
        """The prompt with the tokens of its images, and the images [count, *image_shape]; None without any."""
        if self.vision is None or not images:
            return prompt, None
        try:
            ids, _ = insert_images(np.array(prompt, np.int32), images, self.vision)
        except MediaError as error:
            raise PromptError(str(error)) from None
        return ids.tolist(), join_pixels(images)

    def read_audio(self, clips: Sequence[Any]) -> list[np.ndarray]:
        """Frames of clips, which are paths or data URLs."""
        if not clips:
            return []
        if self.audio is None:
            raise PromptError("the model takes no audio: choose one with model.audio")
        try:
            return [clip_frames(clip, self.audio, max_seconds=MAX_CLIP_SECONDS) for clip in clips]
        except MediaError as error:
            raise PromptError(str(error)) from None

    def with_audio_tokens(self, prompt: Sequence[int], clips: Sequence[np.ndarray]) -> list[int]:
        """The prompt with as many placeholders as each of its clips has tokens."""
        if self.audio is None or not clips:
            return list(prompt)
        ids = np.array(prompt)
        try:
            repeated: list[int] = np.repeat(ids, placeholder_counts(ids, [*map(len, clips)], self.audio)).tolist()
        except MediaError as error:
            raise PromptError(str(error)) from None
        return repeated

    def insert_media(self, prompt: list[int], *, images: Sequence[Any], audios: Sequence[Any]) -> MediaPrompt:
        """Read images and audio clips, which are paths or data URLs, and insert their tokens into the prompt."""
        visual, clips = self.read_images(images), self.read_audio(audios)
        all_clips = clips_in_order(np.array(prompt), visual, clips, vision=self.vision, audio=self.audio)
        prompt, pixels = self.insert_images(self.with_audio_tokens(prompt, clips), visual)
        shape = (max(map(len, all_clips), default=0), 0 if self.audio is None else self.audio.num_bands)
        return MediaPrompt(
            prompt, pixels, stack_clips(all_clips, count=len(all_clips), shape=shape) if all_clips else None
        )

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        longest = self.tokenizer.max_token_bytes
        if max_tokens is not None and longest is not None and len(text) > max_tokens * longest:
            raise PromptError(
                f"the prompt has {len(text)} characters, more than fit into {max_tokens} tokens: shorten it, or raise "
                "task.engine.max_context"
            )

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """EOS, and the token with which the chat template ends a turn, which differs from EOS in many models."""
        ids = set() if self.tokenizer.eos is None else {self.tokenizer.eos}
        if self.has_template:
            try:
                rendered = self.template.render(
                    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
                )
                turn = rendered.text[slice(*rendered.turns[-1])] if rendered.turns else ""
                last = self.tokenizer.encode_with_special_tokens(turn)[0][-1:]
                ids |= {int(id) for id in last if int(id) in self.tokenizer.special}
            except ChatTemplateError as error:
                log.warning("the end of a turn is unknown, so only EOS ends a completion: %s", error)
            ids |= self._end_of_call()
        return frozenset(ids)

    def _end_of_call(self) -> set[int]:
        """The token that ends a turn with a tool call, which differs from the usual one in some templates."""
        mark = secrets.token_hex(16)
        function = {"name": "f", "arguments": {"x": mark}}
        call = {"role": "assistant", "content": mark, "tool_calls": [{"id": "call00000", "function": function}]}
        try:
            text = self.template.prompt([{"role": "user", "content": "a"}, call], add_generation_prompt=False)
        except ChatTemplateError:
            return set()  # a template without tools
        pattern = special_token_pattern(self.tokenizer.special_token_ids)
        specials = pattern.findall(text.rpartition(mark)[2]) if mark in text and pattern else []
        return {self.tokenizer.special_token_ids[name] for name in specials[-1:]}

    def text_with_names(self, ids: Sequence[int]) -> str:
        """Decode ids, with the names of special tokens."""
        groups = itertools.groupby(ids, key=lambda id: id in self._names)
        texts = (
            "".join(self._names[id] for id in group) if is_special else self.tokenizer.decode(list(group))
            for is_special, group in groups
        )
        return "".join(texts)

    def token_text(self, id: int) -> str:
        """Return a single token as text, or the name of a special token."""
        return self._names.get(id) or self.tokenizer.decode([id])


def _reject_surrogates(text: str) -> None:
    """Reject lone surrogates, which JSON can contain and UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"the prompt has an unpaired surrogate at position {error.start}") from None


# Seeds fit into int32, which every device supports.
NUM_SEEDS = 2**31
# Longer stop strings would make the engine hold back too much text.
MAX_STOP_LENGTH, MAX_STOPS = 1000, 64


class SettingError(ValueError):
    """An invalid sampling parameter of one prompt: its name, the reason, and the accepted values."""

    def __init__(self, name: str, reason: str, accepted: str = ""):
        self.name, self.reason, self.accepted = name, reason, accepted
        super().__init__(f"{name} {reason}" + (f"; accepted: {accepted}" if accepted else ""))


def with_overrides(sampling: Sampling, changes: Mapping[str, Any]) -> Sampling:
    """Replace some parameters by JSON values; SettingError names the first invalid one."""
    known = fields(Sampling)
    stop = changes.get("stop")
    # The number of strings first: a client may send a million.
    if isinstance(stop, list) and len(stop) > MAX_STOPS:
        raise SettingError("stop", f"has {len(stop)} strings", f"at most {MAX_STOPS}")
    for name, value in changes.items():
        if name not in known:
            hint = did_you_mean(name, known)
            reason = "is not a sampling parameter" + (f"; {hint}" if hint else "")
            raise SettingError(name, reason, "" if hint else ", ".join(known))
        spec = known[name].spec
        if reason := _mismatch(spec, value):
            raise SettingError(name, reason, spec.accepted)
    changed = dataclasses.replace(sampling, **changes)
    if "" in changed.stop:
        raise SettingError("stop", "contains an empty string", "non-empty strings")
    if any(len(text) > MAX_STOP_LENGTH for text in changed.stop):
        raise SettingError("stop", "has a string that is too long", f"at most {MAX_STOP_LENGTH} characters each")
    return changed


def make_requests(
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    samples: int,
    seed: int,
    number: int,
    logprobs: int | None,
    **others: Any,
) -> list[Request]:
    """Make one request per sample of a prompt; `others`: further fields of the requests.

    sampling.seed is the seed of the first sample, and the others count up from it. Without it, the seed is derived from
    the run's `seed` and the `number` of the prompt, so that a prompt gets the same completions whatever else is
    decoded, in whatever order, and however often the run was interrupted.
    """
    first = derive_seed(seed, number) if sampling.seed is None else sampling.seed
    return [
        Request(
            prompt=tuple(prompt),
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            seed=(first + sample) % NUM_SEEDS,
            stop=tuple(sampling.stop),
            ignore_eos=sampling.ignore_eos,
            logprobs=logprobs,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            **others,
        )
        for sample in range(samples)
    ]


def derive_seed(seed: int, number: int) -> int:
    """Return the seed of prompt `number`. Hashed: seed + number would give run 1 the seeds of run 0, shifted by one."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % NUM_SEEDS


def _mismatch(spec: FieldType, value: Any) -> str:
    """Return why a JSON value is invalid, or "". Stricter than the command line, where every value starts as text."""
    if value is None:
        return "" if spec.optional else "is null"
    if spec.type is list:
        assert spec.item is not None
        if not isinstance(value, list):
            return "is not a list"
        return next((f"contains an item that {reason}" for item in value if (reason := _mismatch(spec.item, item))), "")
    kinds: dict[type, tuple[type, ...]] = {float: (int, float), int: (int,), bool: (bool,), str: (str,)}
    if not isinstance(value, kinds[spec.type]) or (isinstance(value, bool) and spec.type is not bool):
        return f"has the wrong type {type(value).__name__}"
    # Integers beyond the range of floats cannot be compared with float bounds.
    if isinstance(value, int) and abs(value) >= 2**63:
        return "is out of range"
    if isinstance(value, float) and not math.isfinite(value):
        return "is not a finite number"
    # Not `mismatch`, which converts text first, and takes ten times as long.
    return spec.number_mismatch(value)


Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class PromptClient:
    """An engine, its prompt encoder and the settings of task=decode; `seed` is run.seed."""

    engine: Engine
    prompts: PromptEncoder
    task: DecodeTask
    seed: int

    @property
    def is_chat(self) -> bool:
        return is_chat(self.task, self.prompts)

    def initial_messages(self) -> list[Message]:
        return [] if self.task.system is None else [{"role": "system", "content": self.task.system}]

    def encode(self, prompt: str) -> list[int]:
        """Encode a prompt: as a user message in a chat, otherwise as plain text."""
        if not self.is_chat:
            return self.prompts.encode_text(prompt)
        content = MARKER * len(self.task.visual_media) + CLIP_MARKER * len(self.task.audios) + prompt
        return self.prompts.encode_messages([*self.initial_messages(), {"role": "user", "content": content}])

    def encode_messages(self, messages: Sequence[Message]) -> list[int]:
        """Encode a conversation, with task.system unless it has a system message."""
        has_system = bool(messages) and messages[0].get("role") == "system"
        return self.prompts.encode_messages(messages if has_system else [*self.initial_messages(), *messages])

    def requests(self, prompt: Sequence[int], sampling: Sampling, *, number: int) -> list[Request]:
        """Make task.samples requests for the prompt; `number` is its index in the run."""
        task = self.task
        return make_requests(
            prompt, sampling, samples=task.samples, seed=self.seed, number=number, logprobs=task.logprobs
        )


def is_chat(task: DecodeTask, prompts: PromptEncoder) -> bool:
    """Return True if prompts are chat messages; ConfigError if that is required and the tokenizer has no template."""
    if task.chat is Chat.on:
        assert prompts.template
    elif task.system is not None and not prompts.has_template:
        hint = "set data.tokenizer.chat_template to a template file, or remove task.system"
        reason = "requires a chat template, and the tokenizer has none"
        raise ConfigError(Problem("task.system", reason, value=task.system, hint=hint))
    return task.chat is Chat.on or (task.chat is Chat.auto and prompts.has_template)
