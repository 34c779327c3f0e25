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
from maxhydra.model import ModelDef

Tree = Any
ITEM = "params"


def write_own(folder: Path, model: ModelDef, arrays: Arrays, *, dtype: np.dtype) -> None:
    """Write a folder that is there and empty, which checkpoint.load_parameters takes."""
    single = jax.tree.map(lambda leaf: np.zeros((1,) * leaf.ndim, dtype), model.shapes)
    with ocp.StandardCheckpointer() as writer:
        writer.save(folder / ITEM, single)
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.shapes):
        keys = tuple(entry.key for entry in path)
        counted = arrays.counted(keys)
        parts = len(counted)
        array = _made_anew(folder / ITEM, keys, leaf.shape, (*[1] * parts, *leaf.shape[parts:]))
        for index in itertools.product(*map(range, counted)):
            array[index].write(arrays.part(keys, index).astype(dtype)).result()


def _made_anew(store: Path, keys: tuple[str, ...], shape: tuple[int, ...], chunk: tuple[int, ...]) -> Any:
    """An empty array in the place of one of another size, with its type and way of packing."""
    kvstore = {"driver": "ocdbt", "base": f"file://{store}/", "path": ".".join(keys) + "/"}
    old = ts.open({"driver": "zarr", "kvstore": kvstore}).result().spec().to_json()["metadata"]
    kept = {name: old[name] for name in ("compressor", "dimension_separator", "dtype", "fill_value", "order")}
    spec = {"driver": "zarr", "kvstore": kvstore, "create": True, "delete_existing": True}
    metadata = {**kept, "shape": list(shape), "chunks": [max(size, 1) for size in chunk]}
    return ts.open({**spec, "metadata": metadata}).result()
