"""Weights from wherever a config says they are: our own checkpoints, a Hugging Face folder, a GGUF file."""

import logging
import time
from typing import Any

import jax
from jax.typing import DTypeLike

from maxhydra.config import ConfigError, Problem
from maxhydra.convert.fill import fill, on_first_device
from maxhydra.convert.gguf import gguf_source
from maxhydra.convert.hf import hf_source, is_hf_folder
from maxhydra.convert.stored import find_checkpoint, read_parameters
from maxhydra.model import ModelDef
from maxhydra.modelfiles import locate

Tree = Any
ACCEPTED = "a run or checkpoint folder, a Hugging Face folder with safetensors, a .gguf file, or package:NAME"
log = logging.getLogger("maxhydra")


def load_weights(
    source: str,
    model: ModelDef,
    *,
    shardings: Tree,
    dtype: DTypeLike,
    key: str = "checkpoint.load_parameters",
) -> Tree:
    """The model's weights, each shard where `shardings` puts it (None: all on the first device), all in one dtype.

    Anything that is not this model's is refused before memory is taken; `key` is the config field that names `source`.
    """
    began = time.monotonic()
    shardings = on_first_device(model) if shardings is None else shardings
    path = locate(key, source)
    if not path.exists():
        raise ConfigError(Problem(key, "nothing is there", value=source, accepted=ACCEPTED))
    if path.is_file():
        params = fill(gguf_source(key, source, path), model, shardings=shardings, dtype=dtype)
    elif is_hf_folder(path):
        params = fill(hf_source(key, source, path), model, shardings=shardings, dtype=dtype)
    else:
        params = read_parameters(find_checkpoint(key, source), _abstract(model, shardings, dtype))
    log.info("weights of %s in %.1f s", source, time.monotonic() - began)
    return params


def _abstract(model: ModelDef, shardings: Tree, dtype: DTypeLike) -> Tree:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding), model.shapes, shardings
    )
