"""Read and write maxhydra checkpoints, which Orbax stores: locate them, check them against a model, stream weights out.

`write_checkpoint` writes slice by slice, since Orbax needs all arrays in memory at once: Orbax saves the tree with
arrays of one element, then each array is replaced in the same store by an empty one of its real size and filled.
"""

import itertools
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from omegaconf import OmegaConf

from maxhydra.config import ConfigError, Problem
from maxhydra.config.compose.validate import section_from
from maxhydra.config.migrations import migrate_config
from maxhydra.config.schema.quantization import Quantization
from maxhydra.convert.streaming import Arrays
from maxhydra.model import ModelDef, store_weight_slice
from maxhydra.model.stored_params import current_path, rename_keys, restore_keys, stored_names

Tree = Any
PARAMS = "params"
FORMAT = "quantization.yaml"
# Orbax logs every operation, including tracebacks of its threads; our own errors report what a user needs.
for noisy in ("absl", "asyncio"):
    logging.getLogger(noisy).setLevel(logging.CRITICAL)


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, in ascending order."""
    if not folder.is_dir():
        return []
    return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit() and entry.is_dir())


def find_checkpoint(key: str, location: str) -> Path:
    """Resolve a run folder, its checkpoints folder or one checkpoint to one checkpoint, the latest if several."""
    root = Path(location).expanduser().resolve()
    if (root / PARAMS).is_dir():
        return root
    for folder in (root / "checkpoints", root):
        if steps := checkpoint_steps(folder):
            return folder / str(steps[-1])
    reason = "contains no checkpoint" if root.is_dir() else "is not a folder"
    accepted = "a run folder, its checkpoints folder, or one checkpoint in it"
    raise ConfigError(Problem(key, reason, value=location, accepted=accepted))


def read_parameters(key: str, path: Path, abstract_params: Tree) -> Tree:
    """Restore the weights of a checkpoint with the shapes, dtypes and shardings of `abstract_params`."""
    with read_errors_as_config_errors(key, path):
        names = require_same_shapes(path, PARAMS, abstract_params)
        abstract_params = rename_keys(abstract_params, names)
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
            items = reader.restore(path, args=ocp.args.Composite(params=ocp.args.StandardRestore(abstract_params)))
    return restore_keys(items.params, names)


@contextmanager
def read_errors_as_config_errors(key: str, path: Path) -> Iterator[None]:
    """Raise read errors as ConfigError about the config field `key`, e.g. for a partially copied checkpoint."""
    try:
        yield
    except (ConfigError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # Orbax and its storage backends raise any type
        reason = f"cannot be read: {one_line_message(error)}"
        hint = "copy it again, or name an earlier checkpoint, RUN/checkpoints/STEP"
        raise ConfigError(Problem(key, reason, value=path, hint=hint)) from error


def one_line_message(error: BaseException) -> str:
    """The message of an error on one line of at most 200 characters."""
    text = str(error).strip() or type(error).__name__
    return re.sub(r"\s+", " ", text)[:200]


def write_format(folder: Path, quantization: Quantization) -> None:
    """Store the quantization of a checkpoint's weights."""
    (folder / FORMAT).write_text(OmegaConf.to_yaml(OmegaConf.structured(quantization)), encoding="utf-8")


def read_format(checkpoint: Path) -> Quantization | None:
    """The quantization stored by `write_format`; None if the weights are not quantized."""
    path = checkpoint / FORMAT
    if not path.is_file():
        return None
    values = OmegaConf.to_container(OmegaConf.create(path.read_text(encoding="utf-8")))
    assert isinstance(values, dict)
    current = migrate_config({str(key): value for key, value in values.items()}, "quantization")
    return section_from(Quantization, current, path="quantization", source=str(path))


def require_same_shapes(path: Path, item: str, expected_tree: Tree) -> dict[str, str]:
    """Raise ConfigError if the arrays of a checkpoint differ in name or shape; names the first that does.

    Returns the parameter names that the checkpoint stores under their names of an earlier version, for `rename_keys`.
    """
    with ocp.StandardCheckpointer() as reader:
        stored = reader.metadata(path / item).item_metadata
    if stored is None:
        raise ValueError(f"the list of arrays in {item} is missing or damaged")
    stored_leaves = _leaves_by_name(stored.tree)
    stored_shapes = {current_path(name): tuple(leaf.shape) for name, leaf in stored_leaves.items()}
    serialized = ocp.tree.serialize_tree(expected_tree)
    expected_shapes = {name: tuple(leaf.shape) for name, leaf in _leaves_by_name(serialized).items()}
    for name in sorted({*stored_shapes, *expected_shapes}):
        if stored_shapes.get(name) == expected_shapes.get(name):
            continue
        shape, expected = stored_shapes.get(name, "missing"), expected_shapes.get(name, "no such array")
        what = "model" if item == PARAMS else "optimizer or state"
        reason = f"belongs to a different {what}: {item}/{name} is {shape}, this run has {expected}"
        hint = "choose another run.name, or the model that it was trained with"
        if item == "rest":
            hint = "choose another run.name, or load only the weights with checkpoint.load_parameters"
        raise ConfigError(Problem("checkpoint", reason, value=path, hint=hint))
    return stored_names(stored_leaves)


def _leaves_by_name(tree: Tree) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: leaf is None)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in leaves
        if leaf is not None and leaf != {} and leaf != []
    }


def write_checkpoint(folder: Path, model: ModelDef, arrays: Arrays, *, dtype: np.dtype) -> None:
    """Write weights into an existing empty folder, as a checkpoint for checkpoint.load_parameters.

    `arrays` are the parameters of the model's base. Those that the model quantizes are quantized here, and the folder
    records how.
    """
    placeholders = jax.tree.map(lambda leaf: np.zeros((1,) * leaf.ndim, leaf.dtype), _stored_shapes(model, dtype))
    with ocp.StandardCheckpointer() as writer:
        writer.save(folder / PARAMS, placeholders)
    for path, _ in jax.tree_util.tree_leaves_with_path(model.base.shapes):
        keys = tuple(entry.key for entry in path)
        stack_shape = arrays.stack_shape(keys)
        stores = _open_stores(folder / PARAMS, model, keys, stack_dims=len(stack_shape))
        for index in itertools.product(*map(range, stack_shape)):
            weight = jax.device_put(arrays.read_slice(keys, index).astype(dtype))
            stored = store_weight_slice(model, keys, weight, counted=len(stack_shape))
            for name, array in _by_name(stored).items():
                stores[name][index].write(np.asarray(array)).result()
    if model.is_packed:
        assert model.quantization is not None
        write_format(folder, model.quantization)


def _stored_shapes(model: ModelDef, dtype: np.dtype) -> Tree:
    """Shapes and dtypes of the arrays to write: unquantized ones in `dtype`, quantized ones in their own dtypes."""
    unquantized = {path for path, _ in jax.tree_util.tree_leaves_with_path(model.base.shapes)}
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, dtype if path in unquantized else leaf.dtype), model.shapes
    )


def _open_stores(root: Path, model: ModelDef, keys: tuple[str, ...], *, stack_dims: int) -> dict[str, Any]:
    """Empty arrays for a parameter of the model's base, by name if its quantized form has several."""
    shapes = model.shapes
    for key in keys:
        shapes = shapes[key]
    return {
        name: _recreate(root, (*keys, *filter(None, [name])), leaf.shape, (*[1] * stack_dims, *leaf.shape[stack_dims:]))
        for name, leaf in _by_name(shapes).items()
    }


def _by_name(parameter: Tree) -> dict[str, Any]:
    """Arrays of a quantized parameter by name; an unquantized one has the name ""."""
    return parameter if isinstance(parameter, dict) else {"": parameter}


def _recreate(root: Path, keys: tuple[str, ...], shape: tuple[int, ...], chunk: tuple[int, ...]) -> Any:
    """Replace a stored array with an empty one of another shape and the same dtype and compression."""
    kvstore = {"driver": "ocdbt", "base": f"file://{root}/", "path": ".".join(keys) + "/"}
    old = ts.open({"driver": "zarr", "kvstore": kvstore}).result().spec().to_json()["metadata"]
    copied = {name: old[name] for name in ("compressor", "dimension_separator", "dtype", "fill_value", "order")}
    spec = {"driver": "zarr", "kvstore": kvstore, "create": True, "delete_existing": True}
    metadata = {**copied, "shape": list(shape), "chunks": [max(size, 1) for size in chunk]}
    return ts.open({**spec, "metadata": metadata}).result()
