"""Builds engine requests from sampling parameters and a prompt, for the CLI, files, the server and RL alike.

`PromptClient` does so according to task=decode: chat template, sampling parameters and seeds.
"""

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.config.errors import did_you_mean
from maxhydra.config.fields import FieldType, fields
from maxhydra.config.schema.decode import Sampling
from maxhydra.config.schema.tasks.inference import Chat, DecodeTask
from maxhydra.decode.prompts import PromptEncoder
from maxhydra.decode.request import Engine, Request

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
            raise SettingError(name, "is not a sampling parameter", did_you_mean(name, known) or ", ".join(known))
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
    prompt: Sequence[int], sampling: Sampling, *, samples: int, seed: int, number: int, logprobs: int | None
) -> list[Request]:
    """Make one request per sample of a prompt.

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
    return spec.mismatch(value)


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
        return self.prompts.encode_messages([*self.initial_messages(), {"role": "user", "content": prompt}])

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
