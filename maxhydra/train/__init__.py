"""Training: state, loss, step, loop, checkpoints, and what a person sees of them."""

from maxhydra.train.batches import Batches, LoadedBatches, plan_batches
from maxhydra.train.generate import closing_sample, write_sample
from maxhydra.train.logprobs import Scorer, by_chunks, token_logprobs
from maxhydra.train.loop import Ending
from maxhydra.train.objectives import held_out_loss, next_token_loss
from maxhydra.train.restore import starting_weights
from maxhydra.train.state import StateDef, TrainState, plan_states
from maxhydra.train.trainer import Training, train

__all__ = [
    "Batches",
    "Ending",
    "LoadedBatches",
    "Scorer",
    "StateDef",
    "TrainState",
    "Training",
    "by_chunks",
    "closing_sample",
    "held_out_loss",
    "next_token_loss",
    "plan_batches",
    "plan_states",
    "starting_weights",
    "token_logprobs",
    "train",
    "write_sample",
]
