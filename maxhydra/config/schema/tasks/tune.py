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
    """Finds the settings with which training takes the least time a token, and writes them as an experiment."""

    space: list[str] = option([])
    """Settings to try, each as in a sweep: ['model.remat.policy=none,minimal','train.loss_chunk=0,1024'], values that
    need the least memory last. Empty: batch, remat policy, scan_unroll, loss_chunk, hardware.flag_sets, backends and,
    with one_by_one, tiles of their kernels, as model and hardware suggest."""
    batch: Batch = Batch.same
    """same: an optimizer step keeps its sequences, so that a smaller train.per_device_batch_size comes with more
    train.grad_accum; any: it need not, and the tuned run learns otherwise."""
    search: Search = Search.one_by_one
    """one_by_one: a setting at a time from the best so far, until none changes; grid: all combinations."""
    steps: int = option(5, ge=1)
    """Steps over which a candidate is first timed; each round among the finalists doubles them."""
    finalists: int = option(4, ge=1)
    """Best candidates that are timed again over more steps, half of them in each round."""
    minutes: float = option(30, gt=0)
    """Time in all, that of sessions before included; a quarter of it is for the finalists."""
    trial_minutes: float = option(5, gt=0)
    """Time of a candidate, its compilation included, after which it is given up."""
    save_as: str | None = None
    """Name of the experiment to write into task.config_dir besides the run's folder. null: there alone."""
    config_dir: str = "conf"
    """Folder of options of yours, as --config-dir names it, which gets experiment/<save_as>.yaml."""

    def check(self) -> Iterator[Problem]:
        if self.save_as is not None and (not self.save_as.strip() or "/" in self.save_as or self.save_as[0] == "."):
            yield Problem("save_as", "is not a name", value=self.save_as, accepted="letters, digits, - _ and .")
