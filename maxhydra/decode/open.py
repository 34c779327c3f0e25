"""Opens an engine: the tokenizer first, then the weights on the mesh, then the engine itself.

This order reports mistakes early: the tokenizer takes a second to load, the weights take minutes.
"""

import logging
from typing import Any

import jax.numpy as jnp

from maxhydra import model
from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.decode import Engine as EngineConfig
from maxhydra.config.schema.quantization import STORED_KINDS, TRAINING_KINDS, Quantization
from maxhydra.convert.load import load_weights, stored_format
from maxhydra.decode.checkpoint_check import check_same_model
from maxhydra.decode.engine import Engine
from maxhydra.decode.prompts import PromptEncoder
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder, build_mesh

log = logging.getLogger("maxhydra")


def open_prompts(config: Config, *, processes: int) -> PromptEncoder:
    """Check everything that needs no weights, then load the tokenizer."""
    check_weights_source(config, processes=processes)
    return PromptEncoder(config.data, vocab_size=config.model.vocab_size)


def check_weights_source(config: Config, *, processes: int) -> None:
    """Raise ConfigError if no weights are configured, or if they belong to a different model."""
    if processes > 1:
        reason = "runs in a single process, which may use many devices"
        raise ConfigError(
            Problem("task.name", reason, value=config.task.name, hint=f"{processes} processes were started")
        )
    if config.checkpoint.load_parameters is None:
        accepted = "a run or checkpoint folder, a Hugging Face folder, a .gguf file, or package:NAME"
        reason = f"is required: task={config.task.name} needs trained weights"
        raise ConfigError(Problem("checkpoint.load_parameters", reason, value=None, accepted=accepted))
    check_same_model(config, config.checkpoint.load_parameters)


def weight_quantization(config: Config) -> Quantization:
    """Return the storage format of the weights: as configured, otherwise as stored in the checkpoint."""
    quantization = config.quantization
    if training_kinds := sorted(kind.value for kind in quantization.kinds if kind in TRAINING_KINDS):
        accepted = ", ".join(kind.value for kind in STORED_KINDS)
        hint = "remove quantization to use the format of the checkpoint"
        reason = f"is only supported for training ({', '.join(training_kinds)})"
        raise ConfigError(Problem("quantization.kind", reason, value=quantization.kind, accepted=accepted, hint=hint))
    source = config.checkpoint.load_parameters
    stored = None if source is None else stored_format("checkpoint.load_parameters", source)
    if stored is None or quantization.kinds:
        return quantization
    log.info("%s is quantized to %s; the weights are used in that format", source, stored.kind.value)
    return stored


def build_model(config: Config) -> tuple[ModelDef, Sharder]:
    """Build the model with quantized weights if configured, and the sharder of its mesh."""
    sharder = Sharder(build_mesh(config.mesh), config.mesh.rules)
    decoder = model.build(config.model, quantization=weight_quantization(config))
    sharder.check(decoder.axes, decoder.shapes)
    return decoder, sharder


def load_params(config: Config, decoder: ModelDef, sharder: Sharder) -> Any:
    """Load the weights of checkpoint.load_parameters.

    They are stored in the compute dtype, to which every matmul would cast them anyway, or quantized if configured.
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
    decoder, sharder = build_model(config)
    params = load_params(config, decoder, sharder)
    return Engine(decoder, params, prompts.tokenizer, engine, sharder=sharder, eos=prompts.eos_ids)
