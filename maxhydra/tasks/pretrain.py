"""Pretraining on text: next-token prediction, or block diffusion. Read from top to bottom, this is a training run."""

from maxhydra import data
from maxhydra.evals.training import find_benchmarks
from maxhydra.sharding import Sharder
from maxhydra.tasks import Job, Outcome
from maxhydra.train import (
    LoaderBatches,
    TrainingSetup,
    final_sample,
    held_out_likelihood,
    likelihood_loss,
    plan_batches,
    plan_states,
    train,
    training_loss,
    with_samples,
)

NEEDS_DEVICES = KEEPS_RUN = TRAINS = True


def run(job: Job) -> Outcome:
    config = job.config
    benchmarks = find_benchmarks(config)
    sharder = Sharder.from_config(config.mesh)

    spec = plan_batches(config, sharder)
    loader = data.train_loader(config.data, spec)

    states = plan_states(config, sharder)
    loss = likelihood_loss(states.model, sharder, config.train)
    # A step runs on one DiLoCo replica at a time, an evaluation on all devices.
    step_loss = training_loss(states.model, sharder.inside_replica(), config.train)
    evaluate = benchmarks.join(held_out_likelihood(loss, config.data, spec, config.train), states)
    training = TrainingSetup(
        states=states,
        loss=step_loss,
        spec=spec,
        batches=LoaderBatches(loader),
        evaluate=with_samples(evaluate, config, states, job.run),
        # Block diffusion runs the model on a noised and on a clean copy of each row.
        passes=1 if config.model.diffusion.block_size is None else 2,
    )
    result = train(training, config, run=job.run, machine=job.machine)

    facts = {"end_step": result.step, **final_sample(config, states, result)}
    return Outcome(result.status, result.reason, result.metrics, facts)
