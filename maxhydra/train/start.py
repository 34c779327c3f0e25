"""Where a run begins: its own checkpoint, another run's state, another run's weights, or fresh weights."""

import dataclasses
import logging
from pathlib import Path

from maxhydra.config.run import Checkpoint
from maxhydra.data import Loader
from maxhydra.train.checkpoint import read_parameters, restore
from maxhydra.train.state import StateDef, TrainState

log = logging.getLogger("maxhydra")


@dataclasses.dataclass(frozen=True)
class Start:
    """The first state, the step it stands at, and where it came from."""

    state: TrainState
    step: int
    source: str


def begin(states: StateDef, checkpoints: Path, saving: Checkpoint, loader: Loader, *, seed: int) -> Start:
    """Restore in the order run, load_full_state, load_parameters; else initialise from the seed."""
    abstract = states.abstract()
    if found := restore(checkpoints, saving, abstract):
        loader.restore(found.data)
        step = int(found.state.step)
        log.info("going on from step %d of %s", step, found.source)
        return Start(found.state, step, str(found.source))
    if saving.load_parameters is None:
        return Start(states.create(seed), 0, "initial weights")
    params = read_parameters("checkpoint.load_parameters", saving.load_parameters, abstract.params)
    log.info("starting from the weights of %s", saving.load_parameters)
    return Start(states.create_around(params, seed), 0, saving.load_parameters)
