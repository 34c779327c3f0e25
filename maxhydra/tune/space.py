"""The search space: the values of each setting, tile sizes included, and the config that a candidate gives."""

import dataclasses
import logging
import math
from collections.abc import Iterable, Iterator

from hydra.core.override_parser.types import Override

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.compose.overrides import parse, values
from maxhydra.config.schema.hardware import Hardware, Platform
from maxhydra.config.schema.model import FeedForward, Mixer, Norm, RematPolicy
from maxhydra.config.schema.tasks.analysis import Batch, Search, TuneTask
from maxhydra.config.serialize import with_overrides
from maxhydra.kernels import attention, grouped_matmul
from maxhydra.kernels.attention import mosaic, triton
from maxhydra.kernels.grouped_matmul import triton as grouped_matmul_triton
from maxhydra.kernels.linear_cross_entropy import triton as linear_cross_entropy
from maxhydra.kernels.qkv_rope import triton as qkv_rope
from maxhydra.kernels.rms_norm import triton as rms_norm
from maxhydra.layers.attention import AttentionSpec
from maxhydra.runtime.flags import override_flags

log = logging.getLogger("maxhydra")

# Kernel of an operation (empty if it has only one) -> tile sizes by name.
TileOptions = dict[str, list[dict[str, int]]]


def tiles(config: Config, hardware: Hardware) -> Iterator[tuple[str, str, list[str]]]:
    """For each tunable kernel: the override that chooses its backend, the key of its tile, and the values to try."""
    if hardware.platform is not Platform.gpu:
        log.info("not tuning tiles: no kernel on %s has configurable tiles", hardware.platform.value)
        return
    for backend, operation, kernels in _tile_options(config):
        for kernel, options in kernels.items():
            key = ".".join(filter(None, ("model.kernels.tiles", backend, operation, kernel)))
            values = ["{" + ",".join(f"{name}:{size}" for name, size in sizes.items()) + "}" for sizes in options]
            if values:
                yield f"model.kernels.{operation}={backend}", key, values


def _tile_options(config: Config) -> Iterator[tuple[str, str, TileOptions]]:
    """Backend, operation and tile sizes for the rows of one sequence, which divide the rows of any batch."""
    model, length = config.model, config.train.seq_len
    used = [model.kinds[name] for name in dict.fromkeys((*model.prefix, *model.pattern))]
    mixers = [AttentionSpec.of(model, kind) for kind in used if kind.mixer is Mixer.attention]
    if mixers:
        # Tiles that fit in registers for the largest heads fit for all.
        head_dim = max(mixer.head_dim for mixer in mixers)
        yield "mosaic", "attention", mosaic.candidate_tiles(head_dim, length)
        yield "triton", "attention", triton.candidate_tiles(head_dim, length)
    for moe in [kind.moe for kind in used if kind.feed_forward is FeedForward.moe][:1]:
        rows, width, dim = length * moe.top_k, moe.latent_dim or model.emb_dim, moe.dim or model.mlp_dim
        yield "triton", "grouped_matmul", grouped_matmul_triton.candidate_tiles(rows, width, dim)
    yield "triton", "linear_cross_entropy", linear_cross_entropy.candidate_tiles(model.vocab_size)
    if model.norm is not Norm.layer:
        yield "triton", "rms_norm", rms_norm.candidate_tiles(length)
    if any(mixer.uses_qkv_rope for mixer in mixers):
        yield "triton", "qkv_rope", qkv_rope.candidate_tiles(length)


# Key -> override, such as `train.loss_chunk=1024`; other settings are unchanged.
Candidate = dict[str, str]
BATCH, ACCUMULATION = "train.per_device_batch_size", "train.grad_accum"
REMAT, UNROLL, CHUNK, FLAGS = "model.remat.policy", "model.scan_unroll", "train.loss_chunk", "hardware.xla_flags"
# From fastest to least memory.
POLICIES = (RematPolicy.none, RematPolicy.minimal, RematPolicy.full)
CHUNKS = (0, 2048, 1024)
# Maximum number of times that a batch is halved.
MAX_HALVINGS = 3


@dataclasses.dataclass(frozen=True)
class Axis:
    """A setting and its values as overrides, ordered by decreasing memory."""

    key: str
    values: tuple[str, ...]
    under: Candidate = dataclasses.field(default_factory=dict)
    """The setting that it depends on, such as the backend of a tile; empty if none."""


def axes(config: Config, task: TuneTask, hardware: Hardware) -> list[Axis]:
    """The settings to try; ConfigError if one in task.space is invalid."""
    if not task.space:
        return [axis for axis in _default_space(config, task, hardware) if len(axis.values) > 1 or axis.under]
    parsed = parse(task.space, loader=None)
    problems = [dataclasses.replace(problem, path=f"task.space {problem.path}") for problem in parsed.problems]
    space = [Axis(o.key_or_group, _overrides(o.key_or_group, _values(o))) for o in parsed.overrides if _is_plain(o)]
    invalid = [o.input_line for o in parsed.overrides if not _is_plain(o)]
    problems += [Problem("task.space", f"{line} sets no value", accepted="key=value,value,...") for line in invalid]
    for axis in space:
        for override in axis.values:
            try:
                apply_candidate(config, {axis.key: override}, task.batch)
            except ConfigError as error:
                problems += [_in_task_space(problem, override) for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return space


def apply_candidate(config: Config, candidate: Candidate, batch: Batch) -> Config:
    """The validated config with a candidate's values, and the gradient accumulation that its batch size needs."""
    sequences = config.train.per_device_batch_size * config.train.grad_accum
    overrides = list(candidate.values())
    keeps_batch = batch is Batch.same and BATCH in candidate
    if keeps_batch and ACCUMULATION not in candidate:
        overrides += _accumulation(candidate[BATCH], sequences)
    changed = with_overrides(config, overrides)
    train = changed.train
    if keeps_batch and train.per_device_batch_size * train.grad_accum != sequences:
        reason = f"does not divide the {sequences:g} sequences per device and step, which task.batch=same preserves"
        hint = "set task.batch=any to allow other batch sizes"
        raise ConfigError(Problem(BATCH, reason, value=train.per_device_batch_size, hint=hint))
    return changed


def _accumulation(override: str, sequences: float) -> list[str]:
    """The grad_accum override that keeps the number of sequences; empty if the size is invalid (checked elsewhere)."""
    size = parse([override], loader=None).overrides[0].value()
    if not isinstance(size, (int, float)) or size <= 0 or sequences % size:
        return []
    return [f"{ACCUMULATION}={int(sequences // size)}"]


def _is_plain(override: Override) -> bool:
    return not override.is_delete() and not override.is_add() and "/" not in override.key_or_group


def _values(override: Override) -> list[str]:
    return values(override) if override.is_sweep_override() else [str(override.get_value_string())]


def _in_task_space(problem: Problem, override: str) -> Problem:
    return dataclasses.replace(problem, reason=f"{problem.reason} (task.space: {override})", source="")


def _overrides(key: str, options: Iterable[object]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"{key}={value}" for value in options))


def _default_space(config: Config, task: TuneTask, hardware: Hardware) -> Iterator[Axis]:
    model, train = config.model, config.train
    if model.remat.policy is not RematPolicy.custom:
        yield Axis(REMAT, _overrides(REMAT, (policy.value for policy in POLICIES)))
    yield Axis(BATCH, _overrides(BATCH, _batches(config, task.batch)))
    chunks = [n for n in CHUNKS if n == 0 or (n < train.seq_len and train.seq_len % n == 0)]
    yield Axis(CHUNK, _overrides(CHUNK, chunks))
    repeats = math.ceil((model.num_layers - len(model.prefix)) / max(1, len(model.pattern)))
    yield Axis(UNROLL, _overrides(UNROLL, (max(1, repeats), 1)))
    flag_sets = [override_flags(hardware.xla_flags, flags) for flags in hardware.flag_sets.values()]
    yield Axis(FLAGS, _overrides(FLAGS, map(_list_literal, (config.hardware.xla_flags, *flag_sets))))
    yield from _backends(config, hardware)
    # A grid over all combinations of tiles would take too long.
    if task.search is Search.one_by_one:
        for backend, key, sizes in tiles(config, hardware):
            yield Axis(key, _overrides(key, sizes), under={backend.partition("=")[0]: backend})


def _batches(config: Config, batch: Batch) -> list[str]:
    """Batch sizes, largest first: splits of the same global batch over passes, or with task.batch=any also doubled."""
    current, sequences = (
        config.train.per_device_batch_size,
        config.train.per_device_batch_size * config.train.grad_accum,
    )
    if batch is Batch.any:
        sizes = [2 * current, *(current / 2**n for n in range(MAX_HALVINGS))]
    else:
        sizes = [current, *(sequences / 2**n for n in range(MAX_HALVINGS + 1))]
    valid = {size for size in sizes if size == current or size == int(size)}
    return [f"{size:g}" for size in sorted(valid, reverse=True)]


def _backends(config: Config, hardware: Hardware) -> Iterator[Axis]:
    """For each operation that the model calls: `auto`, and every backend that runs on the platform."""
    used = [config.model.kinds[name] for name in {*config.model.prefix, *config.model.pattern}]
    tables: dict[str, Iterable[tuple[str, tuple[str, ...]]]] = {}
    if any(kind.mixer in (Mixer.attention, Mixer.mla) for kind in used):
        tables["attention"] = [(name, row.platforms) for name, row in attention.BACKENDS.items()]
    if any(kind.feed_forward is FeedForward.moe for kind in used):
        tables["grouped_matmul"] = [(name, row.platforms) for name, row in grouped_matmul.BACKENDS.items()]
    for operation, rows in tables.items():
        key = f"model.kernels.{operation}"
        backends = [name for name, platforms in rows if hardware.platform.value in platforms and name != "reference"]
        # A single backend is the one that auto chooses.
        if len(backends) > 1:
            yield Axis(key, _overrides(key, ("auto", *backends)))


def _list_literal(flags: list[str]) -> str:
    return "[" + ",".join(f"'{flag}'" for flag in flags) + "]"
