"""Reward models: a score of completions, trained on preference pairs or on scored completions."""

import dataclasses
from collections.abc import Iterator

from maxhydra import data
from maxhydra.align.reward_model import CompletionBatches, reward_loss
from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.tasks.reward_model import RewardLoss, RewardModelTask
from maxhydra.sharding import Sharder
from maxhydra.tasks import Job, Outcome
from maxhydra.train import LoaderBatches, TrainingSetup, held_out_loss, plan_batches, plan_states, train
from maxhydra.train.loss import SequenceScorer

NEEDS_DEVICES = KEEPS_RUN = TRAINS = True


def run(job: Job) -> Outcome:
    config, task = job.config, job.config.task
    assert isinstance(task, RewardModelTask)
    if problems := list(_problems(config, task)):
        raise ConfigError(problems)
    sharder = Sharder.from_config(config.mesh)
    spec = plan_batches(config, sharder)
    states = plan_states(config, sharder)
    # Rows of tokens and targets that give sequences of train.seq_len tokens.
    rows = dataclasses.replace(spec.rows, seq_len=spec.rows.seq_len - 1)
    row_spec = dataclasses.replace(spec, rows=rows, sharding=sharder.sharding(("act_batch", None)))
    assemble = CompletionBatches(spec, task.loss)
    loss = reward_loss(SequenceScorer(states.model, sharder), task)
    training = TrainingSetup(
        states=states,
        loss=loss,
        spec=spec,
        batches=LoaderBatches(data.open_loader(config.data, row_spec, assemble)),
        evaluate=held_out_loss(
            loss,
            lambda: data.held_out(config.data, row_spec, assemble),
            limit=config.train.eval_batches,
            parts=config.train.grad_accum,
        ),
        passes=1 if task.loss is RewardLoss.regression else 2,
    )
    result = train(training, config, run=job.run, machine=job.machine)
    return Outcome(result.status, result.reason, result.metrics, {"end_step": result.step})


def _problems(config: Config, task: RewardModelTask) -> Iterator[Problem]:
    if task.loss is RewardLoss.regression:
        hint = "each record needs a `prompt`, a `completion` and a `score`"
        yield from config.data.other_shapes("scored", task="reward_model with task.loss=regression", hint=hint)
    else:
        hint = "each record needs `chosen` and `rejected`, and a `prompt` unless they start with it"
        yield from config.data.other_shapes("preference", task="reward_model", hint=hint)
    yield from config.train.no_z_loss(task="reward_model")
    if config.train.sample.tokens:
        reason, value = "needs a language model; a reward model does not write text", config.train.sample.tokens
        yield Problem("train.sample.tokens", reason, value=value, accepted="0")
    if config.train.seq_len < 2:
        reason = "has no space for a prompt and a completion"
        yield Problem("train.seq_len", reason, value=config.train.seq_len, accepted="2 or more")
