"""Fields of task=inspect."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import option, schema
from maxhydra.config.errors import Problem
from maxhydra.config.schema.run import Task


class Format(Enum):
    table = "table"
    json = "json"


@schema
class InspectTask(Task):
    """Shows parameters and memory of a model on devices that need not be present."""

    devices: int = option(1, ge=1)
    """Devices to plan for."""
    slices: int = option(1, ge=1)
    """Number of slices of these devices."""
    topology: str | None = None
    """TPU slice to compile the training step for, such as v5e:2x4 or v5p:2x2x1, which also sets the devices.
    Needs libtpu, but no TPU. null: no compilation."""
    format: Format = Format.table
    """Output format."""

    def check(self) -> Iterator[Problem]:
        if self.topology is not None and self.devices != 1:
            reason = f"is already given by topology={self.topology}"
            yield Problem("devices", reason, value=self.devices, hint="set only one of the two")
