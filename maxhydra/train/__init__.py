"""Training: state, loss, step, loop, checkpoints, and what a person sees of them."""

from maxhydra.train.batching import plan_batches
from maxhydra.train.loop import Ending
from maxhydra.train.objective import next_token_loss
from maxhydra.train.sample import write_sample
from maxhydra.train.session import Training, train
from maxhydra.train.state import StateDef, TrainState

__all__ = ["Ending", "StateDef", "TrainState", "Training", "next_token_loss", "plan_batches", "train", "write_sample"]
