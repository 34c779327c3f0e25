"""Where a run begins: its own checkpoint, another run's state, weights from elsewhere, or fresh weights."""

import dataclasses
from pathlib import Path

from maxhydra.config.run import Checkpoint
from maxhydra.convert import load_weights
from maxhydra.data import Loader
from maxhydra.train.checkpoint import restore
from maxhydra.train.state import StateDef, TrainState


@dataclasses.dataclass(frozen=True)
class Start:
    """The first state, the step it stands at, and in words where it came from."""

    state: TrainState
    step: int
    source: str


def begin(states: StateDef, checkpoints: Path, saving: Checkpoint, loader: Loader, *, seed: int) -> Start:
    """Restore in the order run, load_full_state, load_parameters; else initialise from the seed."""
    abstract = states.abstract()
    if found := restore(checkpoints, saving, abstract):
        loader.restore(found.data)
        step = int(found.state.step)
        return Start(found.state, step, f"going on from step {step} of {found.source}")
    if saving.load_parameters is None:
        return Start(states.create(seed), 0, f"fresh weights from seed {seed}")
    shardings, dtype = states.shardings().params, states.model.config.dtypes.weights.value
    params = load_weights(saving.load_parameters, states.model, shardings=shardings, dtype=dtype)
    return Start(states.create_around(params, seed), 0, f"the weights of {saving.load_parameters}")
