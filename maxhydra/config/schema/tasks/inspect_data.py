"""Fields of task=inspect_data."""

from maxhydra.config.declare import option, schema
from maxhydra.config.schema.run import Task
from maxhydra.config.schema.tasks.inspect import Format


@schema
class InspectDataTask(Task):
    """Shows the sequences that a model would be trained on."""

    rows: int = option(2, ge=0)
    """Sequences to print."""
    batches: int = option(20, ge=1)
    """Batches for statistics and the speed measurement."""
    format: Format = Format.table
    """Output format."""
