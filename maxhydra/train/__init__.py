"""Training: batches, state, loss, step, loop, checkpoints, metrics and progress.

Reading order: `trainer.train` sets up a session and calls `loop.fit`, which calls the function made by
`step.make_step`. The tasks in `maxhydra.tasks` differ only in the `TrainingSetup` that they pass to `train`.
"""

from maxhydra.train.batches import BatchSource, LoaderBatches, plan_batches
from maxhydra.train.evaluate import held_out_likelihood, held_out_loss
from maxhydra.train.generate import final_sample, with_samples, write_sample
from maxhydra.train.loop import TrainResult
from maxhydra.train.loss import Scorer, map_sequence_chunks, next_token_loss, token_logprobs
from maxhydra.train.objective import likelihood_loss, training_loss
from maxhydra.train.restore import starting_weights
from maxhydra.train.state import StateFactory, TrainState, plan_states
from maxhydra.train.trainer import TrainingSetup, train

__all__ = [
    "BatchSource",
    "LoaderBatches",
    "Scorer",
    "StateFactory",
    "TrainResult",
    "TrainState",
    "TrainingSetup",
    "final_sample",
    "held_out_likelihood",
    "held_out_loss",
    "likelihood_loss",
    "map_sequence_chunks",
    "next_token_loss",
    "plan_batches",
    "plan_states",
    "starting_weights",
    "token_logprobs",
    "train",
    "training_loss",
    "with_samples",
    "write_sample",
]
