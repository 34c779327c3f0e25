"""State factories of the small model on meshes of simulated devices."""

import math

import jax

from maxhydra.config import Config
from maxhydra.config.compose.composer import compose
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.train.state import StateFactory, plan_states
from tests.support.cli import SMALL

# Sequences of a batch on any mesh.
ROWS = 8


def plan(*overrides: str, **axes: int) -> tuple[StateFactory, Config]:
    """The states and the config of the small model with overrides, on a mesh with these axes."""
    devices = math.prod(axes.values())
    mesh = [f"mesh.{axis}={size}" for axis, size in {"fsdp": 1, **axes}.items()]
    config = compose([*SMALL, f"train.per_device_batch_size={ROWS / devices}", *mesh, *overrides]).config
    sharder = Sharder(build_mesh(config.mesh, jax.devices()[:devices]), config.mesh.rules)
    return plan_states(config, sharder), config
