"""The decoder, built from a config and used as pure functions over a nested dict of weights."""

from maxhydra.model.flops import active_parameters, flops_per_token, parameter_count
from maxhydra.model.lora import merge_adapter, parameter_counts, store_weight, store_weight_slice
from maxhydra.model.model_def import ModelDef, build
from maxhydra.model.param_partition import amax_histories, map_leaves, merge_trees, split_trainable

__all__ = [
    "ModelDef",
    "active_parameters",
    "amax_histories",
    "build",
    "flops_per_token",
    "map_leaves",
    "merge_adapter",
    "merge_trees",
    "parameter_count",
    "parameter_counts",
    "split_trainable",
    "store_weight",
    "store_weight_slice",
]
