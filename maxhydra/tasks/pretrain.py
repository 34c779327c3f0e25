"""Pretraining: predict the next token of plain text. Read from top to bottom, this is a training run."""

from maxhydra import data, model, optim
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.tasks import Job, Outcome
from maxhydra.train import StateDef, Training, next_token_loss, plan_batches, train, write_sample

NEEDS_DEVICES = KEEPS_RUN = True


def run(job: Job) -> Outcome:
    config = job.config
    sharder = Sharder(build_mesh(config.mesh), config.mesh.rules)

    batches = plan_batches(config, sharder)
    loader = data.train_loader(config.data, batches)

    decoder = model.build(config.model)
    sharder.check(decoder.axes, decoder.shapes)

    optimizer = optim.build(config.optimizer, steps=config.train.steps, shapes=decoder.shapes, axes=decoder.axes)

    training = Training(
        states=StateDef(decoder, optimizer, sharder),
        loss=next_token_loss(decoder, sharder, config.train),
        batches=batches,
        loader=loader,
        held_out=lambda: data.eval_batches(config.data, batches),
    )
    ending = train(training, config, run=job.run, machine=job.machine)

    facts: dict[str, object] = {"end_step": ending.step}
    if config.train.sample.tokens and ending.status == "finished":
        tokenizer = data.tokenizer(config.data)
        facts["sample"] = write_sample(
            decoder, ending.state.params, tokenizer, config.train.sample, sharder=sharder, seed=config.run.seed
        )
    return Outcome(ending.status, ending.reason, ending.metrics, facts)
