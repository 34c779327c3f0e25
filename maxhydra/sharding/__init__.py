"""Mesh axes to a device mesh, and logical axis names to shardings over it."""

from maxhydra.sharding.mesh import (
    AxisSizes,
    abstract_mesh,
    axis_sizes,
    build_mesh,
    num_separate_devices,
    remeshed,
    split_devices,
)
from maxhydra.sharding.pipeline import PipelineSchedule, Work
from maxhydra.sharding.sharder import LogicalAxes, Sharder, bytes_per_device, is_axes

__all__ = [
    "AxisSizes",
    "LogicalAxes",
    "PipelineSchedule",
    "Sharder",
    "Work",
    "abstract_mesh",
    "axis_sizes",
    "build_mesh",
    "bytes_per_device",
    "is_axes",
    "num_separate_devices",
    "remeshed",
    "split_devices",
]
