"""Opens what answers: the tokenizer first, then the weights on the mesh, then the engine over both.

A mistake shows as early as it can: the tokenizer takes a second, the weights minutes.
"""

import logging

import jax.numpy as jnp

from maxhydra import model
from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.decode import Engine as EngineConfig
from maxhydra.config.quantization import QuantizationKind
from maxhydra.convert.load import load_weights
from maxhydra.decode.engine import Engine
from maxhydra.decode.origin import check_origin
from maxhydra.decode.prompts import Prompts
from maxhydra.sharding import Sharder, build_mesh

log = logging.getLogger("maxhydra")


def open_prompts(config: Config, *, processes: int) -> Prompts:
    """The tokenizer, after all that can be said without weights."""
    check_start(config, processes=processes)
    return Prompts(config.data, vocab_size=config.model.vocab_size)


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


def open_engine(config: Config, engine: EngineConfig, prompts: Prompts) -> Engine:
    """Load the weights and start the engine.

    Weights are kept in the format of the computation, into which every product would turn them anyway, or in fewer
    bits where the config says so.
    """
    assert config.checkpoint.load_parameters is not None
    sharder = Sharder(build_mesh(config.mesh), config.mesh.rules)
    if config.quantization.kind is QuantizationKind.fp8:
        hint = "try quantization=int8_weights, or leave it out"
        raise ConfigError(Problem("quantization.kind", "is a way to train, not to decode", value="fp8", hint=hint))
    decoder = model.build(config.model, quantization=config.quantization)
    sharder.check(decoder.axes, decoder.shapes)
    params = load_weights(
        config.checkpoint.load_parameters,
        decoder,
        shardings=sharder.tree(decoder.base.axes),
        dtype=jnp.dtype(config.model.dtypes.compute.value),
    )
    return Engine(decoder, params, prompts.tokenizer, engine, sharder=sharder, eos=prompts.ends)
