"""Checkpoints of earlier versions, whose parameters had other names, are read under the names of this one."""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from maxhydra.convert.orbax_io import read_parameters
from maxhydra.model.stored_params import fingerprint, rename_keys, restore_keys, stored_names


class Moments(NamedTuple):
    mu: dict
    count: int


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


def test_names_are_replaced_within_optimizer_states() -> None:
    names = stored_names(["pattern/0/beside/norm/scale"])
    state = (Moments(tree("parallel_moe"), 3), [tree("parallel_moe")])
    old = rename_keys(state, names)
    assert (
        isinstance(old[0], Moments) and "beside" in old[0].mu["pattern"]["0"] and "beside" in old[1][0]["pattern"]["0"]
    )
    assert jax.tree.structure(restore_keys(old, names)) == jax.tree.structure(state)
    assert stored_names(["pattern/0/parallel_moe/norm/scale"]) == {}


def test_a_rename_keeps_the_hash_of_weights() -> None:
    assert fingerprint(tree("parallel_moe")) == fingerprint(tree("beside"))
