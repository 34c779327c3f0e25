"""The optimizer of a run: an optax transformation, its learning rate over the steps, and how its state is laid out."""

from maxhydra.optim.build import Optimizer, OptimizerState, build
from maxhydra.optim.layout import state_axes
from maxhydra.optim.schedule import Schedule, schedule

__all__ = ["Optimizer", "OptimizerState", "Schedule", "build", "schedule", "state_axes"]
