"""Checkpoints of earlier versions, whose parameters had other names, are read under the names of this one."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from maxhydra.convert import orbax_io
from maxhydra.convert.orbax_io import read_parameters, read_trees
from maxhydra.model.stored_params import current_path, fingerprint


class Moments(NamedTuple):
    mu: dict
    count: Any


def tree(name: str) -> dict:
    return {"pattern": {"0": {"mlp": {"kernel": jnp.arange(4.0)}, name: {"norm": {"scale": jnp.ones(3)}}}}}


def test_parameters_are_read_by_their_old_names(tmp_path: Path) -> None:
    path = tmp_path / "3"
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer:
        writer.save(path, args=ocp.args.Composite(params=ocp.args.StandardSave(tree("beside"))))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree("parallel_moe"))
    params = read_parameters("checkpoint", path, shapes)
    assert jax.tree.structure(params) == jax.tree.structure(shapes)
    np.testing.assert_array_equal(params["pattern"]["0"]["parallel_moe"]["norm"]["scale"], np.ones(3))


def test_names_of_earlier_versions() -> None:
    known = {"mu/pattern/0/parallel_moe/scale", "pattern/0/attention/key/kernel", "head"}
    assert current_path("mu/pattern/0/beside/scale", known) == "mu/pattern/0/parallel_moe/scale"
    assert current_path("pattern/0/attention/key", known) == "pattern/0/attention/key/kernel"
    assert [current_path(name, known) for name in ("head", "unknown", *known)] == ["head", "unknown", *known]


def test_nodes_without_arrays_are_ignored(tmp_path: Path) -> None:
    """The chain of an optimizer may gain or lose transformations without a state."""
    path = tmp_path / "3"
    stored = {"clip": optax.EmptyState(), "scale": Moments({"w": jnp.arange(3.0)}, jnp.int32(7))}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer:
        writer.save(path, args=ocp.args.Composite(rest=ocp.args.StandardSave(stored)))
    expected = {"decay": (), "scale": Moments({"w": jnp.zeros(3)}, jnp.int32(0))}
    restored = read_trees(path, {"rest": expected})["rest"]
    assert jax.tree.structure(restored) == jax.tree.structure(expected) and int(restored["scale"].count) == 7
    np.testing.assert_array_equal(restored["scale"].mu["w"], np.arange(3.0))


def test_arrays_are_read_in_groups_if_memory_is_scarce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {
        "params": {name: jnp.arange(number, number + 4.0) for number, name in enumerate("abcde")},
        "rest": {"mu": {"a": jnp.zeros(2)}, "count": jnp.int32(3)},
    }
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer:
        items = {item: ocp.args.StandardSave(tree) for item, tree in stored.items()}
        writer.save(tmp_path / "3", args=ocp.args.Composite(**items))
    groups = []

    def restore(path: Path, targets: Any) -> Any:
        found = restore_group(path, targets)
        groups.append([name for name, array in found.items() if array is not ocp.PLACEHOLDER])
        return found

    restore_group = orbax_io._restore
    monkeypatch.setattr(orbax_io, "_restore", restore)
    monkeypatch.setattr(orbax_io, "host_bytes", lambda: 2 * 16 / orbax_io.READ_SHARE)
    restored = read_trees(tmp_path / "3", stored)
    assert groups == [["params/a", "params/b"], ["params/c", "params/d"], ["params/e", "rest/count", "rest/mu/a"]]
    jax.tree.map(np.testing.assert_array_equal, restored, stored)


def test_a_rename_keeps_the_hash_of_weights() -> None:
    assert fingerprint(tree("parallel_moe")) == fingerprint(tree("beside"))
