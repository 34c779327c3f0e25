"""Schema of task=eval."""

from collections.abc import Iterator

from maxhydra.config.declare import option, schema, section
from maxhydra.config.errors import Problem
from maxhydra.config.schema.decode import Engine
from maxhydra.config.schema.model import Model
from maxhydra.config.schema.run import Task


@schema
class EvalTask(Task):
    """Evaluates the model in checkpoint.load_parameters on benchmarks."""

    tasks: list[str] = option([])
    """Names of tasks: arithmetic, reasoning_gym, cloze, needle, plays; YAML files of yours; tasks of lm-eval, such as
    hellaswag."""
    steps: list[int] = option([])
    """Steps of the checkpoints to evaluate, if checkpoint.load_parameters is a run. Empty: the latest."""
    limit: int | None = option(None, ge=1)
    """Maximum number of questions of each task. null: all."""
    shots: int | None = option(None, ge=0)
    """Solved questions in the prompt. null: as each task says."""
    harness_path: str | None = None
    """Folder of further lm-eval task files. null: only those that lm-eval includes."""
    batch: int = option(8, ge=1)
    """Sequences per batch whose log-likelihoods are computed together."""
    engine: Engine = section(Engine)

    def check(self) -> Iterator[Problem]:
        if not self.tasks:
            yield Problem("tasks", "is empty", value=self.tasks, accepted="one or more names of tasks")
        yield from self.engine.check_one_group()

    def check_model(self, model: Model) -> Iterator[Problem]:
        yield from self.engine.check_model(model)
