"""Time and numerical error of every backend for the kernels that a model calls in training.

The global call of all devices is run on one device. Array names end in one letter per dimension, by which a call is
shrunk to a size that the reference backend can run.
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
from maxhydra.kernels.dispatch import RecordedCall, UnsupportedError, recording
from maxhydra.measure.record import (
    BenchRecord,
    BenchTarget,
    OutOfMemoryError,
    explain_out_of_memory,
    suggest_less_memory,
)
from maxhydra.measure.training import plan

log = logging.getLogger("maxhydra")

Arrays = dict[str, jax.Array]
# Consecutive dispatches per timing, number of timings, and calls per program, each on other inputs.
DISPATCHES, TIMINGS, INPUT_SETS = 4, 5, 2
# Maximum dimensions of the call that is compared with the reference: batch, tokens, keys, rows of a matmul.
SMALL = {"B": 1, "T": 512, "S": 512, "M": 512}
REFERENCE = "reference"
# Arguments that choose an implementation and do not change the result.
IMPLEMENTATION_ARGS = ("backend", "sizes", "place")


def measure_kernels(target: BenchTarget) -> Iterator[BenchRecord]:
    """One record per distinct call and supporting backend, except the reference, which is not optimized for speed."""
    for call in model_calls(target.config):
        operation = call.operation.__name__
        shapes = {name: list(value.shape) for name, value in _arrays(call).items()}
        expected = _gradients(call, REFERENCE)(*_split(_random_inputs(call, 0, SMALL)))
        backends = sys.modules[call.operation.__module__].BACKENDS
        for backend in (name for name in backends if name != REFERENCE):
            try:
                with explain_out_of_memory(suggest_less_memory(target.config)):
                    figures = _time_call(call, backend)
                    result = jax.jit(_gradients(call, backend))(*_split(_random_inputs(call, 0, SMALL)))
            except UnsupportedError as unsupported:
                log.info("%s on %s: %s", operation, backend, "; ".join(unsupported.reasons))
                continue
            except OutOfMemoryError as error:
                log.warning("%s on %s: %s", operation, backend, error)
                continue
            about = {"operation": operation, "backend": backend, "shapes": shapes, "given": _static_args(call)}
            yield target.line("kernels", **about, **figures, error=float(f"{relative_error(result, expected):.2g}"))


def model_calls(config: Config) -> list[RecordedCall]:
    """The distinct kernel calls of a training step's forward pass, in layer order, as if on one device."""
    training, loader = plan(config)
    with closing(loader), recording() as calls:
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), dict(loader.peek()))
        jax.eval_shape(
            lambda weights, batch: training.loss(weights, batch, None), training.states.abstract().weights, batch
        )
    unplaced = [
        RecordedCall(call.operation, {k: v for k, v in call.arguments.items() if k != "place"}) for call in calls
    ]
    return list({f"{call.operation.__name__} {call.arguments}": call for call in unplaced}.values())


def relative_error(result: Any, expected: Any) -> float:
    """Largest relative error in the L2 norm over all arrays; NaN if an array contains NaN."""
    pairs = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
    float32_pairs = [(a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in pairs]
    return float(np.max([jnp.linalg.norm(a - b) / jnp.maximum(jnp.linalg.norm(b), 1e-30) for a, b in float32_pairs]))


def _arrays(call: RecordedCall) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: value for name, value in call.arguments.items() if isinstance(value, jax.ShapeDtypeStruct)}


def _static_args(call: RecordedCall) -> dict[str, str]:
    """The arguments of a call that are not arrays."""
    arrays = _arrays(call)
    static = {name: value for name, value in call.arguments.items() if name not in arrays and value is not None}
    return {name: str(value) for name, value in static.items() if name not in IMPLEMENTATION_ARGS}


def _random_inputs(call: RecordedCall, seed: int, max_dims: Mapping[str, int]) -> Arrays:
    """Random arrays for a call, with dimensions limited to `max_dims` by their letter."""
    arrays: Arrays = {}
    rows = 0
    for number, (name, array) in enumerate(_arrays(call).items()):
        letters = name.rpartition("_")[2]
        shape = tuple(min(size, max_dims.get(letter, size)) for size, letter in zip(array.shape, letters, strict=True))
        rows = rows or shape[0]
        arrays[name] = _random_array(name, shape, array.dtype, jax.random.key(seed * 64 + number), rows=rows)
    return arrays


def _random_array(name: str, shape: tuple[int, ...], dtype: Any, key: jax.Array, *, rows: int) -> jax.Array:
    """Values as in a model: decays are negative, rates are between 0 and 1, group sizes add up to the rows."""
    if name.startswith("sizes"):
        groups = shape[0]
        return jnp.full(shape, rows // groups, dtype).at[0].add(rows - groups * (rows // groups))
    if "positions" in name:
        return jnp.broadcast_to(jnp.arange(shape[-1], dtype=dtype), shape)
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.ones(shape, dtype)
    values = jax.random.normal(key, shape, jnp.float32)
    if "decay" in name:
        values = -jnp.abs(values)
    elif "rate" in name:
        values = jax.nn.sigmoid(values)
    elif name.startswith("key"):
        values = values / jnp.linalg.norm(values, axis=-1, keepdims=True)
    return values.astype(dtype)


def _split(arrays: Arrays) -> tuple[Arrays, Arrays]:
    """Split arrays into floating-point ones, which have a gradient, and the others."""
    floats = {name: array for name, array in arrays.items() if jnp.issubdtype(array.dtype, jnp.floating)}
    return floats, {name: array for name, array in arrays.items() if name not in floats}


def _forward(call: RecordedCall, backend: str) -> Callable[[Arrays, Arrays], Any]:
    arguments, arrays = call.arguments, _arrays(call)
    static = {k: value for k, value in arguments.items() if k not in arrays and k not in IMPLEMENTATION_ARGS}
    sizes = {"sizes": arguments["sizes"]} if "sizes" in arguments and backend == arguments["backend"] else {}
    operation = partial(call.operation, **static, **sizes, backend=backend)
    return lambda floats, others: operation(**floats, **others)


def _gradients(call: RecordedCall, backend: str) -> Callable[[Arrays, Arrays], Any]:
    """The outputs, and their VJP with random cotangents."""

    def forward_and_backward(floats: Arrays, others: Arrays) -> Any:
        outputs, vjp = jax.vjp(lambda floats: _forward(call, backend)(floats, others), floats)
        keys = jax.random.split(jax.random.key(1), len(jax.tree.leaves(outputs)))
        leaves, treedef = jax.tree.flatten(outputs)
        cotangents = [jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
        return outputs, vjp(jax.tree.unflatten(treedef, cotangents))

    return forward_and_backward


def _time_call(call: RecordedCall, backend: str) -> dict[str, float]:
    """Milliseconds of a call, forward and with its gradients."""
    input_sets = [_split(_random_inputs(call, 1 + number, {})) for number in range(INPUT_SETS)]
    functions = {"forward_ms": _forward(call, backend), "both_ms": _gradients(call, backend)}
    return {name: round(milliseconds(function, input_sets), 4) for name, function in functions.items()}


def milliseconds(function: Callable[..., Any], input_sets: list[tuple]) -> float:
    """Median time of a call.

    A program makes one call per input set, so that the cache is not measured; programs are dispatched without waiting,
    so that the host is not measured unless it is slower than the device.
    """
    run = jax.jit(lambda input_sets: [function(*inputs) for inputs in input_sets])
    jax.block_until_ready(run(input_sets))
    times = []
    for _ in range(TIMINGS):
        start = time.perf_counter()
        for _ in range(DISPATCHES):
            last = run(input_sets)
        jax.block_until_ready(last)
        times.append((time.perf_counter() - start) / DISPATCHES / len(input_sets) * 1e3)
    return statistics.median(times)
