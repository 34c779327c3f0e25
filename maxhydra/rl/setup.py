"""Setup of a GRPO run: config checks, prompts per batch, the rollout mesh, and the reference weights."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import jax

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.reward import ENVIRONMENT, EnvironmentKind
from maxhydra.config.schema.tasks.policy import PAIRWISE
from maxhydra.config.schema.tasks.training import GrpoTask
from maxhydra.data import BatchSpec, Loader, Row, host_loader
from maxhydra.model import VALUE
from maxhydra.rl.environment_pool import EnvironmentPool
from maxhydra.rl.episodes import EpisodeRunner, TurnEncoder
from maxhydra.runtime.channel import is_main
from maxhydra.sharding import Sharder, build_mesh, remeshed, split_devices
from maxhydra.train import StateFactory, starting_weights
from maxhydra.train.loss import Tree

# Name of the frozen initial weights among the weights of a state, for the KL term.
REFERENCE = "reference"


def check(config: Config, task: GrpoTask, *, processes: int) -> None:
    """Raise a ConfigError with all problems between the sections of the config."""
    if problems := list(_problems(config, task, processes)):
        raise ConfigError(problems)


def _problems(config: Config, task: GrpoTask, processes: int) -> Iterator[Problem]:
    has_environment = config.environment.kind is not EnvironmentKind.none
    if not config.reward.terms and (not has_environment or config.environment.kind is EnvironmentKind.tools):
        hint = "choose one with reward=exact, or another option of conf/reward"
        yield Problem("reward.terms", "is required by task=grpo", value=None, accepted="one or more terms", hint=hint)
    if config.reward.passes == ENVIRONMENT and not has_environment:
        yield Problem("reward.passes", "is the reward of an environment, and there is none", ENVIRONMENT)
    hint = "each record needs a `prompt`, and the `answer` that rewards compare with"
    yield from config.data.other_shapes("prompts", task="grpo", hint=hint)
    yield from config.train.no_z_loss(task="grpo")
    if task.max_tokens >= config.train.seq_len:
        reason = f"leaves no space for a prompt in train.seq_len={config.train.seq_len}"
        yield Problem("task.max_tokens", reason, value=task.max_tokens, accepted=f"under {config.train.seq_len}")
    if config.train.ramp.start is not None:
        reason = "is not supported by task=grpo, whose batches consist of whole groups"
        yield Problem("train.ramp.start", reason, value=config.train.ramp.start, accepted="null")
    if config.train.sample.at_evaluations:
        reason = "is not supported by task=grpo, whose evaluations keep the completions of all held-out prompts"
        yield Problem("train.sample.at_evaluations", reason, value=True, accepted="false")
    # Rollouts and updates would be dispatched by two threads, in a different order in each process.
    for name, off in {"off_policy_steps": 0, "max_staleness": None}.items():
        if processes > 1 and (value := getattr(task, name)) != off:
            reason = f"is not supported with several processes; {processes} were started"
            accepted = f"{'null' if off is None else off}, or a single process"
            yield Problem(f"task.{name}", reason, value=value, accepted=accepted)
    if _needs_reference_weights(config, task) and config.checkpoint.load_full_state is not None:
        hint = "start from checkpoint.load_parameters, use an adapter, or set task.kl.beta=0"
        reason = "does not define the reference weights that task.kl.beta needs"
        yield Problem("checkpoint.load_full_state", reason, value=config.checkpoint.load_full_state, hint=hint)


def plan_prompts(spec: BatchSpec, task: GrpoTask, sharder: Sharder) -> BatchSpec:
    """The prompts whose groups fill a batch: on the host, and short enough to leave space for a completion.

    A group fills as many rows as it has completions; with a loss of pairs, it is one row.
    """
    rows_per_prompt = 1 if task.loss in PAIRWISE else task.group_size
    if spec.batch % rows_per_prompt:
        reason = f"does not divide the {spec.batch} completions of a batch"
        hint = "a batch has train.per_device_batch_size x devices x train.grad_accum completions"
        raise ConfigError(Problem("task.group_size", reason, value=task.group_size, hint=hint))
    max_length = spec.rows.seq_len + 1 - task.max_tokens
    return BatchSpec(
        rows=dataclasses.replace(spec.rows, seq_len=max_length),
        batch=spec.batch // rows_per_prompt,
        sharding=sharder.sharding((None, None)),
    )


def prompt_loader(config: Config, spec: BatchSpec) -> Loader[list[Row]]:
    """A loader of all prompts in every process, in an order that does not depend on the number of processes."""
    return host_loader(dataclasses.replace(config.data, streams=config.data.streams or 1), spec)


@contextlib.contextmanager
def episode_runner(config: Config, task: GrpoTask, encoder: TurnEncoder | None) -> Iterator[EpisodeRunner | None]:
    """Plays the episodes of config.environment, whose processes run in this context. None without an environment.

    Only process 0 has environments: they may be random or depend on their host.
    """
    if encoder is None:
        yield None
        return
    with contextlib.closing(EnvironmentPool(config.environment, is_active=is_main())) as pool:
        yield EpisodeRunner(
            pool,
            encoder,
            config.environment,
            max_tokens=task.max_tokens,
            max_prompt=config.train.seq_len + 1 - task.max_tokens,
            seed=config.run.seed,
            is_deterministic=task.engine.deterministic,
        )


def make_sharders(config: Config, task: GrpoTask) -> tuple[Sharder, Sharder]:
    """The sharders of the trainer and of the decode engine.

    The engine has the trainer's, or task.rollout_mesh over the same devices or over its own task.rollout_devices.
    """
    training, sampling = split_rollout_devices(task, jax.devices())
    trainer = Sharder.from_config(config.mesh, build_mesh(config.mesh, training))
    if not task.rollout_mesh and not sampling:
        return trainer, trainer
    mesh = config.mesh
    try:
        if task.rollout_mesh:
            # Imports Hydra, which a worker does not need if the mesh is the trainer's.
            from maxhydra.config.compose.composer import compose  # noqa: PLC0415

            mesh = compose(task.rollout_mesh).config.mesh
        devices = build_mesh(mesh, sampling) if sampling else remeshed(mesh, trainer.mesh.devices)
        return trainer, Sharder.from_config(mesh, devices)
    except ConfigError as error:
        raise ConfigError(problem.under("task.rollout_mesh") for problem in error.problems) from None


def split_rollout_devices(
    task: GrpoTask, devices: Sequence[jax.Device]
) -> tuple[Sequence[jax.Device], Sequence[jax.Device]]:
    """The devices that train, and those that only sample: the last ones, or none."""
    if task.max_staleness is not None and not task.rollout_devices and len(devices) > 1:
        # Two threads would dispatch programs with collective operations to the same devices.
        reason = f"is needed with task.max_staleness={task.max_staleness} and {len(devices)} devices"
        accepted = f"a number of devices, 1 to {len(devices) - 1}, or a fraction that gives one"
        raise ConfigError(Problem("task.rollout_devices", reason, value=0, accepted=accepted))
    path, share = task.separate_devices
    return split_devices(devices, share, path=path)


def with_reference(states: StateFactory, config: Config, task: GrpoTask) -> StateFactory:
    """States that also hold the frozen initial weights, if the KL term needs them.

    A model with an adapter does not: without its adapter it is the reference.
    """
    if not _needs_reference_weights(config, task):
        return states
    weights = starting_weights(states, config.checkpoint, config.run.seed)
    return dataclasses.replace(states, extra_weights={REFERENCE: weights})


def policy_weights(weights: Tree) -> Tree:
    """The weights of the policy alone, without those of the reference and the value head."""
    return {name: subtree for name, subtree in weights.items() if name not in (REFERENCE, VALUE)}


def _needs_reference_weights(config: Config, task: GrpoTask) -> bool:
    return task.kl.beta > 0 and not config.adapter.is_enabled
