"""Compilation of the training step: ahead of time and for a ramped batch size."""

import functools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jax.experimental.compilation_cache import compilation_cache

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.run import Train
from maxhydra.model import split_trainable
from maxhydra.sharding import Sharder
from maxhydra.train.batches import plan_batches
from maxhydra.train.diloco import make_diloco_step
from maxhydra.train.executable import load_executable
from maxhydra.train.loss import Batch, LossFn
from maxhydra.train.objective import training_loss
from maxhydra.train.state import StateFactory, TrainState, plan_states
from maxhydra.train.step import Metrics, StepFn, make_step, sequences_in

log = logging.getLogger("maxhydra")
# Kinds of train.checks: indices out of bounds, NaN results, divisions by zero.
CHECKS = {"index": checkify.index_checks, "nan": checkify.nan_checks, "div": checkify.div_checks}
HEADROOM_BYTES = 64 * 2**20
COLUMNS = {"tokens": "int32", "targets": "int32", "positions": "int32", "segments": "int32", "weights": "float32"}


def compile_step(
    states: StateFactory, loss: LossFn, train: Train, example: Mapping[str, Any], *, has_statistics: bool = False
) -> tuple[StepFn, float]:
    """The step compiled for batches like `example`, and the seconds that took. It donates its state."""
    start_time = time.perf_counter()
    traced = trace_step(states, loss, train, example, has_statistics=has_statistics, checks=train.checks)
    compiled = traced.lower().compile()
    return CheckedStep(compiled) if train.checks else compiled, time.perf_counter() - start_time


class CompiledSteps(NamedTuple):
    """The programs of a session."""

    usual: StepFn
    with_statistics: StepFn | None
    """The step that also returns statistics of the layers; None if they are not recorded."""
    seconds: float
    """Time that they took to compile."""
    for_profile: Callable[[], StepFn]
    """Returns the step whose kernels a profiler can attribute to operations of the program."""


def obtain_steps(
    states: StateFactory, loss: LossFn, config: Config, example: Mapping[str, Any], *, dump: Path | None = None
) -> CompiledSteps:
    """The step of hardware.compiled, or compiled now and described in the folder `dump`, and that with statistics."""
    start_time = time.perf_counter()
    checks = config.train.checks
    traced = trace_step(states, loss, config.train, example, checks=checks)
    if config.hardware.compiled is None:
        step = traced.lower().compile()
    else:
        step = load_executable(config.hardware.compiled, traced, states.sharder)
    with_statistics = None
    if config.statistics.every is not None:
        with_statistics, _ = compile_step(states, loss, config.train, example, has_statistics=True)
    seconds = time.perf_counter() - start_time
    if dump is not None:
        _dump_step(dump, traced, step)
    usual = CheckedStep(step) if checks else step
    is_attributable = states.sharder.platform != "gpu" or checks or config.hardware.compiled is not None
    for_profile = (
        (lambda: usual) if is_attributable else functools.cache(functools.partial(_compile_for_profile, traced, usual))
    )
    return CompiledSteps(usual, with_statistics, seconds, for_profile)


def _compile_for_profile(traced: jax.stages.Traced, usual: StepFn) -> StepFn:
    """The step without command buffers, which launch many kernels as one operation.

    The processes of a cluster compile together, but not all of them profile, so they use the usual step.
    """
    if jax.process_count() > 1:
        return usual
    log.info("compiling the step without command buffers, for the profile")
    return traced.lower().compile(compiler_options={"xla_gpu_enable_command_buffer": ""})


def _dump_step(folder: Path, traced: jax.stages.Traced, compiled: jax.stages.Compiled) -> None:
    """Write the step at each stage of its compilation."""
    folder.mkdir(parents=True, exist_ok=True)
    stats = compiled.memory_analysis()
    memory = {name: getattr(stats, name) for name in dir(stats) if name.endswith("_in_bytes")}
    texts = {
        "step.jaxpr.txt": str(traced.jaxpr),
        "step.stablehlo.mlir": traced.lower().as_text(),
        "step.hlo.txt": compiled.as_text() or "",
        "memory.json": json.dumps(memory, indent=1) + "\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    log.info("jaxpr, StableHLO, HLO and memory of the training step: %s", folder)


class StepCheckError(RuntimeError):
    """An operation of a training step failed one of `train.checks`."""


class CheckedStep:
    """A compiled step with checks, as a step that raises StepCheckError; the host waits for every step."""

    def __init__(self, compiled: Callable[..., Any]):
        self._compiled = compiled

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        error, (state, metrics) = self._compiled(state, batch)
        if (found := error.get_exception()) is not None:
            raise StepCheckError(f"{str(found).rstrip(' .')}, in {_source_line(found.traceback_info)}")
        return state, metrics


def add_checks(step: StepFn, checks: Sequence[str]) -> Callable[..., Any]:
    """The step as a function that also returns the first failed check (jax.experimental.checkify)."""
    errors = frozenset().union(*(CHECKS[name] for name in checks))
    return checkify.checkify(step, errors=errors)


def _source_line(traceback: Any) -> str:
    """The innermost source line outside of jax and flax."""
    libraries = tuple(os.path.dirname(str(module.__file__)) for module in (jax, flax))
    frames = [frame for frame in traceback.frames if not frame.file_name.startswith(libraries)]
    return f"{frames[0].file_name}:{frames[0].line_num} ({frames[0].function_name})" if frames else "an unknown line"


def trace_step(
    states: StateFactory,
    loss: LossFn,
    train: Train,
    example: Mapping[str, Any],
    *,
    has_statistics: bool = False,
    checks: Sequence[str] = (),
) -> jax.stages.Traced:
    """The traced step, ready to be lowered for the devices of the states' mesh.

    With `checks`, it returns the first failed one before the state and the metrics.
    """
    if checks and states.sharder.mesh.size > 1:
        reason = f"runs on one device, and the mesh has {states.sharder.mesh.size}"
        raise ConfigError(Problem("train.checks", reason, list(checks), accepted="[], or one device"))
    update_router, cast = states.model.apply_aux_updates, states.cast
    step_fn = make_step(
        loss, states.optimizer, train, update_router, cast, states.layout(), has_statistics=has_statistics
    )
    if states.sharder.num_shards("replicas") > 1:
        axes = split_trainable(states.model.axes)[0]
        step_fn = make_diloco_step(step_fn, train.diloco, steps=train.steps, mesh=states.sharder.mesh, axes=axes)
    outputs: Any = (states.shardings(), None)
    if checks:
        step_fn, outputs = add_checks(step_fn, checks), (None, outputs)
    return jax.jit(step_fn, donate_argnums=0, out_shardings=outputs).trace(states.abstract(), example)


@contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Compile inside without the persistent cache: a program that comes from it cannot be serialized again on a CPU.

    jax would write the file, and the loaded program would fail with "Function ... not found".
    """
    settings: Any = jax.config
    enabled = settings.jax_enable_compilation_cache
    try:
        settings.update("jax_enable_compilation_cache", False)
        # jax decides once per process whether it uses the cache.
        compilation_cache.reset_cache()
        yield
    finally:
        settings.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


@contextmanager
def reserve_gpu_headroom(sharder: Sharder) -> Iterator[None]:
    """On GPUs, leave a gap of a few megabytes before the large arrays that are allocated inside.

    The BFC allocator takes the smallest free block that is large enough. Batches and metrics are allocated while a step
    runs; without such a gap they end up behind its temporaries and split the free memory for good. A step that needs
    most of it in one block then fits only until a small array splits the other part too.
    """
    has_pool = sharder.platform == "gpu" and isinstance(sharder.mesh, jax.sharding.Mesh)
    devices = sharder.mesh.local_devices if has_pool else ()
    gaps = [jnp.zeros(HEADROOM_BYTES, jnp.uint8, device=device) for device in devices]
    yield
    for gap in gaps:
        gap.delete()


class RampedStep:
    """Dispatches to the step compiled for the size of each batch, and compiles the next size in the background."""

    def __init__(
        self, compile_for: Callable[[Mapping[str, Any]], StepFn], sizes: Sequence[int], compiled: Mapping[int, StepFn]
    ):
        """`compile_for` compiles the step for batches like an example; `compiled` are the steps that exist already."""
        self._compile_for, self._sizes = compile_for, sorted(set(sizes))
        self._steps: dict[int, StepFn] = dict(compiled)
        self._pending: dict[int, Future[StepFn]] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="compile")

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        size = sequences_in(batch)
        for next_size in self._sizes[self._sizes.index(size) :][:2]:
            if next_size not in self._steps and next_size not in self._pending:
                example = {
                    name: jax.ShapeDtypeStruct((next_size, *array.shape[1:]), array.dtype, sharding=array.sharding)
                    for name, array in batch.items()
                }
                self._pending[next_size] = self._worker.submit(self._compile_for, example)
        if size not in self._steps:
            self._steps[size] = self._pending.pop(size).result()
        return self._steps[size](state, batch)


def hlo_text(step: StepFn) -> str | None:
    """The compiled step as optimized HLO text; None if the step is compiled for several batch sizes."""
    return step.as_text() if isinstance(step, jax.stages.Compiled) else None


def trace_pretraining_step(config: Config, sharder: Sharder, *, segments: bool = True) -> jax.stages.Traced:
    """The traced step of pretraining. segments: rows are packed from several documents."""
    spec, states = plan_batches(config, sharder), plan_states(config, sharder)
    shape = (spec.batch, spec.rows.seq_len)
    batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=spec.sharding) for name, dtype in COLUMNS.items()}
    batch = batch if segments else {name: column for name, column in batch.items() if name != "segments"}
    loss = training_loss(states.model, sharder.inside_replica(), config.train)
    return trace_step(states, loss, config.train, batch)


def explain_oom(error: Exception, config: Config) -> Exception:
    """Turn an out-of-memory error of the compiler into a ConfigError; other errors are returned unchanged."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        return error
    reason = f"the step does not fit in device memory: {str(error).splitlines()[0]}"
    hint = "or use more devices, model.remat.policy=full, train.loss_chunk=1024"
    value = config.train.per_device_batch_size
    return ConfigError(Problem("train.per_device_batch_size", reason, value=value, accepted="a smaller one", hint=hint))
