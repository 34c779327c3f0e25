"""Reinforcement learning from groups of answers that the model writes itself and a reward judges."""

from contextlib import closing

from maxhydra import data
from maxhydra.config.schema.tasks.grpo import GrpoTask
from maxhydra.decode.prompts import PromptEncoder
from maxhydra.rl.batches import RolloutBatches
from maxhydra.rl.evaluate import held_out_answers
from maxhydra.rl.loss import group_loss, scoring
from maxhydra.rl.policy_engine import Sampler
from maxhydra.rl.reward_pool import RewardPool
from maxhydra.rl.rollout import RolloutWorker
from maxhydra.rl.setup import check, plan_prompts, rollout_sharder, with_reference
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.tasks import Job, Outcome
from maxhydra.train import Scorer, TrainingSetup, plan_batches, plan_states, train

NEEDS_DEVICES = KEEPS_RUN = True


def run(job: Job) -> Outcome:
    config, task = job.config, job.config.task
    assert isinstance(task, GrpoTask)
    check(config, task, processes=job.machine.process_count)
    sharder = Sharder(build_mesh(config.mesh), config.mesh.rules)
    spec = plan_batches(config, sharder)
    asked = plan_prompts(spec, task, sharder)
    prompts = PromptEncoder(config.data, vocab_size=config.model.vocab_size)

    states = with_reference(plan_states(config, sharder), config, task)
    sampler = Sampler(states.model, prompts, task.engine, sharder=rollout_sharder(task, sharder), seed=config.run.seed)
    with closing(RewardPool(config.reward)) as judge, closing(sampler):
        rollouts = RolloutWorker(sampler, judge, task, config.reward)
        scorer = Scorer(states.model, sharder, config.train.loss_chunk)
        score = scoring(scorer, task, parts=config.train.grad_accum)
        training = TrainingSetup(
            states=states,
            loss=group_loss(scorer, task),
            spec=spec,
            batches=RolloutBatches(rollouts, data.host_loader(config.data, asked), spec, score),
            evaluate=held_out_answers(
                rollouts,
                lambda: data.held_out(config.data, asked, data.own_rows),
                config.reward,
                limit=config.train.eval_batches,
            ),
        )
        ending = train(training, config, run=job.run, machine=job.machine)
    return Outcome(ending.status, ending.reason, ending.metrics, {"end_step": ending.step})
