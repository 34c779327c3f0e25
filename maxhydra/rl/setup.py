"""What a run needs before it begins: that its sections fit together, prompts for its batches, and a reference."""

import dataclasses
from collections.abc import Iterator

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.adapter import AdapterKind
from maxhydra.config.schema.tasks.grpo import GrpoTask
from maxhydra.data import BatchSpec
from maxhydra.rl.loss import REFERENCE
from maxhydra.sharding import Sharder, remeshed
from maxhydra.train import StateFactory, starting_weights


def check(config: Config, task: GrpoTask, *, processes: int) -> None:
    """ConfigError with all that does not fit."""
    if problems := list(_problems(config, task, processes)):
        raise ConfigError(problems)


def _problems(config: Config, task: GrpoTask, processes: int) -> Iterator[Problem]:
    if not config.reward.terms:
        hint = "choose one with reward=exact, or another option of conf/reward"
        yield Problem("reward.terms", "is needed by task=grpo", value=None, accepted="a term or more", hint=hint)
    hint = "each record has a `prompt`, and the `answer` that rewards compare with"
    yield from config.data.other_shapes("prompts", task="grpo", hint=hint)
    yield from config.train.no_z_loss(task="grpo")
    if task.max_tokens >= config.train.seq_len:
        reason = f"leaves no room for a prompt in train.seq_len={config.train.seq_len}"
        yield Problem("task.max_tokens", reason, value=task.max_tokens, accepted=f"under {config.train.seq_len}")
    if config.train.ramp.start is not None:
        reason = "is not for task=grpo, whose batches hold whole groups"
        yield Problem("train.ramp.start", reason, value=config.train.ramp.start, accepted="null")
    if processes > 1:
        reason = "decodes in one process, which may have many devices"
        yield Problem("task.name", reason, value=task.name, hint=f"{processes} were started")
    if _needs_weights(config, task) and config.checkpoint.load_full_state is not None:
        hint = "start from checkpoint.load_parameters, use an adapter, or set task.kl.beta=0"
        reason = "does not say which weights task.kl.beta ties the model to"
        yield Problem("checkpoint.load_full_state", reason, value=config.checkpoint.load_full_state, hint=hint)


def plan_prompts(spec: BatchSpec, task: GrpoTask, sharder: Sharder) -> BatchSpec:
    """The prompts whose groups fill a batch: on the host, and short enough for an answer to follow."""
    if spec.batch % task.group_size:
        reason = f"does not divide the {spec.batch} answers of a batch"
        hint = "they are train.per_device_batch_size x devices x train.grad_accum"
        raise ConfigError(Problem("task.group_size", reason, value=task.group_size, hint=hint))
    longest = spec.rows.seq_len + 1 - task.max_tokens
    return BatchSpec(
        rows=dataclasses.replace(spec.rows, seq_len=longest),
        batch=spec.batch // task.group_size,
        sharding=sharder.sharding((None, None)),
    )


def rollout_sharder(task: GrpoTask, trainer: Sharder) -> Sharder:
    """How the engine splits the weights: as training does, or by a mesh of its own over the same devices."""
    if not task.rollout_mesh:
        return trainer
    # Hydra, which a worker does without where the mesh is the trainer's.
    from maxhydra.config.compose.composer import compose  # noqa: PLC0415

    try:
        mesh = compose(task.rollout_mesh).config.mesh
        return Sharder(remeshed(mesh, trainer.mesh.devices), mesh.rules)
    except ConfigError as error:
        raise ConfigError(problem.under("task.rollout_mesh") for problem in error.problems) from None


def with_reference(states: StateFactory, config: Config, task: GrpoTask) -> StateFactory:
    """States that keep the weights that training begins with beside those that it changes, where they are needed.

    A model under an adapter needs none: without the adapter it is what it began as.
    """
    if not _needs_weights(config, task):
        return states
    weights = starting_weights(states, config.checkpoint, config.run.seed)
    return dataclasses.replace(states, beside={REFERENCE: weights})


def _needs_weights(config: Config, task: GrpoTask) -> bool:
    return task.kl.beta > 0 and config.adapter.kind is AdapterKind.none
