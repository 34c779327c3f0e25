"""Supervised fine-tuning: pretraining's way over conversations, of which only what the assistant says is learned.

The weights that are trained are the model's own, or those of its adapter.
"""

from maxhydra.config import ConfigError
from maxhydra.tasks import Job, Outcome, pretrain

NEEDS_DEVICES = KEEPS_RUN = True


def run(job: Job) -> Outcome:
    # Text would train just as well, and the model would learn to ask as much as to answer.
    hint = "name the column of the messages with data.columns.messages, or make them with data.formatting"
    if problems := list(job.config.data.other_shapes("chat", task="sft", hint=hint)):
        raise ConfigError(problems)
    return pretrain.run(job)
