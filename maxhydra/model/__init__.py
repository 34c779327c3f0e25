"""The decoder, built from a config and used as pure functions over a nested dict of weights."""

from maxhydra.model.flops import active_parameters, flops_per_token, parameter_count
from maxhydra.model.lora import kept, merged, parameter_counts, part_kept
from maxhydra.model.model_def import ModelDef, build
from maxhydra.model.param_partition import mapped, merge_trees, remembered, split_trainable

__all__ = [
    "ModelDef",
    "active_parameters",
    "build",
    "flops_per_token",
    "kept",
    "mapped",
    "merge_trees",
    "merged",
    "parameter_count",
    "parameter_counts",
    "part_kept",
    "remembered",
    "split_trainable",
]
