"""The decoder, built from a config and used as pure functions over a nested dict of weights."""

from maxhydra.model.lora import (
    amax_histories,
    fit_adapter,
    map_leaves,
    merge_adapter,
    merge_trees,
    parameter_counts,
    split_trainable,
    store_weight,
    store_weight_slice,
)
from maxhydra.model.model_def import (
    SPEECH,
    VALUE,
    ModelDef,
    active_parameters,
    build,
    flops_per_token,
    parameter_count,
    values_of,
    without_capacity_limit,
)

__all__ = [
    "SPEECH",
    "VALUE",
    "ModelDef",
    "active_parameters",
    "amax_histories",
    "build",
    "fit_adapter",
    "flops_per_token",
    "map_leaves",
    "merge_adapter",
    "merge_trees",
    "parameter_count",
    "parameter_counts",
    "split_trainable",
    "store_weight",
    "store_weight_slice",
    "values_of",
    "without_capacity_limit",
]
