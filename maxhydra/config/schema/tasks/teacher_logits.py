"""Fields of task=teacher_logits."""

from maxhydra.config.declare import option, schema
from maxhydra.config.schema.run import Task


@schema
class TeacherLogitsTask(Task):
    """Writes what the model of checkpoint.load_parameters thinks of the next tokens of a source, for task=distill."""

    output: str = option()
    """Folder for the shards and their index.json; named again, it goes on where it was broken off."""
    shards: int = option(8, ge=1)
    """Files to write, of about as many records each; one that was not finished is begun anew."""
    k: int = option(64, ge=1)
    """Likeliest tokens kept after each token, each with its log-probability in float16."""
