"""GRPO: reinforcement learning from groups of completions that the model samples and a reward function scores."""

import dataclasses
from contextlib import closing

from maxhydra import data
from maxhydra.align.loss import PairScorer, preference_loss
from maxhydra.config.schema.reward import EnvironmentKind
from maxhydra.config.schema.tasks.policy import PAIRWISE
from maxhydra.config.schema.tasks.training import GrpoTask, Reference, preference_of
from maxhydra.decode.open_draft import open_draft_model
from maxhydra.decode.sampling_params import PromptEncoder
from maxhydra.evals.training import find_benchmarks
from maxhydra.record.rollout_store import RolloutWriter
from maxhydra.record.rollouts import EVAL, FOLDER, KINDS, TRAIN
from maxhydra.rl.batches import AsynchronousBatches, RolloutBatches, make_logprob_fn
from maxhydra.rl.episodes import TurnEncoder
from maxhydra.rl.evaluate import held_out_pass_rate
from maxhydra.rl.loss import group_loss
from maxhydra.rl.reward_models import open_reward_models
from maxhydra.rl.reward_pool import RewardPool
from maxhydra.rl.rollout import PolicyEngine, RolloutWorker
from maxhydra.rl.setup import check, episode_runner, make_sharders, plan_prompts, prompt_loader, with_reference
from maxhydra.tasks import Job, Outcome
from maxhydra.train import Scorer, TrainingSetup, final_sample, plan_batches, plan_states, train

NEEDS_DEVICES = KEEPS_RUN = TRAINS = True


def run(job: Job) -> Outcome:
    config, task = job.config, job.config.task
    assert isinstance(task, GrpoTask)
    check(config, task, processes=job.machine.process_count)
    benchmarks = find_benchmarks(config)
    sharder, rollout_sharder = make_sharders(config, task)
    spec = plan_batches(config, sharder)
    prompt_spec = plan_prompts(spec, task, sharder)
    prompts = PromptEncoder(config.data, vocab_size=config.model.vocab_size)

    encoder = None if config.environment.kind is EnvironmentKind.none else TurnEncoder(prompts)

    states = with_reference(plan_states(config, sharder), config, task)
    # The value head of a critic is not part of the policy.
    policy = dataclasses.replace(states.model, has_value_head=False)
    engine = PolicyEngine(
        policy,
        prompts.tokenizer,
        task.engine,
        sharder=rollout_sharder,
        eos=prompts.eos_ids if encoder is None else encoder.end_ids,
        seed=config.run.seed,
        records_experts=task.router_replay,
        draft_model=open_draft_model(config, task.engine, rollout_sharder),
    )
    writers = {}
    if job.run.writes and task.keep_rollouts:
        writers = {kind: RolloutWriter(job.run.path / FOLDER, kind, keep=task.keep_rollouts) for kind in KINDS}
    environments = episode_runner(config, task, encoder)
    # As many sequences at a time as a forward pass of the trainer.
    reward_models = open_reward_models(config, sharder, rows=spec.batch // config.train.grad_accum)
    with closing(RewardPool(config.reward, reward_models)) as reward_pool, environments as runner, closing(engine):
        worker = RolloutWorker(engine, reward_pool, task, config.reward, runner)
        scorer = Scorer(policy, sharder, config.train.chunk)
        is_pairwise = task.loss in PAIRWISE
        loss = group_loss(scorer, task)
        if is_pairwise:
            pairs = PairScorer(policy, sharder, config.train.chunk)
            loss = preference_loss(pairs, preference_of(task), Reference.cached)
        logprob_fn = make_logprob_fn(scorer, task, parts=config.train.grad_accum)
        held_out = held_out_pass_rate(
            worker,
            lambda: data.held_out(config.data, prompt_spec, data.local_rows),
            config.reward,
            limit=config.train.eval_batches,
            writer=writers.get(EVAL),
        )
        batches = RolloutBatches if task.max_staleness is None else AsynchronousBatches
        training = TrainingSetup(
            states=states,
            loss=loss,
            spec=spec,
            passes=2 if is_pairwise else 1,
            batches=batches(worker, prompt_loader(config, prompt_spec), spec, logprob_fn, writers.get(TRAIN)),
            evaluate=benchmarks.join(held_out, states),
        )
        result = train(training, config, run=job.run, machine=job.machine)
    sample = final_sample(config, dataclasses.replace(states, model=policy), result)
    return Outcome(result.status, result.reason, result.metrics, {"end_step": result.step, **sample})
