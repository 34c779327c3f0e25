"""Fields of task=bench."""

import dataclasses
from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Schema, option, schema, section
from maxhydra.config.errors import Problem, show
from maxhydra.config.schema.decode import Engine
from maxhydra.config.schema.model import Model
from maxhydra.config.schema.run import Task


class Measured(Enum):
    pretrain = "pretrain"
    decode = "decode"
    kernels = "kernels"


# Keys of the engine that follow from the load.
DERIVED = ("max_batch", "cache_tokens", "max_context")


@schema
class Load(Schema):
    """decode: how many prompts are answered at once, and how long they are."""

    batches: list[int] = option([1, 8, 32], ge=1)
    """Prompts asked at once, one measurement for each number."""
    prompt: int = option(64, ge=1)
    """Tokens of a prompt."""
    new: int = option(64, ge=2)
    """Tokens of an answer."""
    repeats: int = option(3, ge=1)
    """Times that each is measured; the best counts."""


@schema
class BenchTask(Task):
    """Measures what the config would do on this machine; a JSON line for each measurement, kept in bench.jsonl."""

    what: list[Measured] = option([Measured.pretrain])
    """pretrain: the training step, with fresh weights; decode: the engine, with fresh weights unless
    checkpoint.load_parameters names others; kernels: every backend that can serve the calls of the model's forward pass
    in training, its values and gradients held against the reference."""
    steps: int = option(20, ge=1)
    """pretrain: steps that are timed."""
    warm_up: int = option(3, ge=1)
    """pretrain: steps before them."""
    load: Load = section(Load)
    engine: Engine = section(Engine)

    def check(self) -> Iterator[Problem]:
        if not self.what:
            yield Problem("what", "is empty", value=[], accepted=", ".join(kind.value for kind in Measured))
        defaults = {field.name: field.default for field in dataclasses.fields(Engine)}
        for name in DERIVED:
            value, default = getattr(self.engine, name), defaults[name]
            if value != default:
                hint = "it follows from task.load"
                yield Problem(f"engine.{name}", "is not read", value=value, accepted=show(default), hint=hint)
        if not self.load.batches:
            yield Problem("load.batches", "is empty", value=[], accepted="numbers of prompts")

    def check_model(self, model: Model) -> Iterator[Problem]:
        if Measured.decode in self.what:
            yield from self.engine.check_model(model)
            if (length := self.load.prompt + self.load.new) > model.context_length:
                reason = f"and load.new make {length} tokens, over model.context_length={model.context_length}"
                yield Problem("load.prompt", reason, value=self.load.prompt)
