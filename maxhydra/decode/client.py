"""Asks the engine as task=decode is set up to: with or without a chat template, with its settings and seeds."""

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
    """An engine, the tokenizer before it, and the task's settings; `seed` is the run's."""

    engine: Engine
    prompts: PromptEncoder
    task: DecodeTask
    seed: int

    @property
    def is_chat(self) -> bool:
        return is_chat(self.task, self.prompts)

    def messages(self, said: str) -> list[Message]:
        """A conversation that the user begins."""
        return [*self.opening(), {"role": "user", "content": said}]

    def opening(self) -> list[Message]:
        return [] if self.task.system is None else [{"role": "system", "content": self.task.system}]

    def encode(self, prompt: str) -> list[int]:
        return self.prompts.of_messages(self.messages(prompt)) if self.is_chat else self.prompts.of_text(prompt)

    def encode_messages(self, messages: Sequence[Message]) -> list[int]:
        has_system = bool(messages) and messages[0].get("role") == "system"
        return self.prompts.of_messages(messages if has_system else [*self.opening(), *messages])

    def requests(self, prompt: Sequence[int], sampling: Sampling, *, number: int) -> list[Request]:
        """One for each of task.samples."""
        task = self.task
        return make_requests(
            prompt, sampling, samples=task.samples, seed=self.seed, number=number, logprobs=task.logprobs
        )


def is_chat(task: DecodeTask, prompts: PromptEncoder) -> bool:
    """Whether prompts are what a user says; ConfigError where they shall be and the tokenizer has no template."""
    if task.chat is Chat.on:
        assert prompts.template
    elif task.system is not None and not prompts.has_template:
        hint = "set data.tokenizer.chat_template to a file with one, or leave task.system out"
        reason = "needs a chat template, and the tokenizer has none"
        raise ConfigError(Problem("task.system", reason, value=task.system, hint=hint))
    return task.chat is Chat.on or (task.chat is Chat.auto and prompts.has_template)
