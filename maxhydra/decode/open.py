"""Opens what answers: the tokenizer first, then the weights on the mesh, then the engine over both.

A mistake shows as early as it can: the tokenizer takes a second, the weights minutes.
"""

import logging
from typing import Any

import jax.numpy as jnp

from maxhydra import model
from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.decode import Engine as EngineConfig
from maxhydra.config.schema.quantization import TO_KEEP, TO_TRAIN, Quantization
from maxhydra.convert.load import load_weights, stored_format
from maxhydra.decode.checkpoint_check import check_origin
from maxhydra.decode.engine import Engine
from maxhydra.decode.prompts import PromptEncoder
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder, build_mesh

log = logging.getLogger("maxhydra")


def open_prompts(config: Config, *, processes: int) -> PromptEncoder:
    """The tokenizer, after all that can be said without weights."""
    check_start(config, processes=processes)
    return PromptEncoder(config.data, vocab_size=config.model.vocab_size)


def check_start(config: Config, *, processes: int) -> None:
    """ConfigError where there are no weights to answer with, or those of another model."""
    if processes > 1:
        reason = "decodes in one process, which may have many devices"
        raise ConfigError(Problem("task.name", reason, value=config.task.name, hint=f"{processes} were started"))
    if config.checkpoint.load_parameters is None:
        accepted = "a run or checkpoint folder, a Hugging Face folder, a .gguf file, or package:NAME"
        reason = f"is needed: task={config.task.name} answers with weights that were trained before"
        raise ConfigError(Problem("checkpoint.load_parameters", reason, value=None, accepted=accepted))
    check_origin(config, config.checkpoint.load_parameters)


def weight_formats(config: Config) -> Quantization:
    """In which formats weights are kept: as the config says, or as the checkpoint that it names holds them."""
    asked = config.quantization
    if wrong := sorted(kind.value for kind in asked.kinds if kind in TO_TRAIN):
        accepted = ", ".join(kind.value for kind in TO_KEEP)
        hint = "leave quantization out for plain weights, or for those of a checkpoint as it holds them"
        reason = f"is a way to train, not to decode ({', '.join(wrong)})"
        raise ConfigError(Problem("quantization.kind", reason, value=asked.kind, accepted=accepted, hint=hint))
    source = config.checkpoint.load_parameters
    stored = None if source is None else stored_format("checkpoint.load_parameters", source)
    if stored is None or asked.kinds:
        return asked
    log.info("%s holds weights in %s, which stay as they are", source, stored.kind.value)
    return stored


def plan_weights(config: Config) -> tuple[ModelDef, Sharder]:
    """The model as its weights are kept, and how they lie on the mesh."""
    sharder = Sharder(build_mesh(config.mesh), config.mesh.rules)
    decoder = model.build(config.model, quantization=weight_formats(config))
    sharder.check(decoder.axes, decoder.shapes)
    return decoder, sharder


def loaded(config: Config, decoder: ModelDef, sharder: Sharder) -> Any:
    """The weights that the config names.

    They are kept in the format of the computation, into which every product would turn them anyway, or in fewer bits
    where the config says so.
    """
    assert config.checkpoint.load_parameters is not None
    return load_weights(
        config.checkpoint.load_parameters,
        decoder,
        shardings=sharder.tree(decoder.base.axes),
        dtype=jnp.dtype(config.model.dtypes.compute.value),
    )


def open_engine(config: Config, engine: EngineConfig, prompts: PromptEncoder) -> Engine:
    """Load the weights and start the engine."""
    decoder, sharder = plan_weights(config)
    params = loaded(config, decoder, sharder)
    return Engine(decoder, params, prompts.tokenizer, engine, sharder=sharder, eos=prompts.ends)
