"""Opens the draft model that a speculation section describes."""

import dataclasses

import jax.numpy as jnp

from maxhydra import model
from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.decode import Engine as EngineConfig
from maxhydra.config.schema.decode import SpeculationMethod
from maxhydra.config.schema.model import Model
from maxhydra.convert.load import load_weights
from maxhydra.decode.draft_model import DraftModel
from maxhydra.decode.second_model import SecondModel
from maxhydra.sharding import Sharder


def open_draft_model(
    config: Config, engine: EngineConfig, sharder: Sharder, *, key: str = "task.engine"
) -> DraftModel | None:
    """Load the draft model onto a mesh; None with other methods of drafting.

    ConfigError if it cannot draft for the config's model. `key`: path of the engine's section.
    """
    speculation, section = engine.speculation, f"{key}.speculation"
    if speculation.method is not SpeculationMethod.model:
        return None
    assert speculation.weights is not None
    second = SecondModel(section, "draft model", speculation.weights, speculation.model, speculation.overrides)
    settings, _ = second.resolve()
    second.check_tokenizer(config.data, "model", "")
    max_context = engine.max_context or config.model.context_length
    _check(settings, f"{section}.weights", speculation.weights, key, max_context)
    # Capacity limits are for training.
    draft = model.build(model.without_capacity_limit(settings))
    try:
        draft.check_mesh(sharder)
    except ConfigError as error:
        hint = f"the draft model of {section} has the same mesh as the model: choose one that fits both"
        raise ConfigError([dataclasses.replace(problem, hint=hint) for problem in error.problems]) from None
    params = load_weights(
        speculation.weights,
        draft,
        shardings=sharder.tree(draft.axes),
        dtype=jnp.dtype(settings.dtypes.compute.value),
        key=f"{section}.weights",
    )
    return DraftModel(draft, params)


def _check(draft: Model, key: str, location: str, engine: str, max_context: int) -> None:
    """Raise ConfigError for a model that cannot draft."""
    if draft.is_recurrent or draft.diffusion.block_size is not None:
        kind = "has recurrent layers, whose state cannot be reset" if draft.is_recurrent else "decodes blocks of tokens"
        raise ConfigError(Problem(key, f"{kind}, and cannot draft", value=location, accepted="an attention model"))
    if draft.context_length < max_context:
        reason = f"has a context of {draft.context_length} tokens, shorter than the {max_context} of a sequence here"
        hint = f"set {engine}.max_context={draft.context_length}, or use another draft model"
        raise ConfigError(Problem(key, reason, value=location, hint=hint))
