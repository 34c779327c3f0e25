"""A golden model under our code: distance of logits, gradients and decoding from those of transformers.

No torch here.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from maxhydra.config.schema import model as config
from maxhydra.convert.arrays import InMemoryArrays
from maxhydra.convert.hf import hf_source
from maxhydra.convert.hf_write import find_family, write_hf
from maxhydra.convert.name_table import Table
from maxhydra.convert.source import Source
from maxhydra.convert.stream_in import single_device_shardings, stream_weights
from maxhydra.layers import Context, DenseCacheSpec
from maxhydra.model import ModelDef, build
from maxhydra.sharding import Sharder

SINGLE = Sharder.single()
PREFILL = 280


@dataclasses.dataclass(frozen=True)
class Distance:
    """From transformers, in float32."""

    logits: float
    """Largest difference of a logit of a real token."""
    kl: float
    """Largest divergence between two distributions of the next token."""
    gradients: float
    """Largest difference of a gradient, relative to the largest gradient of the same weight."""
    worst: str
    """The weight of which."""


class Golden:
    """A model of transformers' making, its weights and what transformers made of them."""

    def __init__(self, folder: Path):
        self.source = hf_source("golden", str(folder), folder)
        self.model: ModelDef = build(_in_float32(self.source.model))
        self.params = self._filled(self.source)
        expected = np.load(folder / "expected.npz")
        self.ids, self.mask = jnp.asarray(expected["ids"]), jnp.asarray(expected["mask"])
        self.positions = jnp.maximum(jnp.cumsum(self.mask, axis=1) - 1, 0)
        self.expected_logits, self.expected_loss = expected["logits"], float(expected["loss"])
        self.expected_gradients = self._filled(_with_tensors(self.source, folder / "gradients.safetensors"))

    def distance(self) -> tuple[Distance, np.ndarray]:
        """How far we are from transformers, and our logits."""
        (loss, logits), gradients = jax.jit(jax.value_and_grad(self._loss, has_aux=True))(self.params)
        logits = np.asarray(logits)
        np.testing.assert_allclose(loss, self.expected_loss, rtol=1e-5)
        real = np.asarray(self.mask) == 1
        ours, theirs = (_log_softmax(array[real]) for array in (logits, self.expected_logits))
        kl = np.sum(np.exp(theirs) * (theirs - ours), axis=-1).max()
        apart = np.abs(logits - self.expected_logits)[real].max()
        # In NumPy, which compiles no difference for each shape.
        relative = _relative(*jax.device_get((gradients, self.expected_gradients)))
        worst = max(relative, key=lambda name: relative[name])
        return Distance(float(apart), float(kl), relative[worst], worst), logits

    def decoded(self) -> np.ndarray:
        """Logits by a prefill and single steps through the cache."""
        step = jax.jit(self._step)
        cache, parts = self.model.empty_cache(DenseCacheSpec(*self.ids.shape)), []
        for start, stop in [(0, PREFILL), *((i, i + 1) for i in range(PREFILL, self.ids.shape[1]))]:
            now = slice(start, stop)
            logits, cache = step(self.params, self.ids[:, now], self.positions[:, now], self.mask[:, now], cache)
            parts.append(np.asarray(logits))
        return np.concatenate(parts, axis=1)

    def write(self, folder: Path) -> Table:
        """The model as a Hugging Face folder of our making, by this table."""
        table = find_family(self.model, self.source.table.model_type)
        write_hf(folder, self.model, InMemoryArrays(self.params), table=table, dtype=jnp.dtype("bfloat16"), extra={})
        return table

    def _filled(self, source: Source) -> Any:
        return stream_weights(source, self.model, shardings=single_device_shardings(self.model), dtype="float32")

    def _loss(self, params: Any) -> tuple[jax.Array, jax.Array]:
        logits, _ = self._step(params, self.ids, self.positions, self.mask, None)
        scores = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), self.ids[:, 1:, None], axis=-1)[..., 0]
        counts = self.mask[:, 1:] * self.mask[:, :-1]
        return -jnp.sum(scores * counts) / counts.sum(), logits

    def _step(
        self, params: Any, ids: jax.Array, positions: jax.Array, mask: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        ctx = Context(positions=positions, segments=mask, sharder=SINGLE, cache=cache, dropout_key=None)
        hidden, cache = self.model.hidden(params, ids, ctx)
        return self.model.logits(params, hidden, SINGLE), cache


def tensors_of(file: Path) -> dict[str, np.ndarray]:
    """All tensors of a safetensors file."""
    with safe_open(file, framework="numpy") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def _in_float32(model: config.Model) -> config.Model:
    return dataclasses.replace(model, dtypes=dataclasses.replace(model.dtypes, compute=config.Dtype.float32))


def _with_tensors(source: Source, file: Path) -> Source:
    """The same source with other tensors under its names."""
    tensors = tensors_of(file)
    shapes = {name: array.shape for name, array in tensors.items()}
    return dataclasses.replace(source, shapes=shapes, read=tensors.__getitem__)


def _relative(ours: Any, theirs: Any) -> dict[str, float]:
    """Weight -> largest difference over the largest value.

    That may be zero, as for a router's bias, or nothing but rounding, as for a bias of keys without positions, which
    the softmax does not see: below a ten thousandth of the largest of all it does not count.
    """
    least = 1e-4 * max(float(np.abs(want).max()) for want in jax.tree.leaves(theirs))
    found = {}
    for path, want in jax.tree_util.tree_leaves_with_path(theirs):
        got = ours
        for entry in path:
            got = got[entry.key]
        scale = max(float(np.abs(want).max()), least)
        found[jax.tree_util.keystr(path, simple=True, separator="/")] = float(np.abs(got - want).max()) / scale
    return found


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
