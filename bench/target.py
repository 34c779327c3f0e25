"""The target of a benchmark script: composed overrides of task=bench on a started runtime, without a run folder."""

import logging
import sys

from turn import wait_for_turn

from maxhydra import runtime
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.tasks.analysis import BenchTask
from maxhydra.measure.record import BenchTarget, with_synthetic_data
from maxhydra.plan.estimate import with_remat_on


def open_target(overrides: list[str], *task_overrides: str) -> tuple[BenchTarget, BenchTask]:
    """Compose and start the runtime; `task_overrides` are not recorded in the output lines."""
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    composed = compose(["task=bench", *task_overrides, *overrides])
    config = with_synthetic_data(composed.config, composed.choices, tuple(overrides))
    assert isinstance(config.task, BenchTask)
    wait_for_turn()
    machine = runtime.start(config.hardware)
    return BenchTarget(with_remat_on(machine, config), machine, composed.choices, tuple(overrides)), config.task
