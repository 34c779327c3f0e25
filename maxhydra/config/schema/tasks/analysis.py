"""Fields of the tasks that measure or describe a config: task=bench, tune, inspect, plan and inspect_data."""

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
            yield from self.engine.check_one_group()
            if (length := self.load.prompt + self.load.new) > model.context_length:
                reason = f"plus load.new is {length} tokens, more than model.context_length={model.context_length}"
                yield Problem("load.prompt", reason, value=self.load.prompt)


class Search(Enum):
    one_by_one = "one_by_one"
    grid = "grid"


class Batch(Enum):
    same = "same"
    any = "any"


@schema
class TuneTask(Task):
    """Finds the settings with the highest training throughput and writes them as an experiment."""

    space: list[str] = option([])
    """Search space in sweep syntax: ['model.remat.policy=none,minimal','train.loss_chunk=0,1024'], values that need
    the least memory last. Empty: batch, remat policy, scan_unroll, loss_chunk, hardware.flag_sets, backends and, with
    one_by_one, tiles of their kernels, as model and hardware suggest."""
    batch: Batch = Batch.same
    """same: the global batch size is fixed, so a smaller train.per_device_batch_size comes with a larger
    train.grad_accum; any: it may change, which changes the training result."""
    search: Search = Search.one_by_one
    """one_by_one: coordinate descent, one setting at a time until none improves; grid: all combinations."""
    steps: int = option(5, ge=1)
    """Timed steps per candidate; each round among the finalists doubles them."""
    finalists: int = option(4, ge=1)
    """Best candidates that are timed again over more steps; each round keeps half of them."""
    minutes: float = option(30, gt=0)
    """Total time budget, including earlier sessions; a quarter is reserved for the finalists."""
    trial_minutes: float = option(5, gt=0)
    """Time limit per candidate, including compilation."""
    save_as: str | None = None
    """Name of the experiment that is also written to task.config_dir. null: only to the run's folder."""
    config_dir: str = "conf"
    """Your folder of options (--config-dir), to which experiment/<save_as>.yaml is written."""

    def check(self) -> Iterator[Problem]:
        if self.save_as is not None and (not self.save_as.strip() or "/" in self.save_as or self.save_as[0] == "."):
            yield Problem("save_as", "is not a name", value=self.save_as, accepted="letters, digits, - _ and .")


class Format(Enum):
    table = "table"
    json = "json"


@schema
class InspectTask(Task):
    """Shows parameters and memory of a model on devices that need not be present."""

    devices: int = option(1, ge=1)
    """Devices to plan for."""
    slices: int = option(1, ge=1)
    """Number of slices of these devices."""
    topology: str | None = None
    """Devices to compile the training step for, as in task=compile: v5e:2x4, h200:8. null: no compilation."""
    format: Format = Format.table
    """Output format."""

    def check(self) -> Iterator[Problem]:
        if self.topology is not None and self.devices != 1:
            reason = f"is already given by topology={self.topology}"
            yield Problem("devices", reason, value=self.devices, hint="set only one of the two")


@schema
class CompileTask(Task):
    """Compiles the training step for devices that need not be present."""

    topology: str | None = None
    """GPUs, such as h200:8 or h200:4x8 (4 hosts of 8; a100, h100, h200, b200), or a TPU slice, such as v5e:2x4. Needs
    the CUDA plugin of jax or libtpu, but no GPU or TPU. null: the CPU devices of this host."""
    slices: int = option(1, ge=1)
    """Number of slices of these devices."""
    segments: bool = True
    """Rows are packed from several documents, as those of data=grain are; those of data=demo are not."""
    output: str | None = None
    """New folder for the executable, which hardware.compiled loads. null: only the report."""
    format: Format = Format.table
    """Output format."""


@schema
class PlanTask(Task):
    """Estimates memory, traffic and step time on devices that need not be present, and searches for the best mesh."""

    devices: int = option(8, ge=1, le=65536)
    """Devices to plan for."""
    slices: int = option(1, ge=1)
    """Number of slices of these devices."""
    search: bool = False
    """Search mesh, remat policy, batch and gradient accumulation for this number of devices."""
    batch_tokens: int = option(16_777_216, ge=1)
    """search: largest number of tokens per optimizer step."""
    results: int = option(5, ge=1)
    """search: number of best setups to print."""
    memory_share: float = option(0.92, gt=0, le=1)
    """Share of the device memory that a setup may use; the rest is left to the allocator and to communication."""
    format: Format = Format.table
    """Output format."""


@schema
class InspectDataTask(Task):
    """Shows the sequences that a model would be trained on."""

    rows: int = option(2, ge=0)
    """Sequences to print."""
    batches: int = option(20, ge=1)
    """Batches for statistics and the speed measurement."""
    format: Format = Format.table
    """Output format."""
