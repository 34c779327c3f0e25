"""Comparisons of a model with its NumPy reference: outputs, gradients, decoding with a cache, and a small mesh."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.config.schema import model as config
from maxhydra.config.schema.hardware import Mesh
from maxhydra.layers import Context, PagedCacheSpec, PageTable
from maxhydra.model import ModelDef, build
from maxhydra.sharding import Sharder, build_mesh
from tests.support import numpy_decoder

SINGLE = Sharder.single()
ROWS, LENGTH, PAGE = 2, 8, 4
STEP = 1e-5


@dataclasses.dataclass(frozen=True)
class Checked:
    """A tiny model with random weights, a batch, and the outputs and gradients of a loss on one device."""

    model: ModelDef
    params: Any
    ids: np.ndarray
    hidden: np.ndarray
    gradients: Any


def run(model: ModelDef, params: Any, ids: np.ndarray, sharder: Sharder) -> tuple[Any, Any]:
    """Hidden states, and gradients of their weighted sum plus the aux losses."""

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        ctx = Context(positions=positions, segments=None, sharder=sharder, cache=None, dropout_key=None)
        hidden_BTD = model.hidden(params, jnp.asarray(ids), ctx)[0]
        return jnp.sum(hidden_BTD * loss_weights(hidden_BTD.shape)), hidden_BTD

    (_, hidden_BTD), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return hidden_BTD, gradients


def loss_weights(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(3).normal(size=shape).astype(np.float32)


def random_params(model: ModelDef, *, scale: float = 0.3) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(scale * rng.normal(size=x.shape), x.dtype), model.shapes)


def check(model_config: config.Model) -> Checked:
    model = build(model_config)
    params = random_params(model)
    ids = np.random.default_rng(1).integers(0, model_config.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    return Checked(model, params, ids, *run(model, params, ids, SINGLE))


def assert_matches_reference(checked: Checked, *, atol: float = 2e-5) -> None:
    """The outputs, and the derivative along one random direction for each weight."""
    model, weights = checked.model.config, jax.tree.map(lambda x: np.asarray(x, np.float64), checked.params)
    expected = numpy_decoder.hidden(model, weights, checked.ids)
    np.testing.assert_allclose(checked.hidden, expected, atol=atol)
    factors, rng = loss_weights(expected.shape), np.random.default_rng(4)
    leaves, structure = jax.tree_util.tree_flatten_with_path(weights)
    for index, ((path, leaf), gradient) in enumerate(zip(leaves, jax.tree.leaves(checked.gradients), strict=True)):
        direction = rng.normal(size=leaf.shape)

        def loss(step: float, index: int = index, direction: np.ndarray = direction) -> float:
            moved = [leaf + step * direction if at == index else leaf for at, (_, leaf) in enumerate(leaves)]
            return float(
                np.sum(numpy_decoder.hidden(model, jax.tree.unflatten(structure, moved), checked.ids) * factors)
            )

        expected_slope = (loss(STEP) - loss(-STEP)) / (2 * STEP)
        slope = float(np.sum(np.asarray(gradient, np.float64) * direction))
        tolerance = 2e-3 * max(1.0, float(np.linalg.norm(gradient)))
        assert abs(slope - expected_slope) < tolerance, (jax.tree_util.keystr(path), slope, expected_slope)


def assert_decodes_alike(checked: Checked, *, atol: float = 3e-5) -> None:
    """Tokens one at a time through a paged cache give the outputs of one forward pass."""
    model = checked.model
    rows = PageTable(jnp.asarray([[3, 1], [0, 2]]), jnp.arange(ROWS))
    cache = model.empty_cache(PagedCacheSpec(pages=4, page_size=PAGE, slots=ROWS, storage=None))
    advance = jax.jit(model.hidden)
    for at in range(LENGTH):
        ctx = Context(
            positions=jnp.full((ROWS, 1), at), segments=None, sharder=SINGLE, cache=cache, dropout_key=None, rows=rows
        )
        hidden, cache = advance(checked.params, jnp.asarray(checked.ids[:, at : at + 1]), ctx)
        np.testing.assert_allclose(hidden[:, 0], checked.hidden[:, at], atol=atol)


def assert_documents_do_not_meet(checked: Checked, *, length: int = 5, atol: float = 3e-5) -> None:
    """The starts of two rows as two documents of one row give the outputs that they have alone."""
    row = jnp.asarray(checked.ids[:, :length].reshape(1, -1))
    positions, segments = np.tile(np.arange(length), ROWS)[None], np.repeat(np.arange(1, ROWS + 1), length)[None]
    tokens = {"positions": jnp.asarray(positions), "segments": jnp.asarray(segments)}
    ctx = Context(**tokens, sharder=SINGLE, cache=None, dropout_key=None)
    hidden = np.asarray(jax.jit(checked.model.hidden)(checked.params, row, ctx)[0])
    np.testing.assert_allclose(hidden.reshape(ROWS, length, -1), checked.hidden[:, :length], atol=atol)


def assert_shards_alike(checked: Checked, mesh: Mesh, *, atol: float = 3e-5) -> None:
    """Outputs and gradients on a mesh of simulated devices are those of one device."""
    count = mesh.fsdp * mesh.tensor * mesh.sequence * mesh.expert * mesh.data
    sharder = Sharder(build_mesh(mesh, jax.devices()[:count]), mesh.rules)
    placed = jax.device_put(checked.params, sharder.tree(checked.model.axes))
    hidden, gradients = run(checked.model, placed, checked.ids, sharder)
    np.testing.assert_allclose(hidden, checked.hidden, atol=atol)
    for (path, found), expected in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(checked.gradients), strict=True
    ):
        scale = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(found, expected, atol=2e-4 * scale, err_msg=jax.tree_util.keystr(path))
