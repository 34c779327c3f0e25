"""Golden models: errors of logits, gradients and decoding relative to stored outputs of transformers.

Does not need torch.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from maxhydra.config.schema import model as config
from maxhydra.convert.hf import hf_source
from maxhydra.convert.hf_write import find_family, write_hf
from maxhydra.convert.name_table import Table
from maxhydra.convert.source import Source
from maxhydra.convert.streaming import InMemoryArrays, single_device_shardings, stream_weights
from maxhydra.layers import Context, DenseCacheSpec
from maxhydra.model import ModelDef, build
from maxhydra.sharding import Sharder

SINGLE = Sharder.single()
PREFILL = 280
# Families whose mechanisms are all or mostly those of others; their tests are exhaustive.
FURTHER_FAMILIES = {
    *("deepseek2", "deepseek3", "gemma", "gemma4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
    *("glm_moe_dsa_shared", "granitemoehybrid", "kimi-k2", "kimi_linear", "lfm2_moe", "llama3.1", "minimax_m2"),
    *("mistral", "nemotron_h_moe", "olmo3", "olmo_hybrid", "qwen2", "qwen3.5", "qwen3.5_moe", "qwen3_moe", "smollm3"),
}


def family_cases(families: Iterable[str]) -> list[Any]:
    """Parameters of a test of all families."""
    exhaustive = pytest.mark.exhaustive
    return [pytest.param(name, marks=exhaustive) if name in FURTHER_FAMILIES else name for name in families]


@dataclasses.dataclass(frozen=True)
class Distance:
    """Float32 errors relative to transformers."""

    logits: float
    """Largest logit difference at unmasked tokens."""
    kl: float
    """Largest KL divergence of a next-token distribution."""
    gradients: float
    """Largest difference of a gradient, relative to the largest gradient of the same weight."""
    worst: str
    """The weight with that gradient."""


class Golden:
    """A tiny model saved by transformers, with the logits, loss and gradients that transformers computed."""

    def __init__(self, folder: Path):
        self.source = hf_source("golden", str(folder), folder)
        self.model: ModelDef = build(_in_float32(self.source.model))
        self.params = self._load(self.source)
        expected = np.load(folder / "expected.npz")
        self.ids, self.mask = jnp.asarray(expected["ids"]), jnp.asarray(expected["mask"])
        self.positions = jnp.maximum(jnp.cumsum(self.mask, axis=1) - 1, 0)
        self.expected_logits, self.expected_loss = expected["logits"], float(expected["loss"])
        self.expected_gradients = self.load_tensors(folder / "gradients.safetensors")

    def distance(self, *, has_gradients: bool = True) -> tuple[Distance, np.ndarray]:
        """Errors relative to transformers, and our logits; without gradients, their error is zero."""
        # The tokens are arguments: XLA would spend seconds on folding them as constants.
        inputs, errors = (self.params, self.ids, self.positions, self.mask), {"": 0.0}
        if has_gradients:
            (loss, logits), gradients = jax.jit(jax.value_and_grad(self._loss, has_aux=True))(*inputs)
            # In NumPy, which needs no compilation per shape.
            errors = relative_errors(*jax.device_get((gradients, self.expected_gradients)))
        else:
            loss, logits = jax.jit(self._loss)(*inputs)
        logits = np.asarray(logits)
        np.testing.assert_allclose(loss, self.expected_loss, rtol=1e-5)
        real = np.asarray(self.mask) == 1
        log_probs, expected_log_probs = (_log_softmax(array[real]) for array in (logits, self.expected_logits))
        kl = np.sum(np.exp(expected_log_probs) * (expected_log_probs - log_probs), axis=-1).max()
        difference = np.abs(logits - self.expected_logits)[real].max()
        worst = max(errors, key=lambda name: errors[name])
        return Distance(float(difference), float(kl), errors[worst], worst), logits

    def decoded(self) -> np.ndarray:
        """Logits from a prefill and single decode steps with a KV cache."""
        step = jax.jit(self._step)
        cache, chunks = self.model.empty_cache(DenseCacheSpec(*self.ids.shape)), []
        for start, stop in [(0, PREFILL), *((i, i + 1) for i in range(PREFILL, self.ids.shape[1]))]:
            tokens = slice(start, stop)
            logits, cache = step(
                self.params, self.ids[:, tokens], self.positions[:, tokens], self.mask[:, tokens], cache
            )
            chunks.append(np.asarray(logits))
        return np.concatenate(chunks, axis=1)

    def forward(self, ids: np.ndarray) -> np.ndarray:
        """Logits of rows [B, T] without padding, without a cache."""
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        logits, _ = jax.jit(self._step)(self.params, jnp.asarray(ids), positions, jnp.ones_like(positions), None)
        return np.asarray(logits)

    def write(self, folder: Path) -> Table:
        """Export the model as a Hugging Face folder, and return the table used."""
        table = find_family(self.model, self.source.table.model_type)
        write_hf(folder, self.model, InMemoryArrays(self.params), table=table, dtype=jnp.dtype("bfloat16"), extra={})
        return table

    def load_tensors(self, file: Path) -> Any:
        """The tensors of another file as a tree of weights."""
        return self._load(_with_tensors(self.source, file))

    def _load(self, source: Source) -> Any:
        return stream_weights(source, self.model, shardings=single_device_shardings(self.model), dtype="float32")

    def _loss(self, params: Any, ids: jax.Array, positions: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits, _ = self._step(params, ids, positions, mask, None)
        scores = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), ids[:, 1:, None], axis=-1)[..., 0]
        counts = mask[:, 1:] * mask[:, :-1]
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
    """The source with the tensors of another file."""
    tensors = tensors_of(file)
    shapes = {name: array.shape for name, array in tensors.items()}
    return dataclasses.replace(source, shapes=shapes, read=tensors.__getitem__)


def relative_errors(actual: Any, expected: Any) -> dict[str, float]:
    """Weight -> largest difference relative to the largest value.

    The largest value may be zero, as for a router bias, or pure rounding, as for a key bias without RoPE, to which
    softmax is invariant; so the scale is at least 1e-4 of the largest value of all weights.
    """
    min_scale = 1e-4 * max(float(np.abs(want).max()) for want in jax.tree.leaves(expected))
    errors = {}
    for path, want in jax.tree_util.tree_leaves_with_path(expected):
        got = actual
        for entry in path:
            got = got[entry.key]
        scale = max(float(np.abs(want).max()), min_scale)
        errors[jax.tree_util.keystr(path, simple=True, separator="/")] = float(np.abs(got - want).max()) / scale
    return errors


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
