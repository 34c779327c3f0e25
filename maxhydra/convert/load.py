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
from maxhydra.config.schema.quantization import Quantization
from maxhydra.convert.adapter_lineage import origin
from maxhydra.convert.gguf import gguf_source
from maxhydra.convert.hf import hf_source
from maxhydra.convert.hf_config import is_hf_folder
from maxhydra.convert.orbax_io import find_checkpoint, read_format, read_parameters
from maxhydra.convert.peft import PeftFolder, is_peft_folder, open_peft
from maxhydra.convert.source import Source
from maxhydra.convert.stream_in import fill, on_first_device
from maxhydra.model import ModelDef, build, kept, mapped, merge_trees, merged, split_trainable
from maxhydra.modelfiles import locate
from maxhydra.sharding import is_axes

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

    What the model keeps in fewer bits is packed as soon as it is read; a checkpoint that holds it so already is read as
    it is. A run's adapter is merged into the weights it was trained around. Anything that is not this model's is
    refused before memory is taken; `key` is the config field that names `source`.
    """
    began = time.monotonic()
    base, keep = model.base, partial(kept, model)
    shardings = on_first_device(base) if shardings is None else shardings
    if (packed := stored_format(key, source)) is not None:
        require_format(key, source, packed, model)
        params = read_parameters(key, find_checkpoint(key, source), _packed(model, shardings, dtype))
    elif (foreign := open_external(key, source)) is not None:
        params = fill(foreign, base, shardings=shardings, dtype=dtype, keep=keep)
    else:
        params = mapped(_own(key, source, base, shardings=shardings, dtype=dtype), keep)
    log.info("weights of %s in %.1f s", source, time.monotonic() - began)
    return params


def stored_format(key: str, source: str) -> Quantization | None:
    """The formats in which a checkpoint of ours keeps its weights; None for plain numbers, and for files of others."""
    path = locate(key, source)
    if not path.is_dir() or is_hf_folder(path) or is_peft_folder(path):
        return None
    return read_format(find_checkpoint(key, source))


def require_format(key: str, source: str, stored: Quantization, model: ModelDef) -> None:
    """Refuse a checkpoint that keeps its weights otherwise than the model does: rounded twice they would be others."""
    told = stored.kind.value
    if not model.is_packed or model.adapter is not None:
        reason = f"holds weights in {told}, which are decoded with as they are and nothing else"
        hint = "give the weights from which it was made"
        raise ConfigError(Problem(key, reason, value=source, accepted="task=decode, serve or score", hint=hint))
    if model.quantization != stored:
        assert model.quantization is not None
        reason = f"differs from that of {source}, which holds weights in {told}"
        hint = f"leave quantization out: it is then taken from {source}"
        raise ConfigError(Problem("quantization.kind", reason, value=model.quantization.kind, hint=hint))


def open_external(key: str, source: str) -> Source | None:
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
        return read_parameters(key, checkpoint, _abstract(model.shapes, shardings, dtype))
    adapted = build(model.config, found.adapter)
    trained = read_adapter(key, source, adapted, mesh=jax.tree.leaves(shardings)[0].mesh)
    base = load_weights(found.base, adapted, shardings=shardings, dtype=found.dtype, key=key)
    return _merged(adapted, trained, base, shardings=shardings, dtype=dtype)


def _peft(folder: PeftFolder, model: ModelDef, *, shardings: Tree, dtype: DTypeLike) -> Tree:
    """The weights that an adapter of PEFT was trained around, with what it adds."""
    foreign = open_external(folder.key, folder.base)
    if foreign is None:
        raise folder.problem(f"is an adapter around {folder.base}, which is no Hugging Face folder")
    adapted = build(model.config, folder.adapter(model, foreign.table))
    trained = folder.trained(model, foreign.table)
    base = fill(foreign, model, shardings=shardings, dtype="float32")
    return _merged(adapted, trained, base, shardings=shardings, dtype=dtype)


def _merged(adapted: ModelDef, trained: Tree, base: Tree, *, shardings: Tree, dtype: DTypeLike) -> Tree:
    merge = jax.jit(
        lambda trained, base: merged(adapted, merge_trees(trained, base), dtype=jnp.dtype(dtype)),
        out_shardings=shardings,
    )
    return merge(trained, base)


def read_adapter(key: str, source: str, model: ModelDef, *, mesh: Mesh | None = None) -> Tree:
    """What a run of ours trained as the adapter of this model, on every device of a mesh, since it is small; None: on
    the first device."""
    shapes = split_trainable(model.shapes)[0]
    mesh = mesh or jax.tree.leaves(on_first_device(model))[0].mesh
    everywhere = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), shapes)
    return read_parameters(key, find_checkpoint(key, source), _abstract(shapes, everywhere, "float32"))


def _packed(model: ModelDef, shardings: Tree, dtype: DTypeLike) -> Tree:
    """What packed weights are read onto, given the shardings of plain ones: each axis is split as it is there."""

    def walk(shapes: Tree, axes: Tree, plain: Tree, sharding: Tree) -> Tree:
        if not is_axes(plain):
            return {name: walk(below, axes[name], plain[name], sharding[name]) for name, below in shapes.items()}
        if not isinstance(shapes, dict):
            return jax.ShapeDtypeStruct(shapes.shape, dtype, sharding=sharding)
        split_trainable = dict(zip(plain, sharding.spec, strict=False))
        own = {name: PartitionSpec(*map(split_trainable.get, axes[name])) for name in shapes}
        return {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(sharding.mesh, own[name]))
            for name, leaf in shapes.items()
        }

    return walk(model.shapes, model.axes, model.base.axes, shardings)


def _abstract(shapes: Tree, shardings: Tree, dtype: DTypeLike) -> Tree:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding), shapes, shardings
    )
