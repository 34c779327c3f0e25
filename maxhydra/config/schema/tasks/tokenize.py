"""Fields of task=tokenize."""

from maxhydra.config.declare import option, schema
from maxhydra.config.schema.run import Task


@schema
class TokenizeTask(Task):
    """Tokenizes a source once, so that training need not."""

    output: str = option()
    """Folder for the shards and their index.json; named again, it goes on where it was broken off."""
    shards: int = option(8, ge=1)
    """Files to write, of about as many records each."""
    workers: int | None = option(None, ge=1)
    """Processes, each at a shard of its own. null: one per core."""
