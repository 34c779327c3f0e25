"""The decoder as data: built from a config, seen from outside as plain functions over a plain tree of weights."""

from maxhydra.model.definition import ModelDef, build
from maxhydra.model.flops import flops_per_token, parameter_count
from maxhydra.model.trees import join, split

__all__ = ["ModelDef", "build", "flops_per_token", "join", "parameter_count", "split"]
