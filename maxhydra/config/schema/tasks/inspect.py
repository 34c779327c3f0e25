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
    """Shows what a model would need on devices that need not be here."""

    devices: int = option(1, ge=1)
    """Devices to plan for."""
    slices: int = option(1, ge=1)
    """Slices that these devices form."""
    topology: str | None = None
    """TPU slice to compile the training step for, such as v5e:2x4 or v5p:2x2x1: its devices are planned for. Needs
    libtpu, and no TPU. null: nothing is compiled."""
    format: Format = Format.table
    """table for people, json for programs."""

    def check(self) -> Iterator[Problem]:
        if self.topology is not None and self.devices != 1:
            reason = f"topology={self.topology} says how many there are"
            yield Problem("devices", reason, value=self.devices, hint="leave one of them out")
