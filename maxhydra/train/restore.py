"""The initial state of a session: the run's own checkpoint, another run's state, loaded weights, or fresh weights."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from maxhydra.config.schema.checkpoint import Checkpoint
from maxhydra.convert.adapter_lineage import find_adapter_lineage
from maxhydra.convert.load import load_weights
from maxhydra.model import ModelDef, split_trainable
from maxhydra.train.batches import BatchSource
from maxhydra.train.checkpoint import NO_LOCAL_TIER, restore
from maxhydra.train.local_tier import LocalTier
from maxhydra.train.loss import Tree
from maxhydra.train.state import StateFactory, TrainState


@dataclasses.dataclass(frozen=True)
class InitialState:
    """The first state of a session, its step, and a description of its source."""

    state: TrainState
    step: int
    source: str


def initialize_or_resume(
    states: StateFactory,
    checkpoints: Path,
    checkpoint: Checkpoint,
    batches: BatchSource,
    *,
    seed: int,
    initial: Callable[[], Tree] | None,
    local: LocalTier = NO_LOCAL_TIER,
) -> InitialState:
    """Restore the run's checkpoint or load_full_state; else use the task's weights, load_parameters, or the seed."""
    abstract = states.abstract()
    restored = restore(checkpoints, checkpoint, abstract, batches.restore, local)
    if restored is None:
        if initial is not None:
            return InitialState(states.create_from_base(initial(), seed), 0, "weights initialized by the task")
        source = f"fresh weights from seed {seed if states.weights_seed is None else states.weights_seed}"
        if checkpoint.load_parameters is not None:
            source = f"the weights of {checkpoint.load_parameters}"
        return InitialState(_fresh_state(states, checkpoint, seed), 0, source)
    step = int(restored.state.step)
    state = restored.state
    if abstract.frozen:
        # Without an adapter, only the extra weights of the task are frozen, and they are loaded already.
        has_base = bool(split_trainable(states.model.shapes)[1])
        frozen = _fresh_state(states, checkpoint, seed).frozen if has_base else dict(states.extra_weights)
        state = dataclasses.replace(state, frozen=frozen)
    return InitialState(state, step, f"resuming from step {step} of {restored.source}")


def _fresh_state(states: StateFactory, checkpoint: Checkpoint, seed: int) -> TrainState:
    source = checkpoint.load_parameters
    if source is None and checkpoint.load_full_state is not None:
        # The adapter of that state belongs to the base weights that it was trained on.
        lineage = find_adapter_lineage("checkpoint.load_full_state", checkpoint.load_full_state)
        source = None if lineage is None else lineage.base
    if source is None:
        return states.create(seed)
    return states.create_from_base(_load(source, states, states.model), seed)


def starting_weights(states: StateFactory, checkpoint: Checkpoint, seed: int) -> Tree:
    """The base model weights, without an adapter, that a new run starts from."""
    if checkpoint.load_parameters is None:
        return states.init_base(seed)
    return _load(checkpoint.load_parameters, states, states.model.base)


def _load(source: str, states: StateFactory, model: ModelDef) -> Tree:
    shardings, dtype = states.sharder.tree(model.base.axes), model.config.dtypes.weights.value
    return load_weights(source, model, shardings=shardings, dtype=dtype)
