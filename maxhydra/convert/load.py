"""Load weights from any supported location: a maxhydra run, a Hugging Face or PEFT folder, or a GGUF file."""

import dataclasses
import logging
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.model import Head
from maxhydra.config.schema.quantization import Adapter, Quantization
from maxhydra.convert.adapter_lineage import ACCEPTED, find_adapter_lineage
from maxhydra.convert.gguf import gguf_source
from maxhydra.convert.hf import hf_source
from maxhydra.convert.hf_config import is_hf_folder
from maxhydra.convert.hf_write import find_family
from maxhydra.convert.orbax_io import PARAMS, find_checkpoint, read_format, read_parameters, stored_shapes
from maxhydra.convert.peft import SETTINGS, PeftFolder, is_peft_folder, open_peft
from maxhydra.convert.source import Source
from maxhydra.convert.streaming import Arrays, FileArrays, InMemoryArrays, single_device_shardings, stream_weights
from maxhydra.model import ModelDef, build, map_leaves, merge_adapter, merge_trees, split_trainable, store_weight
from maxhydra.model.lora import SCORE
from maxhydra.modelfiles import locate
from maxhydra.sharding import is_axes

Tree = Any
log = logging.getLogger("maxhydra")
ADAPTERS = "a PEFT folder, or a run that was trained with adapter=lora or adapter=qlora"


def load_weights(
    source: str,
    model: ModelDef,
    *,
    shardings: Tree,
    dtype: DTypeLike,
    key: str = "checkpoint.load_parameters",
) -> Tree:
    """Load the weights of the model's base in `dtype`, with these shardings; None puts them on the first device.

    Weights that the model stores quantized are quantized as soon as they are read; a checkpoint that is already
    quantized is loaded unchanged. A run's adapter is merged into its base weights. The head of a language model is
    replaced by a score head of zeros if the model has one. A source that does not match the
    model raises ConfigError before device memory is allocated; `key` is the config field that names `source`.
    """
    if model.config.head is Head.score and (head := source_head(key, source)) is not Head.score:
        return _load_language_model(source, model, head, shardings=shardings, dtype=dtype, key=key)
    start = time.monotonic()
    base, quantize = model.base, partial(store_weight, model)
    shardings = single_device_shardings(base) if shardings is None else shardings
    if (quantization := stored_format(key, source)) is not None:
        require_format(key, source, quantization, model)
        params = read_parameters(key, find_checkpoint(key, source), _abstract_quantized(model, shardings, dtype))
    elif (external := open_external(key, source)) is not None:
        params = stream_weights(external, base, shardings=shardings, dtype=dtype, transform=quantize)
    else:
        params = map_leaves(_load_run_or_peft(key, source, base, shardings=shardings, dtype=dtype), quantize)
    log.info("loaded weights of %s in %.1f s", source, time.monotonic() - start)
    return params


def source_head(key: str, source: str) -> Head:
    """The head of the weights in a location."""
    path = locate(key, source)
    if is_peft_folder(path):
        return source_head(key, open_peft(key, source, path).base)
    if (external := open_external(key, source)) is not None:
        return external.model.head
    names = stored_shapes(checkpoint := find_checkpoint(key, source), PARAMS)
    if f"{SCORE}/kernel" in names:
        return Head.score
    if (lineage := find_adapter_lineage(key, checkpoint)) is not None:
        return source_head(key, lineage.base)
    return Head.separate if any(name.startswith("head/") for name in names) else Head.tied


def _load_language_model(
    source: str, model: ModelDef, head: Head, *, shardings: Tree, dtype: DTypeLike, key: str
) -> Tree:
    """Load a language model as a reward model."""
    language_model = dataclasses.replace(model, config=dataclasses.replace(model.config, head=head))
    shardings = single_device_shardings(model.base) if shardings is None else shardings
    others = {name: tree for name, tree in shardings.items() if name != SCORE}
    if head is Head.separate:
        table = shardings["embedding"]["table"]
        spec = PartitionSpec(*(*table.spec, None, None)[1::-1])
        others["head"] = {"kernel": NamedSharding(table.mesh, spec)}
    weights = load_weights(source, language_model, shardings=others, dtype=dtype, key=key)
    weights.pop("head", None)
    shape, sharding = model.base.shapes[SCORE]["kernel"].shape, shardings[SCORE]["kernel"]
    return {**weights, SCORE: {"kernel": jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)()}}


def open_arrays(key: str, source: str, model: ModelDef, *, dtype: DTypeLike) -> Arrays:
    """Open a source of the model's weights for slice-wise reading; maxhydra checkpoints are loaded as a whole."""
    external = open_external(key, source)
    if external is not None:
        return FileArrays(external, model)
    return InMemoryArrays(load_weights(source, model, shardings=None, dtype=dtype, key=key))


def stored_format(key: str, source: str) -> Quantization | None:
    """The quantization of a maxhydra checkpoint; None if it is not quantized, and for external checkpoints."""
    path = locate(key, source)
    if not path.is_dir() or is_hf_folder(path) or is_peft_folder(path):
        return None
    return read_format(key, find_checkpoint(key, source))


def require_format(key: str, source: str, stored: Quantization, model: ModelDef) -> None:
    """Raise ConfigError if a checkpoint is not quantized as the model is: weights must not be rounded twice."""
    kind = stored.kind.value
    if not model.is_packed or model.adapter is not None:
        reason = f"is quantized to {kind} and can only be used for inference"
        hint = "load the unquantized weights from which it was made"
        raise ConfigError(Problem(key, reason, value=source, accepted="task=decode, serve or score", hint=hint))
    if not model.is_quantized_as(stored):
        assert model.quantization is not None
        reason = f"differs from the quantization of {source}, which is {kind}"
        hint = f"omit quantization: it is then taken from {source}"
        raise ConfigError(Problem("quantization.kind", reason, value=model.quantization.kind, hint=hint))


def open_external(key: str, source: str) -> Source | None:
    """Open a Hugging Face folder or GGUF file; None for other folders, which should be maxhydra runs."""
    path = locate(key, source)
    if not path.exists():
        raise ConfigError(Problem(key, "does not exist", value=source, accepted=ACCEPTED))
    if path.is_file():
        return gguf_source(key, source, path)
    return hf_source(key, source, path) if is_hf_folder(path) else None


def _load_run_or_peft(key: str, source: str, model: ModelDef, *, shardings: Tree, dtype: DTypeLike) -> Tree:
    """Load the weights of a maxhydra run, with its adapter merged if it trained one, or of a PEFT adapter."""
    path = locate(key, source)
    if is_peft_folder(path):
        return _load_peft(open_peft(key, source, path), model, shardings=shardings, dtype=dtype)
    checkpoint = find_checkpoint(key, source)
    lineage = find_adapter_lineage(key, checkpoint)
    if lineage is None:
        return read_parameters(key, checkpoint, _abstract(model.shapes, shardings, dtype))
    adapted = build(model.config, lineage.adapter)
    trained = read_adapter(key, source, adapted, mesh=jax.tree.leaves(shardings)[0].mesh)
    base = load_weights(lineage.base, adapted, shardings=shardings, dtype=lineage.dtype, key=key)
    return _merge_adapter(adapted, trained, base, shardings=shardings, dtype=dtype)


def _load_peft(folder: PeftFolder, model: ModelDef, *, shardings: Tree, dtype: DTypeLike) -> Tree:
    """Load the base weights of a PEFT adapter and merge the adapter into them."""
    external = open_external(folder.key, folder.base)
    if external is None:
        hint = f"export its base with task=convert, and name that folder as base_model_name_or_path in {SETTINGS}"
        raise folder.problem(f"is an adapter of {folder.base}, which is not a Hugging Face folder", hint=hint)
    adapted = build(model.config, folder.adapter(model, external.table))
    trained = folder.trained(model, external.table)
    base = stream_weights(external, model, shardings=shardings, dtype="float32")
    return _merge_adapter(adapted, trained, base, shardings=shardings, dtype=dtype)


def load_adapter(key: str, source: str, model: ModelDef) -> tuple[Adapter, Tree]:
    """The adapter of a PEFT folder or a run, and its weights for this model, which has none itself."""
    path = locate(key, source)
    if not path.exists():
        raise ConfigError(Problem(key, "does not exist", value=source, accepted=ADAPTERS))
    if is_peft_folder(path):
        folder, table = open_peft(key, source, path), find_family(model, None)
        return folder.adapter(model, table), folder.trained(model, table)
    lineage = None if is_hf_folder(path) else find_adapter_lineage(key, find_checkpoint(key, source))
    if lineage is None:
        raise ConfigError(Problem(key, "contains no adapter", value=source, accepted=ADAPTERS))
    return lineage.adapter, read_adapter(key, source, build(model.config, lineage.adapter))


def _merge_adapter(adapted: ModelDef, trained: Tree, base: Tree, *, shardings: Tree, dtype: DTypeLike) -> Tree:
    merge = jax.jit(
        lambda trained, base: merge_adapter(adapted, merge_trees(trained, base), dtype=jnp.dtype(dtype)),
        out_shardings=shardings,
    )
    return merge(trained, base)


def read_adapter(key: str, source: str, model: ModelDef, *, mesh: Mesh | None = None) -> Tree:
    """Read the adapter that a run trained for this model, replicated over a mesh; None: on the first device."""
    shapes = split_trainable(model.shapes)[0]
    mesh = mesh or jax.tree.leaves(single_device_shardings(model))[0].mesh
    replicated = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), shapes)
    return read_parameters(key, find_checkpoint(key, source), _abstract(shapes, replicated, "float32"))


def _abstract_quantized(model: ModelDef, shardings: Tree, dtype: DTypeLike) -> Tree:
    """Shapes, dtypes and shardings of quantized weights: each logical axis is sharded as in the unquantized weight."""

    def walk(shapes: Tree, axes: Tree, base_axes: Tree, sharding: Tree) -> Tree:
        if not is_axes(base_axes):
            return {name: walk(inner, axes[name], base_axes[name], sharding[name]) for name, inner in shapes.items()}
        if not isinstance(shapes, dict):
            return jax.ShapeDtypeStruct(shapes.shape, dtype, sharding=sharding)
        mesh_axis_of = dict(zip(base_axes, sharding.spec, strict=False))
        specs = {name: PartitionSpec(*map(mesh_axis_of.get, axes[name])) for name in shapes}
        return {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(sharding.mesh, specs[name]))
            for name, leaf in shapes.items()
        }

    return walk(model.shapes, model.axes, model.base.axes, shardings)


def _abstract(shapes: Tree, shardings: Tree, dtype: DTypeLike) -> Tree:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding), shapes, shardings
    )
