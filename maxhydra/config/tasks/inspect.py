"""Fields of task=inspect."""

from enum import Enum

from maxhydra.config.declare import option, schema
from maxhydra.config.run import Task


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
    format: Format = Format.table
    """table for people, json for programs."""
