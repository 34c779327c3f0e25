"""What can be tried: values for each setting, and the config that a choice of them gives."""

import dataclasses
import math
from collections.abc import Iterable, Iterator

from hydra.core.override_parser.types import Override

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.compose.overrides import parse, values
from maxhydra.config.schema.hardware import Hardware
from maxhydra.config.schema.model import FeedForward, Mixer, RematPolicy
from maxhydra.config.schema.tasks.tune import Batch, Search, TuneTask
from maxhydra.config.serialize import with_overrides
from maxhydra.kernels import attention, grouped_matmul
from maxhydra.runtime.flags import replaced_flags
from maxhydra.tune.tiles import tiles

# Key -> override, such as `train.loss_chunk=1024`; what is not among them stays as it is.
Candidate = dict[str, str]
BATCH, ACCUMULATION = "train.per_device_batch_size", "train.grad_accum"
REMAT, UNROLL, CHUNK, FLAGS = "model.remat.policy", "model.scan_unroll", "train.loss_chunk", "hardware.xla_flags"
# From fast to frugal.
POLICIES = (RematPolicy.none, RematPolicy.minimal, RematPolicy.full)
CHUNKS = (0, 2048, 1024)
# How often a batch is halved at most.
HALVES = 3


@dataclasses.dataclass(frozen=True)
class Axis:
    """A setting and what it can be, as overrides; those that need the least memory come last."""

    key: str
    values: tuple[str, ...]
    under: Candidate = dataclasses.field(default_factory=dict)
    """What it is a part of, and falls with."""


def axes(config: Config, task: TuneTask, hardware: Hardware) -> list[Axis]:
    """The settings to try; ConfigError where one that was asked for cannot be."""
    if not task.space:
        return [axis for axis in _default(config, task, hardware) if len(axis.values) > 1 or axis.under]
    parsed = parse(task.space, loader=None)
    problems = [dataclasses.replace(problem, path=f"task.space {problem.path}") for problem in parsed.problems]
    found = [Axis(o.key_or_group, _overrides(o.key_or_group, _values(o))) for o in parsed.overrides if _is_plain(o)]
    wrong = [o.input_line for o in parsed.overrides if not _is_plain(o)]
    problems += [Problem("task.space", f"{line} sets no value", accepted="key=value,value,...") for line in wrong]
    for axis in found:
        for override in axis.values:
            try:
                settled(config, {axis.key: override}, task.batch)
            except ConfigError as error:
                problems += [_seen_from_here(problem, override) for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return found


def settled(config: Config, candidate: Candidate, batch: Batch) -> Config:
    """The config with a candidate's values, checked as any other, and with the gradient accumulation that its batch
    then needs."""
    sequences = config.train.per_device_batch_size * config.train.grad_accum
    overrides = list(candidate.values())
    is_kept = batch is Batch.same and BATCH in candidate
    if is_kept and ACCUMULATION not in candidate:
        overrides += _accumulation(candidate[BATCH], sequences)
    train = (made := with_overrides(config, overrides)).train
    if is_kept and train.per_device_batch_size * train.grad_accum != sequences:
        reason = f"does not divide the {sequences:g} sequences a device of a step, which task.batch=same keeps"
        hint = "task.batch=any lets steps differ"
        raise ConfigError(Problem(BATCH, reason, value=train.per_device_batch_size, hint=hint))
    return made


def _accumulation(override: str, sequences: float) -> list[str]:
    """Passes that make up the sequences; none where the size is no number that divides them, which others refuse."""
    size = parse([override], loader=None).overrides[0].value()
    if not isinstance(size, (int, float)) or size <= 0 or sequences % size:
        return []
    return [f"{ACCUMULATION}={int(sequences // size)}"]


def _is_plain(override: Override) -> bool:
    return not override.is_delete() and not override.is_add() and "/" not in override.key_or_group


def _values(override: Override) -> list[str]:
    return values(override) if override.is_sweep_override() else [str(override.get_value_string())]


def _seen_from_here(problem: Problem, override: str) -> Problem:
    return dataclasses.replace(problem, reason=f"{problem.reason} (task.space: {override})", source="")


def _overrides(key: str, found: Iterable[object]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"{key}={value}" for value in found))


def _default(config: Config, task: TuneTask, hardware: Hardware) -> Iterator[Axis]:
    model, train = config.model, config.train
    if model.remat.policy is not RematPolicy.custom:
        yield Axis(REMAT, _overrides(REMAT, (policy.value for policy in POLICIES)))
    yield Axis(BATCH, _overrides(BATCH, _batches(config, task.batch)))
    chunks = [n for n in CHUNKS if n == 0 or (n < train.seq_len and train.seq_len % n == 0)]
    yield Axis(CHUNK, _overrides(CHUNK, chunks))
    repeats = math.ceil((model.num_layers - len(model.prefix)) / max(1, len(model.pattern)))
    yield Axis(UNROLL, _overrides(UNROLL, (max(1, repeats), 1)))
    sets = [replaced_flags(hardware.xla_flags, flags) for flags in hardware.flag_sets.values()]
    yield Axis(FLAGS, _overrides(FLAGS, map(_listed, (config.hardware.xla_flags, *sets))))
    yield from _backends(config, hardware)
    # All combinations of tiles would be more than anybody waits for.
    if task.search is Search.one_by_one:
        for backend, key, sizes in tiles(config, hardware):
            yield Axis(key, _overrides(key, sizes), under={backend.partition("=")[0]: backend})


def _batches(config: Config, batch: Batch) -> list[str]:
    """Largest first. One that is kept is divided among passes; else it may double too."""
    own, sequences = config.train.per_device_batch_size, config.train.per_device_batch_size * config.train.grad_accum
    if batch is Batch.any:
        sizes = [2 * own, *(own / 2**n for n in range(HALVES))]
    else:
        sizes = [own, *(sequences / 2**n for n in range(HALVES + 1))]
    whole = {size for size in sizes if size == own or size == int(size)}
    return [f"{size:g}" for size in sorted(whole, reverse=True)]


def _backends(config: Config, hardware: Hardware) -> Iterator[Axis]:
    """Of operations that the model calls: what `auto` takes, and every backend that runs on the platform."""
    used = [config.model.kinds[name] for name in {*config.model.prefix, *config.model.pattern}]
    tables: dict[str, Iterable[tuple[str, tuple[str, ...]]]] = {}
    if any(kind.mixer is not Mixer.delta for kind in used):
        tables["attention"] = [(name, row.platforms) for name, row in attention.BACKENDS.items()]
    if any(kind.feed_forward is FeedForward.moe for kind in used):
        tables["grouped_matmul"] = [(name, row.platforms) for name, row in grouped_matmul.BACKENDS.items()]
    for operation, rows in tables.items():
        key = f"model.kernels.{operation}"
        able = [name for name, platforms in rows if hardware.platform.value in platforms and name != "reference"]
        # Where there is but one, it is what auto takes.
        if len(able) > 1:
            yield Axis(key, _overrides(key, ("auto", *able)))


def _listed(flags: list[str]) -> str:
    return "[" + ",".join(f"'{flag}'" for flag in flags) + "]"
