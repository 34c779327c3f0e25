"""Fields of task=tokenize."""

from maxhydra.config.declare import option, schema
from maxhydra.config.schema.run import Task


@schema
class TokenizeTask(Task):
    """Tokenizes a source in advance, so that training does not have to."""

    output: str = option()
    """Output folder for shards and index.json; an incomplete folder is resumed."""
    shards: int = option(8, ge=1)
    """Number of files, with about the same number of records each."""
    workers: int | None = option(None, ge=1)
    """Processes, each writing one shard at a time. null: one per core."""
