"""What the scripts beside this one measure: overrides of task=bench, composed, on a started machine, without a run."""

import logging
import sys

from maxhydra import runtime
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.tasks.bench import BenchTask
from maxhydra.measure.record import Subject, on_random_tokens


def opened(overrides: list[str], *of_task: str) -> tuple[Subject, BenchTask]:
    """`of_task` are overrides that the lines do not tell."""
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    composed = compose(["task=bench", *of_task, *overrides])
    config = on_random_tokens(composed.config, composed.choices, tuple(overrides))
    assert isinstance(config.task, BenchTask)
    machine = runtime.start(config.hardware)
    return Subject(config, machine, composed.choices, tuple(overrides)), config.task
