"""Weights as a checkpoint of ours, written part by part: Orbax itself wants all arrays in memory at once.

Orbax writes the tree with an array of one number for each weight; then each array is made anew at its size, in the
same store, and filled.
"""

import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from maxhydra.convert.arrays import Arrays
from maxhydra.convert.orbax_io import write_format
from maxhydra.model import ModelDef, part_kept

Tree = Any
ITEM = "params"


def write_own(folder: Path, model: ModelDef, arrays: Arrays, *, dtype: np.dtype) -> None:
    """Write a folder that is there and empty, which checkpoint.load_parameters takes.

    `arrays` are those of the model's base; what the model keeps in fewer bits is packed on its way, and the folder
    says how.
    """
    single = jax.tree.map(lambda leaf: np.zeros((1,) * leaf.ndim, leaf.dtype), _stored(model, dtype))
    with ocp.StandardCheckpointer() as writer:
        writer.save(folder / ITEM, single)
    for path, _ in jax.tree_util.tree_leaves_with_path(model.base.shapes):
        keys = tuple(entry.key for entry in path)
        counted = arrays.counted(keys)
        places = _places(folder / ITEM, model, keys, counted=len(counted))
        for index in itertools.product(*map(range, counted)):
            part = jax.device_put(arrays.part(keys, index).astype(dtype))
            kept = part_kept(model, keys, part, counted=len(counted))
            for name, array in _named(kept).items():
                places[name][index].write(np.asarray(array)).result()
    if model.is_packed:
        assert model.quantization is not None
        write_format(folder, model.quantization)


def _stored(model: ModelDef, dtype: np.dtype) -> Tree:
    """Shapes and types of what is written: plain numbers in the dtype, others as they are kept."""
    is_plain = {path for path, _ in jax.tree_util.tree_leaves_with_path(model.base.shapes)}
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, dtype if path in is_plain else leaf.dtype), model.shapes
    )


def _places(store: Path, model: ModelDef, keys: tuple[str, ...], *, counted: int) -> dict[str, Any]:
    """The arrays that take a weight of the model's base, empty; by name where there are several."""
    shapes = model.shapes
    for key in keys:
        shapes = shapes[key]
    return {
        name: _made_anew(store, (*keys, *filter(None, [name])), leaf.shape, (*[1] * counted, *leaf.shape[counted:]))
        for name, leaf in _named(shapes).items()
    }


def _named(kept: Tree) -> dict[str, Any]:
    """Arrays of a weight by name; one that is kept plainly has none."""
    return kept if isinstance(kept, dict) else {"": kept}


def _made_anew(store: Path, keys: tuple[str, ...], shape: tuple[int, ...], chunk: tuple[int, ...]) -> Any:
    """An empty array in the place of one of another size, with its type and way of packing."""
    kvstore = {"driver": "ocdbt", "base": f"file://{store}/", "path": ".".join(keys) + "/"}
    old = ts.open({"driver": "zarr", "kvstore": kvstore}).result().spec().to_json()["metadata"]
    kept = {name: old[name] for name in ("compressor", "dimension_separator", "dtype", "fill_value", "order")}
    spec = {"driver": "zarr", "kvstore": kvstore, "create": True, "delete_existing": True}
    metadata = {**kept, "shape": list(shape), "chunks": [max(size, 1) for size in chunk]}
    return ts.open({**spec, "metadata": metadata}).result()
