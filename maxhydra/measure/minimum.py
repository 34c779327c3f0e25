"""Fewest bytes that a device must send in a training step, by the mesh axes along which they travel.

Per layer, in the compute dtype (bfloat16 as a rule), with one pass of recomputation in the backward pass:

- weights sharded over data-parallel axes: gathered forward and backward, gradients reduce-scattered once (ZeRO-3; the
  head once in each direction, since loss and gradient are adjacent). Gradients of replicated weights: all-reduced.
- embedding rows: one all-to-all of the batch's hidden states each way, or the whole table if that is less.
- tensor parallelism: an all-gather and a reduce-scatter of the hidden states around attention and feed-forward, in
  both directions, and the same for embedding and head (Korthikanti et al., 2022).
- expert parallelism: each token's hidden state to its top_k experts and back, in both directions, each device once.
- sequence parallelism: keys and values of the whole sequence forward and backward, and their gradients (ring), or the
  heads by all-to-all (Ulysses), whichever is less. Windows: only the keys and values that reach the next device. MLA:
  the latents travel around the ring. For Ulysses every device needs the latents of all tokens, of which an all-to-all
  sends no part only to one device: they are gathered, or keys and values are exchanged and the shared keys gathered.
- pipeline parallelism: the hidden states of all microbatches from stage to stage, in both directions.

What `model.remat` does not save is sent again in the backward pass: the gathered inputs of both branches under tensor
parallelism, which Korthikanti et al. save sharded too, and the sum of the attention branch unless it is saved; the
tokens of experts; the exchanges of attention under `full`. `recomputed=False` leaves these out.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from maxhydra.config import Config
from maxhydra.config.schema.model import Head, RematPolicy
from maxhydra.model import build
from maxhydra.sharding import Sharder, is_axes
from maxhydra.train.batches import plan_batches


def minimum_wire_bytes(config: Config, sharder: Sharder, *, recomputed: bool = True) -> dict[str, float]:
    """Bytes that a device sends, by axes as in `hlo.axes_of`: {"fsdp": 1e9, "tensor": 2e9}.

    recomputed: count activations that the remat policy of the config makes the devices send again.
    """
    again = Recomputed.of(config) if recomputed else Recomputed(0, 0, 0)
    totals: dict[str, float] = defaultdict(float)
    leaves = _leaves(config)
    for path, shape, axes in leaves:
        _add_weight(totals, path, shape, axes, config=config, sharder=sharder)
    _add_activations(totals, leaves, again, config=config, sharder=sharder)
    return {axes: size for axes, size in totals.items() if size}


class Recomputed(NamedTuple):
    """Collectives of a layer that run again in the backward pass, in units of their forward pass."""

    tensor: int
    """Gathers and scatters of the hidden states, of which the forward pass has 4."""
    experts: int
    """Dispatches of the tokens. Outputs are not sent again: `_return_sums` does not need them."""
    attention: int
    """Exchanges of attention over the sequence."""

    @classmethod
    def of(cls, config: Config) -> "Recomputed":
        policy, saved = config.model.remat.policy, config.model.remat.save
        if policy is RematPolicy.none:
            return cls(0, 0, 0)
        is_custom = policy is RematPolicy.custom
        sums = policy is RematPolicy.full or (is_custom and "attention_out" not in saved)
        attention = policy is RematPolicy.full or (is_custom and not {"query", "key", "value", "context"} <= set(saved))
        return cls(2 + sums, 1, int(attention))


Leaf = tuple[str, tuple[int, ...], tuple[str | None, ...]]


def _leaves(config: Config) -> list[Leaf]:
    """Path, shape and logical axes of every weight."""
    model = build(config.model, None, None)
    shapes = jax.tree_util.tree_leaves_with_path(model.shapes)
    axes = jax.tree.leaves(model.axes, is_leaf=is_axes)
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape, names)
        for (path, leaf), names in zip(shapes, axes, strict=True)
    ]


def _add_weight(
    totals: dict[str, float],
    path: str,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    config: Config,
    sharder: Sharder,
) -> None:
    """Gathers and gradient reductions of one weight."""
    replicas = _batch_axes(sharder)
    split: list[str] = []
    num_shards = 1
    for name, entry in zip(axes, sharder.spec(axes), strict=True):
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        # Experts and the layers of a stage stay where they are; tensor-parallel shards too.
        gathered = [axis for axis in names if axis in replicas and name not in ("experts", "layers")]
        split += gathered
        num_shards *= math.prod(sharder.mesh.shape[axis] for axis in names if axis not in gathered)
    used = {axis for entry in sharder.spec(axes) for axis in (entry if isinstance(entry, tuple) else (entry,))}
    rest = [axis for axis in replicas if axis not in used]
    size = math.prod(shape) / num_shards * _itemsize(config)
    is_table = path.startswith("embedding/") and len(shape) == 2
    if split and not (is_table and not _is_tied(config)):
        times = 2 if path.startswith("head/") or is_table else 3
        totals[_key(split, sharder)] += times * _ring(size, split, sharder)
    if rest:
        totals[_key(rest, sharder)] += 2 * _ring(size / _count(split, sharder), rest, sharder)


def _add_activations(
    totals: dict[str, float], leaves: list[Leaf], again: Recomputed, *, config: Config, sharder: Sharder
) -> None:
    spec, mesh = plan_batches(config, sharder), sharder.mesh.shape
    tokens = spec.batch * spec.rows.seq_len / math.prod(mesh[axis] for axis in _batch_axes(sharder))
    table = next(shape for path, shape, _ in leaves if path.startswith("embedding/") and len(shape) == 2)
    hidden = tokens * table[1] * _itemsize(config)
    layers = _layers(leaves, "attention_norm/scale") or _layers(leaves, "attention/out/kernel")
    if mesh["tensor"] > 1:
        totals["tensor"] += ((8 + again.tensor) * layers + 4) * _ring(hidden, ["tensor"], sharder)
    if mesh["stage"] > 1:
        totals["stage"] += 2 * (mesh["stage"] - 1) * hidden
    if rows := [axis for axis in sharder.mesh_axes("embed") if axis in _batch_axes(sharder)]:
        lookup = _ring(hidden / mesh["tensor"], rows, sharder)
        gather = _ring(math.prod(table) / mesh["tensor"] * _itemsize(config), rows, sharder)
        totals[_key(rows, sharder)] += 0 if _is_tied(config) else 2 * min(lookup, gather)
    if mesh["expert"] > 1 and (moe := _layers(leaves, "mlp/experts/down/kernel")):
        copies = min(mesh["expert"], _top_k(config))
        totals["expert"] += (4 + again.experts) * moe * copies * _ring(hidden, ["expert"], sharder)
    if mesh["sequence"] > 1:
        totals["sequence"] += _sequence_bytes(leaves, tokens, again, config=config, sharder=sharder)


def _sequence_bytes(leaves: list[Leaf], tokens: float, again: Recomputed, *, config: Config, sharder: Sharder) -> float:
    """Ring or Ulysses for every layer with softmax attention over keys of its own."""
    total, ways = 0.0, sharder.mesh.shape["sequence"]
    rows = tokens * ways / plan_batches(config, sharder).rows.seq_len
    widths = {path: (shape, axes) for path, shape, axes in leaves}
    for path, (shape, axes) in widths.items():
        prefix, _, name = path.rpartition("attention/")
        is_softmax = f"{prefix}attention/log_speed" not in widths
        if name not in ("key/kernel", "latent/kernel") or not is_softmax:
            continue
        layers = shape[0] if axes[0] == "layers" else 1
        heads, width, exchanged = _head_widths(widths, prefix, ways)
        local = tokens * _itemsize(config) / sharder.mesh.shape["tensor"] * (ways - 1)
        ring = (3 + again.attention) * width * local
        ulysses = (2 + again.attention) * (heads + exchanged) * local / ways
        reach = _window(path, config)
        # Keys and values of the tokens before a device's own, forward and, with their gradients, backward.
        halo = math.inf if reach is None else (3 + again.attention) * width * rows * reach * _itemsize(config)
        total += layers * min(ring, ulysses, halo / sharder.mesh.shape["tensor"])
    return total


def _head_widths(widths: Mapping[str, tuple[tuple[int, ...], Any]], prefix: str, ways: int) -> tuple[int, int, int]:
    """Numbers per token: of queries and outputs, of keys and values around a ring, and of these by all-to-all."""

    def shape(name: str) -> tuple[int, ...]:
        return widths[f"{prefix}attention/{name}/kernel"][0]

    query = "query" if f"{prefix}attention/query/kernel" in widths else "query_up"
    heads = math.prod(shape(query)[-2:]) + math.prod(shape("out")[-3:-1])
    if f"{prefix}attention/latent/kernel" not in widths:
        keys = 2 * math.prod(shape("key")[-2:])
        return heads, keys, keys
    latent, *key_value = shape("key_value")[-3:]
    width = shape("latent")[-1]
    # Whole latents reach every device, or whole keys that all heads share and a part of the other keys and values.
    return heads, width, min(width * ways, math.prod(key_value) + (width - latent) * ways)


def _window(path: str, config: Config) -> int | None:
    """Tokens before its own that a query of a layer sees; None: all."""
    group, _, rest = path.partition("/")
    kinds = config.model.pattern if group == "pattern" else ()
    index = rest.partition("/")[0]
    if not index.isdigit() or int(index) >= len(kinds):
        return None
    window = config.model.kinds[kinds[int(index)]].attention.window
    return None if window is None else window - 1


def _layers(leaves: list[Leaf], suffix: str) -> int:
    """Number of layers that have a weight of this name."""
    return sum((shape[0] if axes[0] == "layers" else 1) for path, shape, axes in leaves if path.endswith(suffix))


def _batch_axes(sharder: Sharder) -> list[str]:
    """Mesh axes whose devices process different tokens with the same weights."""
    names = {*sharder.mesh_axes("act_batch"), *sharder.mesh_axes("act_length")}
    return [axis for axis in sharder.mesh.shape if axis in names]


def _ring(size: float, axes: list[str], sharder: Sharder) -> float:
    """Bytes that a device sends to gather or reduce-scatter an array of this size."""
    count = _count(axes, sharder)
    return size * (count - 1) / count


def _count(axes: list[str], sharder: Sharder) -> int:
    return math.prod(sharder.mesh.shape[axis] for axis in axes)


def _key(axes: list[str], sharder: Sharder) -> str:
    return "+".join(axis for axis in sharder.mesh.shape if axis in axes)


def _itemsize(config: Config) -> int:
    return int(np.dtype(jax.numpy.dtype(config.model.dtypes.compute.value)).itemsize)


def _is_tied(config: Config) -> bool:
    return config.model.head is Head.tied


def _top_k(config: Config) -> int:
    return max(kind.moe.top_k for kind in config.model.kinds.values() if kind.moe.experts is not None)
