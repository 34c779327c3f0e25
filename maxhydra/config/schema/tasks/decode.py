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
    """Answers one prompt, a file of prompts, or, without either, a person at the terminal."""

    prompt: str | None = None
    """Text to answer, or to go on from."""
    input: str | None = None
    """JSON Lines file; each record has `prompt` or `messages`, and may have `id` and `sampling` (keys of task.sampling
    for this record)."""
    output: str | None = None
    """JSON Lines file that the answers to task.input are added to as they finish; the same command goes on with it."""
    samples: int = option(1, ge=1)
    """Answers to each prompt, each with a seed of its own."""
    chat: Chat = Chat.auto
    """on: a prompt is what the user says, and the tokenizer's chat template is around it; off: a prompt is plain text;
    auto: on where there is a template."""
    system: str | None = None
    """What the system message says, in a chat. null: none."""
    logprobs: int | None = option(None, ge=0, le=20)
    """task.output: write each token's log-probability, and those of so many likeliest alternatives. null: neither."""
    progress: Progress = Progress.auto
    """task.input: bar, lines, none; auto shows a bar on a terminal and lines elsewhere."""
    sampling: Sampling = section(Sampling)
    engine: Engine = section(Engine)

    def check(self) -> Iterator[Problem]:
        if self.prompt is not None and self.input is not None:
            yield Problem("prompt", "is given beside task.input", value=self.prompt, hint="keep one of the two")
        if (self.input is None) != (self.output is None):
            given, absent = ("input", "output") if self.output is None else ("output", "input")
            reason = f"is needed by task.{given}={getattr(self, given)}"
            yield Problem(absent, reason, value=None, accepted="a JSON Lines file")
        if self.logprobs is not None and self.output is None:
            yield Problem("logprobs", "is written to task.output alone", value=self.logprobs, accepted="null")
        if self.samples > 1 and self.prompt is None and self.input is None:
            reason = "has no use in a chat at the terminal"
            yield Problem("samples", reason, value=self.samples, accepted="1", hint="give task.prompt or task.input")
        if self.system is not None and self.chat is Chat.off:
            yield Problem("system", "is not used by chat=off", value=self.system, accepted="null")
        if self.prompt == "":
            yield Problem("prompt", "is empty", value="", accepted="a character or more")
        if "" in self.sampling.stop:
            yield Problem("sampling.stop", "holds an empty text", value=self.sampling.stop)

    def check_model(self, model: Model) -> Iterator[Problem]:
        yield from self.engine.check_model(model)
