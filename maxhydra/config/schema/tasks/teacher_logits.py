"""Fields of task=teacher_logits."""

from maxhydra.config.declare import option, schema
from maxhydra.config.schema.run import Task


@schema
class TeacherLogitsTask(Task):
    """Writes the top next-token logits of the model in checkpoint.load_parameters, for task=distill."""

    output: str = option()
    """Output folder for shards and index.json; an incomplete folder is resumed."""
    shards: int = option(8, ge=1)
    """Number of files, with about the same number of records each; an unfinished file is written again."""
    k: int = option(64, ge=1)
    """Most likely tokens that are stored per position, with their log-probabilities in float16."""
