"""Preference optimization (DPO and variants): make chosen completions more likely than rejected ones."""

from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import islice

import jax

from maxhydra import data
from maxhydra.align.loss import PairScorer, passes, preference_loss
from maxhydra.align.reference import ReferenceCache, fill_reference_cache
from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.quantization import AdapterKind
from maxhydra.config.schema.tasks.training import DpoTask, PreferenceLoss, Reference
from maxhydra.data import BatchSpec, Row
from maxhydra.data.record_types.labeled import with_mismatched
from maxhydra.evals.training import find_benchmarks
from maxhydra.sharding import Sharder
from maxhydra.tasks import Job, Outcome
from maxhydra.train import (
    LoaderBatches,
    StateFactory,
    TrainingSetup,
    final_sample,
    held_out_loss,
    plan_batches,
    plan_states,
    starting_weights,
    train,
    with_samples,
)
from maxhydra.train.evaluate import map_microbatches

NEEDS_DEVICES = KEEPS_RUN = TRAINS = True


def run(job: Job) -> Outcome:
    config, task = job.config, job.config.task
    assert isinstance(task, DpoTask)
    reference = task.reference_with(adapter=config.adapter.is_enabled)
    if problems := list(_problems(config, reference)):
        raise ConfigError(problems)
    benchmarks = find_benchmarks(config)
    sharder = Sharder.from_config(config.mesh)
    spec = plan_batches(config, sharder)
    states = plan_states(config, sharder)
    scorer = PairScorer(states.model, sharder, config.train.chunk)

    assemble: data.Assemble[data.Batch] = data.make_batch
    if reference is Reference.cached:
        assemble = _open_reference_cache(job, spec, states).batch
    if task.loss is PreferenceLoss.kto:
        assemble = _mismatched_first(assemble, spec)
    loss = preference_loss(scorer, task, reference)
    held_out = held_out_loss(
        loss,
        lambda: data.held_out(config.data, spec, assemble),
        limit=config.train.eval_batches,
        parts=config.train.grad_accum,
    )
    training = TrainingSetup(
        states=states,
        loss=loss,
        spec=spec,
        batches=LoaderBatches(data.open_loader(config.data, spec, assemble)),
        evaluate=with_samples(benchmarks.join(held_out, states), config, states, job.run),
        passes=passes(reference),
    )
    result = train(training, config, run=job.run, machine=job.machine)
    facts = {"end_step": result.step, **final_sample(config, states, result)}
    return Outcome(result.status, result.reason, result.metrics, facts)


def _mismatched_first(assemble: data.Assemble[data.Batch], spec: BatchSpec) -> data.Assemble[data.Batch]:
    """Builds batches that also have completions of other prompts, for the KL of KTO."""
    if len(spec.local_rows(spec.batch)) < 2:
        reason = "gives a process a single completion, but loss=kto pairs prompts with completions of others"
        raise ConfigError(Problem("train.per_device_batch_size", reason, value=spec.batch, accepted="2 or more"))
    return lambda rows, spec, size: assemble(with_mismatched(rows), spec, size)


def _open_reference_cache(job: Job, spec: BatchSpec, states: StateFactory) -> ReferenceCache:
    """The reference log-probs of every pair that the run will use."""
    config, sharder = job.config, states.sharder
    cache = ReferenceCache.open(job.run.path / "reference")
    scorer = PairScorer(states.model.base, sharder, config.train.chunk)
    logprobs = jax.jit(
        lambda weights, batch: map_microbatches(
            lambda part: scorer(weights, part, None, is_adapted=True), batch, config.train.grad_accum
        ),
        out_shardings=sharder.sharding((None, None)),
    )
    is_labeled = isinstance(config.task, DpoTask) and config.task.loss is PreferenceLoss.kto
    with closing(_all_rows(config, spec)) as batches:
        fill_reference_cache(
            cache,
            map(with_mismatched, batches) if is_labeled else batches,
            spec,
            load_weights=lambda: starting_weights(states, config.checkpoint, config.run.seed),
            logprobs=logprobs,
        )
    return cache


def _all_rows(config: Config, spec: BatchSpec) -> Generator[list[Row], None, None]:
    """This process's rows of every batch that the run trains and evaluates on."""
    loader = data.host_loader(config.data, spec)
    try:
        yield from islice(loader, config.train.steps)
    finally:
        loader.close()
    yield from islice(data.held_out(config.data, spec, data.local_rows), config.train.eval_batches)


def _problems(config: Config, reference: Reference) -> Iterator[Problem]:
    if isinstance(config.task, DpoTask) and config.task.loss is PreferenceLoss.kto:
        hint = "each record needs `prompt`, `completion` and `label`, true or false"
        yield from config.data.other_shapes("labeled", task="dpo task.loss=kto", hint=hint)
    else:
        hint = "each record needs `chosen` and `rejected`, and a `prompt` unless they start with it"
        yield from config.data.other_shapes("preference", "image_preference", task="dpo", hint=hint)
    yield from config.train.no_z_loss(task="dpo")
    if reference is Reference.adapter_off and not config.adapter.is_enabled:
        reason = "needs an adapter that can be switched off"
        yield Problem("task.reference", reason, value=reference, accepted="auto, cached", hint="or set adapter=lora")
    if reference is Reference.cached and config.adapter.kind is AdapterKind.qlora:
        reason = "would be computed with the weights before adapter=qlora quantizes them"
        yield Problem("task.reference", reason, value=reference, accepted="auto, adapter_off")
    if reference is Reference.cached and config.checkpoint.load_full_state is not None:
        reason = "does not define the reference weights"
        hint = "load only the weights with checkpoint.load_parameters"
        yield Problem(
            "checkpoint.load_full_state", reason, value=config.checkpoint.load_full_state, accepted="null", hint=hint
        )
