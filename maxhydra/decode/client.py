"""Turns prompts into engine requests according to task=decode: chat template, sampling parameters and seeds."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.decode import Sampling
from maxhydra.config.schema.tasks.decode import Chat, DecodeTask
from maxhydra.decode.prompts import PromptEncoder
from maxhydra.decode.request import Engine, Request
from maxhydra.decode.sampling_params import make_requests

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
