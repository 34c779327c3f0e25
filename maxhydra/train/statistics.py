"""Statistics of every layer: gradients, weights, updates and activations, on the steps of `statistics.every`.

The step reduces them to a few numbers per layer on the devices; a thread reads those and writes them to
statistics.jsonl, in the format of metrics.jsonl. A name is STATISTIC/PART/LAYER, such as grad_norm/mlp/3, or
STATISTIC/PART for parts outside of the layers, such as weight_max/embedding. With pipeline stages and stacked layers
the reduction is per layer all the same.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.config.schema.model import Model
from maxhydra.layers.statistics import LAYER
from maxhydra.record import MetricsWriter
from maxhydra.train.loss import POSITIONS, Tree

# A step as in train/step.py, which imports this module.
StepFn = Callable[[Any, Any], tuple[Any, dict[str, Any]]]
# Entry of a step's metrics: a tree of arrays, unlike all others.
STATISTICS = "statistics"
# Sections of the parameter tree that hold layers.
_SECTIONS = ("prefix", "pattern", "remainder", "mtp")
# A hidden unit is dead if its largest magnitude is below this share of the median unit of its layer.
DEAD_SHARE = 0.01
DIGITS = 6


def reduce_parameters(tree: Tree) -> dict[str, dict[str, jax.Array]]:
    """Sum of squares and largest magnitude by section, block and sub-layer; of the pattern, one per repetition."""
    found: defaultdict[str, dict[str, jax.Array]] = defaultdict(dict)
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = [str(key.key) for key in keys]
        is_layer = path[0] in _SECTIONS
        part = "/".join([*path[:2], _sublayer(path[2])]) if is_layer else path[0]
        axes = tuple(range(1 if path[0] == "pattern" else 0, leaf.ndim))
        wide, known = leaf.astype(jnp.float32), found[part]
        square, largest = jnp.sum(jnp.square(wide), axis=axes), jnp.max(jnp.abs(wide), axis=axes)
        known["square"] = known["square"] + square if known else square
        known["max"] = jnp.maximum(known["max"], largest) if "max" in known else largest
    return dict(found)


def _sublayer(name: str) -> str:
    """The sub-layer of a layer's parameter; all norms of the residual stream count as one."""
    return "norm" if name.endswith("norm") else name


def reduce_step(trees: Mapping[str, Tree], aux: Tree, *, is_applied: jax.Array) -> Tree:
    """The statistics of a step, as small arrays, given its trees `grad`, `weight` and `update`, and aux outputs."""
    reduced = {name: reduce_parameters(tree) for name, tree in trees.items()}
    reduced["update"] = jax.tree.map(lambda x: jnp.where(is_applied, x, 0), reduced["update"])
    return {**reduced, "aux": aux}


def flatten(statistics: Tree, model: Model) -> dict[str, float]:
    """Statistics of a step, as `reduce_step` returns them, by the names of statistics.jsonl."""
    values: dict[str, Any] = {}
    for name in ("grad", "weight", "update"):
        for part, sums in statistics[name].items():
            section, *rest = part.split("/")
            norm = {f"{name}_norm": np.sqrt(sums["square"]), f"{name}_max": sums["max"]}
            if not rest:
                values |= {f"{statistic}/{section}": value for statistic, value in norm.items()}
            else:
                values |= _by_layer(norm, section, int(rest[0]), rest[1], model)
    for section, blocks in statistics["aux"].items():
        for block, aux in blocks.items() if section in _SECTIONS else ():
            for sublayer, sums in aux.items():
                for part, found in _of_activations(sublayer, sums):
                    values |= _by_layer(found, section, int(block), part, model)
    for bucket, (nll, weight) in enumerate(_pairs(statistics["aux"].get(POSITIONS))):
        if weight > 0:
            values[f"loss/position/{2**bucket - 1}"] = nll / weight
    return {name: float(f"{float(value):.{DIGITS}g}") for name, value in values.items()}


def _pairs(sums: Mapping[str, np.ndarray] | None) -> list[tuple[Any, Any]]:
    return [] if sums is None else list(zip(sums["nll"], sums["weight"], strict=True))


def _of_activations(sublayer: str, sums: Mapping[str, np.ndarray]) -> list[tuple[str, dict[str, np.ndarray]]]:
    """(part, statistics by name) of the aux outputs of a sub-layer; leading axes are repetitions."""
    if sublayer == LAYER:
        names = [name.removesuffix("_max") for name in sums if name.endswith("_max")]
        count = np.maximum(sums["count"], 1)
        return [
            (
                name,
                {"activation_rms": np.sqrt(sums[f"{name}_square"] / count), "activation_max": sums[f"{name}_max"]},
            )
            for name in names
        ]
    found: dict[str, np.ndarray] = {}
    if "logit_max" in sums:
        found["logit_max"] = sums["logit_max"]
    if "unit_max" in sums:
        units = np.asarray(sums["unit_max"])
        found["dead_units"] = np.mean(units < DEAD_SHARE * np.median(units, axis=-1, keepdims=True), axis=-1)
    if "load" in sums:
        load = np.asarray(sums["load"])
        mean = np.maximum(np.mean(load, axis=-1), 1e-6)
        found |= {"expert_load_max": np.max(load, axis=-1) / mean, "expert_load_min": np.min(load, axis=-1) / mean}
        found["dead_experts"] = np.mean(load == 0, axis=-1)
    return [(sublayer, found)]


def _by_layer(
    values: Mapping[str, np.ndarray], section: str, block: int, part: str, model: Model
) -> dict[str, np.ndarray]:
    """Values of a block, [repetitions] in the pattern, under the number of each layer."""
    pattern, prefix = len(model.pattern), len(model.prefix)
    first = {"prefix": 0, "pattern": prefix, "mtp": model.num_layers}.get(section)
    if first is None:
        first = model.num_layers - (model.num_layers - prefix) % pattern
    return {
        f"{name}/{part}/{first + repetition * pattern + block}": item
        for name, value in values.items()
        for repetition, item in enumerate(np.atleast_1d(value))
    }


class StatisticsLogger:
    """Decides which steps record statistics, and writes them from a thread, so that the device never waits."""

    def __init__(self, every: int | None, step: StepFn | None, writer: Callable[[], MetricsWriter], model: Model):
        """`step` is the compiled step that returns statistics; `writer` opens the file before the first record."""
        self._every, self._step, self._open, self._model = every, step, writer, model
        self._writer: MetricsWriter | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="statistics")
        self._pending: Future[None] | None = None

    def choose(self, step: int, usual: StepFn) -> StepFn:
        """The function that runs a step: the usual one unless statistics are due."""
        if self._every is None or self._step is None or step % self._every:
            return usual
        return self._step

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Take the statistics out of the metrics of a step, and write them once the device has completed it."""
        if (statistics := metrics.pop(STATISTICS, None)) is not None:
            self.flush()
            self._pending = self._thread.submit(self._write, step, statistics)

    def flush(self) -> None:
        """Wait until everything is written."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _write(self, step: int, statistics: Tree) -> None:
        if self._writer is None:
            self._writer = self._open()
        self._writer.write(step, flatten(jax.device_get(statistics), self._model))

    def close(self) -> None:
        self._thread.shutdown()
        if self._writer is not None:
            self._writer.close()
