"""Where a run begins: its own checkpoint, another run's state, weights from elsewhere, or fresh weights."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from maxhydra.config.schema.run import Checkpoint
from maxhydra.convert.adapter_lineage import origin
from maxhydra.convert.load import load_weights
from maxhydra.model import ModelDef, split_trainable
from maxhydra.train.batches import BatchSource
from maxhydra.train.checkpoint import restore
from maxhydra.train.state import StateFactory, TrainState, Tree


@dataclasses.dataclass(frozen=True)
class InitialState:
    """The first state, the step it stands at, and in words where it came from."""

    state: TrainState
    step: int
    source: str


def begin(
    states: StateFactory,
    checkpoints: Path,
    saving: Checkpoint,
    batches: BatchSource,
    *,
    seed: int,
    initial: Callable[[], Tree] | None,
) -> InitialState:
    """Restore in the order run, load_full_state; else the task's own weights, load_parameters, or from the seed."""
    abstract = states.abstract()
    found = restore(checkpoints, saving, abstract)
    if found is None:
        if initial is not None:
            return InitialState(states.create_around(initial(), seed), 0, "weights that the task made")
        source = f"fresh weights from seed {seed}"
        if saving.load_parameters is not None:
            source = f"the weights of {saving.load_parameters}"
        return InitialState(_fresh(states, saving, seed), 0, source)
    batches.restore(found.data)
    step = int(found.state.step)
    state = found.state
    if abstract.frozen:
        # Without an adapter that is what the task has beside the model, of which nothing need be made anew.
        has_base = bool(split_trainable(states.model.shapes)[1])
        state = dataclasses.replace(
            state, frozen=_fresh(states, saving, seed).frozen if has_base else dict(states.beside)
        )
    return InitialState(state, step, f"going on from step {step} of {found.source}")


def _fresh(states: StateFactory, saving: Checkpoint, seed: int) -> TrainState:
    source = saving.load_parameters
    if source is None and saving.load_full_state is not None:
        # Its adapter goes on around the weights around which it began.
        found = origin("checkpoint.load_full_state", saving.load_full_state)
        source = None if found is None else found.base
    if source is None:
        return states.create(seed)
    return states.create_around(_load(source, states, states.model), seed)


def starting_weights(states: StateFactory, saving: Checkpoint, seed: int) -> Tree:
    """The weights of the model alone, without an adapter and as they are without one, that a new run starts from."""
    if saving.load_parameters is None:
        return states.fresh_base(seed)
    return _load(saving.load_parameters, states, states.model.base)


def _load(source: str, states: StateFactory, model: ModelDef) -> Tree:
    shardings, dtype = states.sharder.tree(model.base.axes), model.config.dtypes.weights.value
    return load_weights(source, model, shardings=shardings, dtype=dtype)
