"""Schema of checkpoints."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Schema, option, schema
from maxhydra.config.errors import Problem


class SaveMode(Enum):
    asynchronous = "asynchronous"
    synchronous = "synchronous"
    off = "off"


@schema
class Checkpoint(Schema):
    """Saving and loading of the training state: weights, optimizer, step, data position and random key."""

    mode: SaveMode = SaveMode.asynchronous
    """asynchronous saves in the background, synchronous blocks training, off never saves."""
    every: int = option(1000, ge=1)
    """Steps between checkpoints; the end of the run, SIGTERM, SIGUSR1 and SIGHUP also save one."""
    every_minutes: float | None = option(10, gt=0)
    """Minutes between checkpoints, in addition to those of every, while saves block at most 5% of the time. null: by
    steps only."""
    first_minutes: float = option(1, gt=0)
    """Minutes of training after which every_minutes saves the first checkpoint of a session."""
    keep: int = option(3, ge=1)
    """Number of newest checkpoints to keep."""
    keep_best: int = option(0, ge=0)
    """Number of additional checkpoints to keep, those with the best best_metric."""
    best_metric: str = "eval/loss"
    """Metric that ranks checkpoints for keep_best, such as eval/bpb or eval/TASK/acc."""
    persist_every: int | None = option(None, ge=1)
    """Steps between checkpoints that are uploaded, if run.outputs is a URL; the others stay in the local folder. The
    last one of a session is always uploaded. null: every checkpoint."""
    local_every: int | None = option(None, ge=1)
    """Steps between additional saves to local_folder on each host, for restarts after a crash. null: none."""
    local_folder: str = "~/.cache/maxhydra/local"
    """Folder for local_every, on a disk or in memory (/dev/shm/NAME) of each host; the hosts need not share it."""
    peer_copies: int = option(0, ge=0, le=1)
    """Copies of the saves of local_every on other hosts: 1 lets a run restart after the loss of a host."""
    max_overhead: float | None = option(None, gt=0, le=0.5)
    """Share of the time that saves may block training: save again as soon as the previous save is complete, within this
    limit, to local_folder if local_every is set. Multiples of every and local_every are saved too. null: only those."""
    single_replica: bool = True
    """Resume: an array that several processes hold, such as weights over mesh.data, is read by one of them and sent to
    the others. false: every process reads all that its devices hold."""
    load_full_state: str | None = None
    """Run or checkpoint folder from which a new run loads the full training state."""
    load_parameters: str | None = None
    """Initial weights of a new run: a run or checkpoint folder, a Hugging Face or PEFT folder with safetensors, a .gguf
    file, a repository ORG/NAME[@REVISION] on the Hugging Face hub, or package:NAME for the .gguf file in an installed
    package."""

    def check(self) -> Iterator[Problem]:
        if self.load_full_state is not None and self.load_parameters is not None:
            yield Problem(
                "load_parameters",
                "cannot be combined with load_full_state",
                value=self.load_parameters,
                hint="set only one of the two",
            )
        if self.mode is SaveMode.off:
            for name in ("local_every", "max_overhead"):
                if (value := getattr(self, name)) is not None:
                    hint = "set checkpoint.mode=asynchronous"
                    yield Problem(name, "saves checkpoints, but mode is off", value, accepted="null", hint=hint)
