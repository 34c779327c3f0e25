"""Fields of task=tune."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import option, schema
from maxhydra.config.errors import Problem
from maxhydra.config.schema.run import Task


class Search(Enum):
    one_by_one = "one_by_one"
    grid = "grid"


class Batch(Enum):
    same = "same"
    any = "any"


@schema
class TuneTask(Task):
    """Finds the settings with the highest training throughput and writes them as an experiment."""

    space: list[str] = option([])
    """Search space in sweep syntax: ['model.remat.policy=none,minimal','train.loss_chunk=0,1024'], values that need
    the least memory last. Empty: batch, remat policy, scan_unroll, loss_chunk, hardware.flag_sets, backends and, with
    one_by_one, tiles of their kernels, as model and hardware suggest."""
    batch: Batch = Batch.same
    """same: the global batch size is fixed, so a smaller train.per_device_batch_size comes with a larger
    train.grad_accum; any: it may change, which changes the training result."""
    search: Search = Search.one_by_one
    """one_by_one: coordinate descent, one setting at a time until none improves; grid: all combinations."""
    steps: int = option(5, ge=1)
    """Timed steps per candidate; each round among the finalists doubles them."""
    finalists: int = option(4, ge=1)
    """Best candidates that are timed again over more steps; each round keeps half of them."""
    minutes: float = option(30, gt=0)
    """Total time budget, including earlier sessions; a quarter is reserved for the finalists."""
    trial_minutes: float = option(5, gt=0)
    """Time limit per candidate, including compilation."""
    save_as: str | None = None
    """Name of the experiment that is also written to task.config_dir. null: only to the run's folder."""
    config_dir: str = "conf"
    """Your folder of options (--config-dir), to which experiment/<save_as>.yaml is written."""

    def check(self) -> Iterator[Problem]:
        if self.save_as is not None and (not self.save_as.strip() or "/" in self.save_as or self.save_as[0] == "."):
            yield Problem("save_as", "is not a name", value=self.save_as, accepted="letters, digits, - _ and .")
