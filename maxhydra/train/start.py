"""Where a run begins: its own checkpoint, another run's state, weights from elsewhere, or fresh weights."""

import dataclasses
from pathlib import Path

from maxhydra.config.run import Checkpoint
from maxhydra.convert import load_weights
from maxhydra.train.checkpoint import restore
from maxhydra.train.source import Batches
from maxhydra.train.state import StateDef, TrainState, Tree


@dataclasses.dataclass(frozen=True)
class Start:
    """The first state, the step it stands at, and in words where it came from."""

    state: TrainState
    step: int
    source: str


def begin(states: StateDef, checkpoints: Path, saving: Checkpoint, batches: Batches, *, seed: int) -> Start:
    """Restore in the order run, load_full_state, load_parameters; else initialise from the seed."""
    abstract = states.abstract()
    found = restore(checkpoints, saving, abstract)
    if found is None:
        source = f"fresh weights from seed {seed}"
        if saving.load_parameters is not None:
            source = f"the weights of {saving.load_parameters}"
        return Start(_fresh(states, saving, seed), 0, source)
    batches.restore(found.data)
    step = int(found.state.step)
    state = found.state
    if abstract.frozen:
        state = dataclasses.replace(state, frozen=_fresh(states, saving, seed).frozen)
    return Start(state, step, f"going on from step {step} of {found.source}")


def _fresh(states: StateDef, saving: Checkpoint, seed: int) -> TrainState:
    if saving.load_parameters is None:
        return states.create(seed)
    return states.create_around(starting_weights(states, saving, seed), seed)


def starting_weights(states: StateDef, saving: Checkpoint, seed: int) -> Tree:
    """The weights of the model alone, without an adapter's, that a new run starts from."""
    if saving.load_parameters is None:
        return states.fresh_base(seed)
    base, dtype = states.model.base, states.model.config.dtypes.weights.value
    shardings = states.sharder.tree(base.axes)
    return load_weights(saving.load_parameters, base, shardings=shardings, dtype=dtype)
