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


# Engine keys that are derived from the load.
DERIVED = ("max_batch", "cache_tokens", "max_context")


@schema
class Load(Schema):
    """decode: batch sizes, and lengths of prompts and completions."""

    batches: list[int] = option([1, 8, 32], ge=1)
    """Numbers of concurrent prompts; one measurement each."""
    prompt: int = option(64, ge=1)
    """Tokens per prompt."""
    new: int = option(64, ge=2)
    """Tokens per completion."""
    repeats: int = option(3, ge=1)
    """Repetitions of each measurement; the best counts."""


@schema
class BenchTask(Task):
    """Measures speed and memory of the config on this machine; one JSON line per measurement in bench.jsonl."""

    what: list[Measured] = option([Measured.pretrain])
    """pretrain: the training step, with fresh weights; decode: the engine, with fresh weights unless
    checkpoint.load_parameters is set; kernels: every supported backend of the kernels in the training forward pass,
    with values and gradients compared to the reference."""
    steps: int = option(20, ge=1)
    """pretrain: timed steps."""
    warm_up: int = option(3, ge=1)
    """pretrain: warm-up steps."""
    load: Load = section(Load)
    engine: Engine = section(Engine)

    def check(self) -> Iterator[Problem]:
        if not self.what:
            yield Problem("what", "is empty", value=[], accepted=", ".join(kind.value for kind in Measured))
        defaults = {field.name: field.default for field in dataclasses.fields(Engine)}
        for name in DERIVED:
            value, default = getattr(self.engine, name), defaults[name]
            if value != default:
                hint = "it is derived from task.load"
                yield Problem(f"engine.{name}", "is not used", value=value, accepted=show(default), hint=hint)
        if not self.load.batches:
            yield Problem("load.batches", "is empty", value=[], accepted="numbers of prompts")

    def check_model(self, model: Model) -> Iterator[Problem]:
        if Measured.decode in self.what:
            yield from self.engine.check_model(model)
            if (length := self.load.prompt + self.load.new) > model.context_length:
                reason = f"plus load.new is {length} tokens, more than model.context_length={model.context_length}"
                yield Problem("load.prompt", reason, value=self.load.prompt)
