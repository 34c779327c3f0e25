"""Supervised fine-tuning: pretraining on conversations, with a loss on the assistant's tokens only.

The trained weights are those of the model, or of its adapter.
"""

from maxhydra.config import ConfigError
from maxhydra.config.schema.data import CHAT_TYPES
from maxhydra.tasks import Job, Outcome, pretrain

NEEDS_DEVICES = KEEPS_RUN = TRAINS = True


def run(job: Job) -> Outcome:
    # Plain text would train without an error, but the model would also learn to write the user's turns.
    hint = "name the column of the messages with data.columns.messages, or build them with data.formatting"
    if problems := list(job.config.data.other_shapes(*CHAT_TYPES, task="sft", hint=hint)):
        raise ConfigError(problems)
    return pretrain.run(job)
