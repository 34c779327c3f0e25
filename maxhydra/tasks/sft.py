"""Supervised fine-tuning: pretraining's way over conversations, of which only what the assistant says is learned.

The weights that are trained are the model's own, or those of its adapter.
"""

from collections.abc import Iterator

from maxhydra.config import ConfigError, Problem
from maxhydra.config.data import Data
from maxhydra.tasks import Job, Outcome, pretrain

NEEDS_DEVICES = KEEPS_RUN = True


def run(job: Job) -> Outcome:
    if problems := list(_without_conversations(job.config.data)):
        raise ConfigError(problems)
    return pretrain.run(job)


def _without_conversations(data: Data) -> Iterator[Problem]:
    """Text would train just as well, and the model would learn to ask as much as to answer."""
    corpora = {f"sources.{name}.": corpus for name, corpus in data.sources.items()} or {"": data}
    for where, corpus in corpora.items():
        if corpus.shape != "chat":
            hint = "name the column of the messages with data.columns.messages, or make them with data.formatting"
            yield Problem(
                f"data.{where}shape", "is not what task=sft learns", value=corpus.shape, accepted="chat", hint=hint
            )
