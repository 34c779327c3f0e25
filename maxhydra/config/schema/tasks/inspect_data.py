"""Fields of task=inspect_data."""

from maxhydra.config.declare import option, schema
from maxhydra.config.schema.run import Task
from maxhydra.config.schema.tasks.inspect import Format


@schema
class InspectDataTask(Task):
    """Shows what a model would be trained on."""

    rows: int = option(2, ge=0)
    """Sequences to print."""
    batches: int = option(20, ge=1)
    """Batches to sum up and to measure the speed over."""
    format: Format = Format.table
    """table for people, json for programs."""
