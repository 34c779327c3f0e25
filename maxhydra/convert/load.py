"""Weights from wherever a config says they are: our own checkpoints, a Hugging Face folder, a GGUF file."""

import logging
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from maxhydra.config import ConfigError, Problem
from maxhydra.convert.derive import is_hf_folder
from maxhydra.convert.fill import fill, on_first_device
from maxhydra.convert.gguf import gguf_source
from maxhydra.convert.hf import hf_source
from maxhydra.convert.origin import origin
from maxhydra.convert.peft_read import PeftFolder, is_peft_folder, open_peft
from maxhydra.convert.source import Source
from maxhydra.convert.stored import find_checkpoint, read_parameters
from maxhydra.model import ModelDef, build, join, kept, mapped, merged, split
from maxhydra.modelfiles import locate

Tree = Any
ACCEPTED = "a run or checkpoint folder, a Hugging Face or PEFT folder with safetensors, a .gguf file, or package:NAME"
log = logging.getLogger("maxhydra")


def load_weights(
    source: str,
    model: ModelDef,
    *,
    shardings: Tree,
    dtype: DTypeLike,
    key: str = "checkpoint.load_parameters",
) -> Tree:
    """The weights of the model's base in a dtype, each shard where `shardings` puts it; None: on the first device.

    What the model keeps otherwise under its adapter is packed as soon as it is read; a run's adapter is merged into the
    weights it was trained around. Anything that is not this model's is refused before memory is taken; `key` is the
    config field that names `source`.
    """
    began = time.monotonic()
    base, keep = model.base, partial(kept, model)
    shardings = on_first_device(base) if shardings is None else shardings
    foreign = foreign_source(key, source)
    if foreign is not None:
        params = fill(foreign, base, shardings=shardings, dtype=dtype, keep=keep)
    else:
        params = mapped(_own(key, source, base, shardings=shardings, dtype=dtype), keep)
    log.info("weights of %s in %.1f s", source, time.monotonic() - began)
    return params


def foreign_source(key: str, source: str) -> Source | None:
    """The weights of another project at a place; None where a run of ours should be."""
    path = locate(key, source)
    if not path.exists():
        raise ConfigError(Problem(key, "nothing is there", value=source, accepted=ACCEPTED))
    if path.is_file():
        return gguf_source(key, source, path)
    return hf_source(key, source, path) if is_hf_folder(path) else None


def _own(key: str, source: str, model: ModelDef, *, shardings: Tree, dtype: DTypeLike) -> Tree:
    """The weights of a run of ours, with its adapter merged where it trained one, or of an adapter of PEFT."""
    path = locate(key, source)
    if is_peft_folder(path):
        return _peft(open_peft(key, source, path), model, shardings=shardings, dtype=dtype)
    checkpoint = find_checkpoint(key, source)
    found = origin(key, checkpoint)
    if found is None:
        return read_parameters(checkpoint, _abstract(model.shapes, shardings, dtype))
    adapted = build(model.config, found.adapter)
    trained = read_adapter(key, source, adapted, mesh=jax.tree.leaves(shardings)[0].mesh)
    base = load_weights(found.base, adapted, shardings=shardings, dtype=found.dtype, key=key)
    return _merged(adapted, trained, base, shardings=shardings, dtype=dtype)


def _peft(folder: PeftFolder, model: ModelDef, *, shardings: Tree, dtype: DTypeLike) -> Tree:
    """The weights that an adapter of PEFT was trained around, with what it adds."""
    foreign = foreign_source(folder.key, folder.base)
    if foreign is None:
        raise folder.problem(f"is an adapter around {folder.base}, which is no Hugging Face folder")
    adapted = build(model.config, folder.adapter(model, foreign.table))
    trained = folder.trained(model, foreign.table)
    base = fill(foreign, model, shardings=shardings, dtype="float32")
    return _merged(adapted, trained, base, shardings=shardings, dtype=dtype)


def _merged(adapted: ModelDef, trained: Tree, base: Tree, *, shardings: Tree, dtype: DTypeLike) -> Tree:
    merge = jax.jit(
        lambda trained, base: merged(adapted, join(trained, base), dtype=jnp.dtype(dtype)), out_shardings=shardings
    )
    return merge(trained, base)


def read_adapter(key: str, source: str, model: ModelDef, *, mesh: Mesh | None = None) -> Tree:
    """What a run of ours trained as the adapter of this model, on every device of a mesh, since it is small; None: on
    the first device."""
    shapes = split(model.shapes)[0]
    mesh = mesh or jax.tree.leaves(on_first_device(model))[0].mesh
    everywhere = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), shapes)
    return read_parameters(find_checkpoint(key, source), _abstract(shapes, everywhere, "float32"))


def _abstract(shapes: Tree, shardings: Tree, dtype: DTypeLike) -> Tree:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding), shapes, shardings
    )
