"""Optimizers: an optax transformation, its learning-rate schedule, and the sharding of its state."""

from maxhydra.optim.averages import exchange
from maxhydra.optim.build import Optimizer, OptimizerState, PathRules, build, state_axes
from maxhydra.optim.parameters import is_stacked
from maxhydra.optim.schedule import Schedule, schedule

__all__ = [
    "Optimizer",
    "OptimizerState",
    "PathRules",
    "Schedule",
    "build",
    "exchange",
    "is_stacked",
    "schedule",
    "state_axes",
]
