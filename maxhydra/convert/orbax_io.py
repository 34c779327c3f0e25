"""Read and write maxhydra checkpoints, which Orbax stores: locate them, check them against a model, stream weights out.

`write_checkpoint` writes slice by slice, since Orbax needs all arrays in memory at once: Orbax saves the tree with
arrays of one element, then each array is replaced in the same store by an empty one of its real size and filled.
"""

import itertools
import json
import logging
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from jax.experimental import multihost_utils
from omegaconf import OmegaConf

from maxhydra.config import ConfigError, Problem
from maxhydra.config.compose.validate import section_from
from maxhydra.config.migrations import migrate_config
from maxhydra.config.schema.quantization import Quantization
from maxhydra.convert.single_replica import ReplicaRead, plan_reads, read_target
from maxhydra.convert.streaming import Arrays
from maxhydra.model import VALUE, ModelDef, store_weight_slice
from maxhydra.model.stored_params import current_path
from maxhydra.modelfiles import locate
from maxhydra.record.atomic_io import NewerFormatError
from maxhydra.record.checkpoint_manifest import MANIFEST, DamagedCheckpointError, verify_files, write_manifest
from maxhydra.record.processes import host_bytes
from maxhydra.runtime.channel import gather

Tree = Any
PARAMS = "params"
FORMAT = "quantization.yaml"
# Share of the free host memory that arrays take while they are read.
READ_SHARE = 0.25
log = logging.getLogger("maxhydra")
# Orbax logs every operation, including tracebacks of its threads; our own errors report what a user needs.
for noisy in ("absl", "asyncio"):
    logging.getLogger(noisy).setLevel(logging.CRITICAL)


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, in ascending order; entries with other names are ignored."""
    if not folder.is_dir():
        return []
    # str.isdigit() also accepts digits that int() rejects, such as a superscript two.
    return sorted(
        int(entry.name) for entry in folder.iterdir() if re.fullmatch("[0-9]+", entry.name) and entry.is_dir()
    )


def find_checkpoint(key: str, location: str) -> Path:
    """Resolve a run folder, its checkpoints folder or one checkpoint to one checkpoint, the latest if several."""
    root = locate(key, location)
    if (root / PARAMS).is_dir():
        return root
    for folder in (root / "checkpoints", root):
        if steps := checkpoint_steps(folder):
            return folder / str(steps[-1])
    file = next(root.glob("*.gguf"), None) if root.is_dir() else None
    hint = f"name the file: {file}" if file is not None else ""
    reason = "contains no checkpoint" if root.is_dir() else "is not a folder"
    accepted = "a run folder, its checkpoints folder, or one checkpoint in it"
    raise ConfigError(Problem(key, reason, value=location, accepted=accepted, hint=hint))


def read_parameters(key: str, path: Path, abstract_params: Tree) -> Tree:
    """Restore the weights of a checkpoint with the shapes, dtypes and shardings of `abstract_params`."""
    with read_errors_as_config_errors(key, path):
        require_intact(path, [PARAMS])
        return read_trees(path, {PARAMS: abstract_params})[PARAMS]


def stored_shapes(path: Path, item: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays of a checkpoint's item by name, as they were stored."""
    return {name: tuple(leaf.shape) for name, leaf in leaves_by_name(_stored_tree(path, item)).items()}


def read_trees(path: Path, expected: Mapping[str, Tree], *, single_replica: bool = False) -> dict[str, Tree]:
    """Restore items of a checkpoint onto the shapes, dtypes and shardings of `expected`, whatever mesh wrote them.

    Arrays are matched by name, those of earlier versions under their current names; nodes without arrays are ignored.
    With `single_replica`, arrays that are replicated over processes are read once; a collective call then.
    """
    stored = {item: _match_stored_tree(path, item, tree) for item, tree in expected.items()}
    targets = {item: target for item, (target, _) in stored.items()}
    plans = plan_reads(_read_targets(targets)) if single_replica and jax.process_count() > 1 else {}
    restored = _read_by_replicas(path, targets, plans) if plans else _read_all(path, targets)
    trees = {}
    for item, tree in expected.items():
        names = stored[item][1]
        arrays = {names[name]: array for name, array in leaves_by_name(restored[item]).items()}
        trees[item] = jax.tree_util.tree_map_with_path(lambda path, _, arrays=arrays: arrays[_name(path)], tree)
    return trees


def _read_all(path: Path, targets: Mapping[str, Tree]) -> dict[str, Tree]:
    groups = _groups_within_memory(_read_targets(targets))
    if len(groups) > 1 or ocp.PLACEHOLDER in jax.tree.leaves(dict(targets)):
        read: dict[str, Any] = {}
        for group in groups:
            found = _restore(path, _select(targets, group))
            read |= {name: found[name] for name in group}
        return jax.tree_util.tree_map_with_path(lambda keys, _: read.get(_name(keys)), dict(targets))
    args = {item: ocp.args.StandardRestore(target) for item, target in targets.items()}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        restored = reader.restore(path, args=ocp.args.Composite(**args))
    return {item: restored[item] for item in targets}


def _read_targets(targets: Mapping[str, Tree]) -> dict[str, Any]:
    """The targets by name, without placeholders."""
    return {name: leaf for name, leaf in leaves_by_name(dict(targets)).items() if leaf is not ocp.PLACEHOLDER}


def _groups_within_memory(targets: Mapping[str, Any]) -> list[set[str]]:
    """Names of arrays that are read at a time, within a share of the free host memory.

    A file may hold the whole of an array, of which this process needs a shard, so that reading takes more memory than
    the result.
    """
    groups: list[set[str]] = [set()]
    size, limit = 0, host_bytes() * READ_SHARE
    for name, target in targets.items():
        num_bytes = target.dtype.itemsize * math.prod(target.shape)
        if groups[-1] and size + num_bytes > limit:
            groups.append(set())
            size = 0
        groups[-1].add(name)
        size += num_bytes
    return groups


def _select(targets: Mapping[str, Tree], names: Collection[str]) -> Tree:
    """The targets with placeholders for all other arrays."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, target: target if _name(keys) in names else ocp.PLACEHOLDER, dict(targets)
    )


def _restore(path: Path, targets: Mapping[str, Tree]) -> dict[str, Any]:
    """Read arrays by name, without Orbax's Checkpointer, whose barrier would wait for a process that cannot read."""
    args = {
        item: ocp.args.PyTreeRestore(tree, restore_args=jax.tree.map(_restore_args, tree))
        for item, tree in targets.items()
    }
    handler = ocp.CompositeCheckpointHandler()
    try:
        restored = handler.restore(epath.Path(path), args=ocp.args.Composite(**args))
        return leaves_by_name({item: restored[item] for item in targets})
    finally:
        handler.close()


def _read_by_replicas(path: Path, targets: Mapping[str, Tree], plans: Mapping[str, ReplicaRead]) -> Tree:
    """Read the share of this process, and exchange the arrays. Raises OSError in all processes if one cannot read."""
    own = jax.tree_util.tree_map_with_path(lambda keys, leaf: read_target(plans.get(_name(keys)), leaf), dict(targets))
    read: dict[str, Any] = {}
    failure = ""
    try:
        read = _restore(path, own)
    except Exception as error:  # Orbax and its storage backends raise any type
        failure = f"{one_line_message(error)} (process {jax.process_index()})"
    # Before the first collective operation, for which the others would wait.
    if failure := next(filter(None, gather(failure)), ""):
        raise OSError(failure)
    return jax.tree_util.tree_map_with_path(
        lambda keys, _: plans[_name(keys)].send(read[_name(keys)]) if _name(keys) in plans else read[_name(keys)],
        dict(targets),
    )


def _restore_args(target: Any) -> ocp.RestoreArgs:
    if target is ocp.PLACEHOLDER:
        return ocp.RestoreArgs()
    if target.sharding is None:
        return ocp.RestoreArgs(dtype=target.dtype)
    return ocp.ArrayRestoreArgs(sharding=target.sharding, global_shape=target.shape, dtype=target.dtype)


def require_intact(path: Path, items: Collection[str] | None = None) -> None:
    """Raise DamagedCheckpointError if a checkpoint differs from its manifest; `items` limits the check to some items.

    A collective call: each process hashes a share of the files, and all raise the error that any of them found.
    """
    if not (path / MANIFEST).exists():
        log.info("checkpoint %s was written before checksums existed, not verified", path)
    try:
        damage = verify_files(path, items, part=jax.process_index(), parts=jax.process_count())
    except NewerFormatError as error:
        raise ConfigError(Problem("checkpoint", str(error), value=path)) from error
    found = "" if damage is None else json.dumps([damage.file, damage.reason])
    if jax.process_count() > 1:
        padded = np.frombuffer(found.encode().ljust(1024)[:1024], np.uint8)
        texts = multihost_utils.process_allgather(padded).reshape(jax.process_count(), -1)
        found = next((text for row in texts if (text := row.tobytes().decode().strip())), "")
    if found:
        file, reason = json.loads(found)
        raise DamagedCheckpointError(file, reason + _arrays_in_file(path, file))


def _arrays_in_file(path: Path, file: str) -> str:
    """Name the arrays with chunks in a data file; empty for other files, and if the index of chunks is damaged."""
    item, _, inner = file.partition("/")
    try:
        store = ts.KvStore.open(f"file://{path / item}/").result()
        nodes, keys = [ts.ocdbt.dump(store).result()["versions"][-1]["root"]["location"]], set()
        while nodes:
            for entry in ts.ocdbt.dump(store, nodes.pop()).result()["entries"]:
                if "location" in entry:
                    nodes.append(entry["location"])
                # value:<folder>/:d/<file>:<offset>:<length>
                elif "".join(entry.get("indirect_value", "").split(":")[1:3]) == inner:
                    keys.add(entry["key"].decode().rpartition("/")[0].replace(".", "/"))
    except Exception:  # tensorstore raises any type
        return ""
    names = [f"{item}/{key}" for key in sorted(keys)]
    more = f" and {len(names) - 3} more arrays" if len(names) > 3 else ""
    return f"; it holds {', '.join(names[:3])}{more}" if names else ""


@contextmanager
def read_errors_as_config_errors(key: str, path: Path) -> Iterator[None]:
    """Raise read errors as ConfigError about the config field `key`, e.g. for a partially copied checkpoint."""
    try:
        yield
    except (ConfigError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # Orbax and its storage backends raise any type
        is_damaged = isinstance(error, DamagedCheckpointError)
        reason = f"is damaged: {error}" if is_damaged else f"cannot be read: {one_line_message(error)}"
        hint = "copy it again, or name an earlier checkpoint, RUN/checkpoints/STEP"
        earlier = [step for step in checkpoint_steps(path.parent) if path.name.isdecimal() and step < int(path.name)]
        intact = (path.parent / str(step) for step in reversed(earlier))
        if (previous := next((other for other in intact if verify_files(other, [PARAMS]) is None), None)) is not None:
            hint = f"copy it again, or use the previous checkpoint, {key}={previous}"
        raise ConfigError(Problem(key, reason, value=path, hint=hint)) from error


def one_line_message(error: BaseException) -> str:
    """The message of an error on one line of at most 300 characters."""
    text = str(error).strip() or type(error).__name__
    return re.sub(r"\s+", " ", text)[:300]


def write_format(folder: Path, quantization: Quantization) -> None:
    """Store the quantization of a checkpoint's weights."""
    (folder / FORMAT).write_text(OmegaConf.to_yaml(OmegaConf.structured(quantization)), encoding="utf-8")


def read_format(key: str, checkpoint: Path) -> Quantization | None:
    """The quantization stored by `write_format`; None if the weights are not quantized."""
    path = checkpoint / FORMAT
    with read_errors_as_config_errors(key, checkpoint):
        if (damage := verify_files(checkpoint, items=())) is not None:
            raise damage
    if not path.is_file():
        return None
    values = OmegaConf.to_container(OmegaConf.create(path.read_text(encoding="utf-8")))
    assert isinstance(values, dict)
    current = migrate_config({str(key): value for key, value in values.items()}, "quantization")
    return section_from(Quantization, current, path="quantization", source=str(path))


def _match_stored_tree(path: Path, item: str, expected_tree: Tree) -> tuple[Tree, dict[str, str]]:
    """Match the arrays of a checkpoint with those of `expected_tree` by name and shape.

    Returns the stored tree, with the expected dtypes and shardings, and the current name of each stored one. The value
    head of a critic is not read for a model without one. Raises ConfigError that names the first array that differs.
    """
    tree = _stored_tree(path, item)
    expected, stored = leaves_by_name(expected_tree), leaves_by_name(tree)
    names = {name: current_path(name, expected) for name in stored}
    skipped = {name for name in stored if item == PARAMS and name.startswith(f"{VALUE}/") and name not in expected}
    stored_shapes = {names[name]: tuple(leaf.shape) for name, leaf in stored.items() if name not in skipped}
    expected_shapes = {name: tuple(leaf.shape) for name, leaf in expected.items()}
    for name in sorted({*stored_shapes, *expected_shapes}):
        if stored_shapes.get(name) != expected_shapes.get(name):
            raise _different_model(path, item, name, stored_shapes.get(name), expected_shapes.get(name))
    return jax.tree_util.tree_map_with_path(
        lambda keys, _: ocp.PLACEHOLDER if _name(keys) in skipped else expected[names[_name(keys)]], tree
    ), names


def _stored_tree(path: Path, item: str) -> Tree:
    """The tree of an item with the metadata of its arrays."""
    with ocp.StandardCheckpointer() as reader:
        metadata = reader.metadata(path / item).item_metadata
    if metadata is None:
        raise ValueError(f"the list of arrays in {item} is missing or damaged")
    return metadata.tree


def _different_model(
    path: Path, item: str, name: str, found: tuple[int, ...] | None, expected: tuple[int, ...] | None
) -> ConfigError:
    what = "model" if item == PARAMS else "optimizer or state"
    shape, own = "missing" if found is None else found, "no such array" if expected is None else expected
    reason = f"belongs to a different {what}: {item}/{name} is {shape}, this run has {own}"
    hint = "choose another run.name, or the model that it was trained with"
    if item != PARAMS:
        hint = "choose another run.name, or load only the weights with checkpoint.load_parameters"
    if not (path / MANIFEST).exists() and (writer := _writer(path)):
        # Before format versions, only the code that wrote a checkpoint is known to read it.
        hint += f"; it was written by {writer}, which can read it"
    return ConfigError(Problem("checkpoint", reason, value=path, hint=hint))


def _writer(path: Path) -> str:
    """The commit of maxhydra that wrote a run's checkpoint, by the sessions in run.json; empty if unknown."""
    try:
        facts, step = json.loads((path.parent.parent / "run.json").read_bytes()), int(path.name)
        # The session of this process has already been added.
        sessions = [session for session in facts["sessions"] if session["pid"] != os.getpid()]
        session = next((entry for entry in sessions if (entry["end_step"] or -1) >= step), sessions[-1])
        return f"commit {session['git']['sha'][:12]} of maxhydra ({session['started'][:10]})"
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def leaves_by_name(tree: Tree) -> dict[str, Any]:
    """The arrays of a tree by name, the keys of its path, in the order of jax.tree.leaves."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _name(path: jax.tree_util.KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


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
    write_manifest(folder)


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
