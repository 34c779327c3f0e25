"""Root of the config schema: all sections, and the checks across them."""

import dataclasses
from collections.abc import Iterator

from maxhydra.config.declare import Schema, option, schema, section
from maxhydra.config.errors import Problem
from maxhydra.config.schema.data import Data
from maxhydra.config.schema.hardware import Hardware, Mesh
from maxhydra.config.schema.model import Dtype, Model
from maxhydra.config.schema.model_size import size_problems
from maxhydra.config.schema.optimizer import Optimizer
from maxhydra.config.schema.quantization import Adapter, AdapterKind, Quantization
from maxhydra.config.schema.reward import Reward
from maxhydra.config.schema.run import Checkpoint, Run, Task, Tracker, Train


@schema
class Config(Schema):
    """The config of one run."""

    task: Task = section(Task)
    model: Model = section(Model)
    mesh: Mesh = section(Mesh)
    data: Data = section(Data)
    optimizer: Optimizer = section(Optimizer)
    quantization: Quantization = section(Quantization)
    hardware: Hardware = section(Hardware)
    checkpoint: Checkpoint = section(Checkpoint)
    tracker: Tracker = section(Tracker)
    adapter: Adapter = section(Adapter)
    reward: Reward = section(Reward)
    run: Run = section(Run)
    train: Train = section(Train)
    objective: str = option("eval/loss")
    """Metric that a run returns and a sweeper minimizes."""

    def check(self) -> Iterator[Problem]:
        yield from size_problems(self.model)
        if self.train.seq_len > self.model.context_length:
            yield Problem(
                "train.seq_len",
                f"exceeds model.context_length={self.model.context_length}",
                value=self.train.seq_len,
                accepted=f"1 to {self.model.context_length}",
                hint="raise both to train on longer sequences",
            )
        for problem in self.task.check_model(self.model):
            yield dataclasses.replace(problem, path=f"task.{problem.path}")
        # Adapter weights are float32 whatever the dtype of the frozen weights.
        trained = self.model.dtypes.weights if self.adapter.kind is AdapterKind.none else Dtype.float32
        for problem in self.optimizer.check_moments(trained):
            yield dataclasses.replace(problem, path=f"optimizer.{problem.path}")
        schedule = self.optimizer.schedule
        scheduled = schedule.warmup_steps + (schedule.decay_steps or 0)
        if scheduled > self.train.steps:
            yield Problem(
                "train.steps",
                f"is less than the {scheduled} steps of warm-up and decay in optimizer.schedule",
                value=self.train.steps,
                accepted=f"{scheduled} or more",
                hint="or reduce optimizer.schedule.warmup_steps and decay_steps",
            )
