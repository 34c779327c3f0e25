"""Fields of task=decode."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import option, schema, section
from maxhydra.config.errors import Problem
from maxhydra.config.schema.decode import Engine, Sampling
from maxhydra.config.schema.model import Model
from maxhydra.config.schema.run import Progress, Task


class Chat(Enum):
    auto = "auto"
    on = "on"
    off = "off"


@schema
class DecodeTask(Task):
    """Generates completions for one prompt or a file of prompts; without either, a chat at the terminal."""

    prompt: str | None = None
    """Prompt to complete; with a chat template, the user message to reply to."""
    input: str | None = None
    """JSON Lines file of prompts; each record has `prompt` or `messages`, and optionally `id` and `sampling` (overrides
    of task.sampling for this record)."""
    output: str | None = None
    """JSON Lines file to which completions of task.input are appended as they finish; the same command resumes."""
    samples: int = option(1, ge=1)
    """Completions per prompt, each with a different seed."""
    chat: Chat = Chat.auto
    """on: a prompt is a user message, formatted with the tokenizer's chat template; off: a prompt is plain text; auto:
    on if the tokenizer has a template."""
    system: str | None = None
    """System message of a chat. null: none."""
    logprobs: int | None = option(None, ge=0, le=20)
    """task.output: write each token's log-probability and those of the n most likely tokens. null: write neither."""
    progress: Progress = Progress.auto
    """task.input: bar, lines or none; auto: a bar on a terminal, otherwise lines."""
    sampling: Sampling = section(Sampling)
    engine: Engine = section(Engine)

    def check(self) -> Iterator[Problem]:
        if self.prompt is not None and self.input is not None:
            reason = "cannot be combined with task.input"
            yield Problem("prompt", reason, value=self.prompt, hint="remove one of the two")
        if (self.input is None) != (self.output is None):
            given, absent = ("input", "output") if self.output is None else ("output", "input")
            reason = f"is required with task.{given}={getattr(self, given)}"
            yield Problem(absent, reason, value=None, accepted="a JSON Lines file")
        if self.logprobs is not None and self.output is None:
            reason = "is only written to task.output, which is not set"
            yield Problem("logprobs", reason, value=self.logprobs, accepted="null")
        if self.samples > 1 and self.prompt is None and self.input is None:
            reason = "is not supported in a terminal chat"
            yield Problem("samples", reason, value=self.samples, accepted="1", hint="set task.prompt or task.input")
        if self.system is not None and self.chat is Chat.off:
            yield Problem("system", "has no effect with chat=off", value=self.system, accepted="null")
        if self.prompt == "":
            yield Problem("prompt", "is empty", value="", accepted="at least one character")
        if "" in self.sampling.stop:
            yield Problem("sampling.stop", "contains an empty string", value=self.sampling.stop)

    def check_model(self, model: Model) -> Iterator[Problem]:
        yield from self.engine.check_model(model)
