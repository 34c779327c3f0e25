"""What the scripts beside this one measure: overrides of task=bench, composed, on a started machine, without a run."""

import logging
import sys

from maxhydra import runtime
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.tasks.bench import BenchTask
from maxhydra.measure.record import BenchTarget, with_synthetic_data


def opened(overrides: list[str], *of_task: str) -> tuple[BenchTarget, BenchTask]:
    """`of_task` are overrides that the lines do not tell."""
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    composed = compose(["task=bench", *of_task, *overrides])
    config = with_synthetic_data(composed.config, composed.choices, tuple(overrides))
    assert isinstance(config.task, BenchTask)
    machine = runtime.start(config.hardware)
    return BenchTarget(config, machine, composed.choices, tuple(overrides)), config.task
