"""The kernels that a model calls in training: time of every backend that can serve, and its distance to the reference.

A call is that of all devices together, and is made on one.
Arrays are named with a letter for each dimension, by which a call is cut down to one that the reference can serve.
"""

import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.config import Config
from maxhydra.kernels.call_recorder import RecordedCall, watching
from maxhydra.kernels.dispatch import UnsupportedError
from maxhydra.measure.memory import OutOfMemoryError, lower_in_training, memory_explained
from maxhydra.measure.record import BenchRecord, BenchTarget
from maxhydra.measure.training import plan

log = logging.getLogger("maxhydra")

Arrays = dict[str, jax.Array]
# Programs sent in a row, how often that is timed, and calls of a program on other numbers.
IN_A_ROW, TIMES, SETS = 4, 5, 2
# Of a call that is held against the reference: rows of a batch, tokens, keys, rows of a product.
SMALL = {"B": 1, "T": 512, "S": 512, "M": 512}
REFERENCE = "reference"
# Arguments that say how a call is served, not what is asked.
HOW = ("backend", "sizes", "place")


def measure_kernels(subject: BenchTarget) -> Iterator[BenchRecord]:
    """A line for each distinct call and each backend that serves it, but for the reference, which is not for speed."""
    for called in model_calls(subject.config):
        operation = called.operation.__name__
        shapes = {name: list(value.shape) for name, value in _arrays(called).items()}
        wanted = _gradients(called, REFERENCE)(*_split(_draw(called, 0, SMALL)))
        table = sys.modules[called.operation.__module__].BACKENDS
        for backend in (name for name in table if name != REFERENCE):
            try:
                with memory_explained(lower_in_training(subject.config)):
                    figures = _timed(called, backend)
                    found = jax.jit(_gradients(called, backend))(*_split(_draw(called, 0, SMALL)))
            except UnsupportedError as refusal:
                log.info("%s on %s: %s", operation, backend, "; ".join(refusal.reasons))
                continue
            except OutOfMemoryError as error:
                log.warning("%s on %s: %s", operation, backend, error)
                continue
            about = {"operation": operation, "backend": backend, "shapes": shapes, "given": _given(called)}
            yield subject.line("kernels", **about, **figures, error=float(f"{distance(found, wanted):.2g}"))


def model_calls(config: Config) -> list[RecordedCall]:
    """The distinct calls of a training step's forward pass, in the order of the layers, as if on one device."""
    training, loader = plan(config)
    with closing(loader), watching() as calls:
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), dict(loader.peek()))
        jax.eval_shape(
            lambda weights, batch: training.loss(weights, batch, None), training.states.abstract().weights, batch
        )
    alone = [RecordedCall(call.operation, {k: v for k, v in call.arguments.items() if k != "place"}) for call in calls]
    return list({f"{called.operation.__name__} {called.arguments}": called for called in alone}.values())


def distance(found: Any, wanted: Any) -> float:
    """Relative, by the norm; the largest over all arrays, no number where one of them has none."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    wide = [(a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in pairs]
    return float(np.max([jnp.linalg.norm(a - b) / jnp.maximum(jnp.linalg.norm(b), 1e-30) for a, b in wide]))


def _arrays(called: RecordedCall) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: value for name, value in called.arguments.items() if isinstance(value, jax.ShapeDtypeStruct)}


def _given(called: RecordedCall) -> dict[str, str]:
    """What is asked besides arrays."""
    arrays = _arrays(called)
    fixed = {name: value for name, value in called.arguments.items() if name not in arrays and value is not None}
    return {name: str(value) for name, value in fixed.items() if name not in HOW}


def _draw(called: RecordedCall, seed: int, largest: Mapping[str, int]) -> Arrays:
    """Random arrays for a call, no dimension over the largest of its letter."""
    drawn: Arrays = {}
    rows = 0
    for number, (name, array) in enumerate(_arrays(called).items()):
        letters = name.rpartition("_")[2]
        shape = tuple(min(size, largest.get(letter, size)) for size, letter in zip(array.shape, letters, strict=True))
        rows = rows or shape[0]
        drawn[name] = _values(name, shape, array.dtype, jax.random.key(seed * 64 + number), rows=rows)
    return drawn


def _values(name: str, shape: tuple[int, ...], dtype: Any, key: jax.Array, *, rows: int) -> jax.Array:
    """Numbers as they come in a model: what decays is negative, a rate lies in 0 to 1, groups share the rows."""
    if name.startswith("sizes"):
        groups = shape[0]
        return jnp.full(shape, rows // groups, dtype).at[0].add(rows - groups * (rows // groups))
    if "positions" in name:
        return jnp.broadcast_to(jnp.arange(shape[-1], dtype=dtype), shape)
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.ones(shape, dtype)
    drawn = jax.random.normal(key, shape, jnp.float32)
    if "decay" in name:
        drawn = -jnp.abs(drawn)
    elif "rate" in name:
        drawn = jax.nn.sigmoid(drawn)
    elif name.startswith("key"):
        drawn = drawn / jnp.linalg.norm(drawn, axis=-1, keepdims=True)
    return drawn.astype(dtype)


def _split(arrays: Arrays) -> tuple[Arrays, Arrays]:
    """Arrays that have a gradient, and the others."""
    smooth = {name: array for name, array in arrays.items() if jnp.issubdtype(array.dtype, jnp.floating)}
    return smooth, {name: array for name, array in arrays.items() if name not in smooth}


def _forward(called: RecordedCall, backend: str) -> Callable[[Arrays, Arrays], Any]:
    arrays = _arrays(called)
    fixed = {name: value for name, value in called.arguments.items() if name not in arrays and name not in HOW}
    asked = called.arguments
    sizes = {"sizes": asked["sizes"]} if "sizes" in asked and backend == asked["backend"] else {}
    operation = partial(called.operation, **fixed, **sizes, backend=backend)
    return lambda smooth, others: operation(**smooth, **others)


def _gradients(called: RecordedCall, backend: str) -> Callable[[Arrays, Arrays], Any]:
    """Values and the gradients of a weighted sum of them."""

    def both(smooth: Arrays, others: Arrays) -> Any:
        out, pull = jax.vjp(lambda smooth: _forward(called, backend)(smooth, others), smooth)
        keys = jax.random.split(jax.random.key(1), len(jax.tree.leaves(out)))
        leaves, shape = jax.tree.flatten(out)
        drawn = [jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
        return out, pull(jax.tree.unflatten(shape, drawn))

    return both


def _timed(called: RecordedCall, backend: str) -> dict[str, float]:
    """Milliseconds of a call, forward and with its gradients."""
    sets = [_split(_draw(called, 1 + number, {})) for number in range(SETS)]
    parts = {"forward_ms": _forward(called, backend), "both_ms": _gradients(called, backend)}
    return {name: round(milliseconds(function, sets), 4) for name, function in parts.items()}


def milliseconds(function: Callable[..., Any], sets: list[tuple]) -> float:
    """Of a call, in programs of several on other numbers, sent without waiting for the one before, so that neither the
    cache is measured nor, where a program takes the device longer, the host."""
    run = jax.jit(lambda sets: [function(*one) for one in sets])
    jax.block_until_ready(run(sets))
    times = []
    for _ in range(TIMES):
        began = time.perf_counter()
        for _ in range(IN_A_ROW):
            last = run(sets)
        jax.block_until_ready(last)
        times.append((time.perf_counter() - began) / IN_A_ROW / len(sets) * 1e3)
    return statistics.median(times)
