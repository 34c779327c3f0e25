"""Schema of task=eval."""

from collections.abc import Iterator

from maxhydra.config.declare import option, schema, section
from maxhydra.config.errors import Problem
from maxhydra.config.schema.benchmarks import Benchmarks
from maxhydra.config.schema.decode import Engine
from maxhydra.config.schema.model import Model
from maxhydra.config.schema.run import Task


@schema
class EvalTask(Benchmarks, Task):
    """Evaluates the model in checkpoint.load_parameters on benchmarks."""

    steps: list[int] = option([])
    """Steps of the checkpoints to evaluate, if checkpoint.load_parameters is a run. Empty: the latest."""
    engine: Engine = section(Engine)

    def check(self) -> Iterator[Problem]:
        if not self.tasks:
            yield Problem("tasks", "is empty", value=self.tasks, accepted="one or more names of tasks")
        yield from self.engine.check_one_group()

    def check_model(self, model: Model) -> Iterator[Problem]:
        yield from self.engine.check_model(model)
