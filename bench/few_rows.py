"""Times the experts of one layer for few tokens on this GPU, in each storage format, for several tiles.

    python bench/few_rows.py [qwen3-30b-a3b] [gpt-oss-20b] [--formats int4,mxfp4] [--tokens 1,64] [--all-tiles]

Prints a JSON line per model, format, number of tokens and kernel: `tiles`, the fastest first, with microseconds and
TB/s of weights and scales read. `layer` is the whole layer between router and residual, with the default tiles and with
the fastest: microseconds, and the relative error against float32 for one token. Each program calls a kernel on other
tokens and experts CALLS times, so that neither the cache nor the host is measured. Without --all-tiles fewer are timed.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from target import open_target

from maxhydra.kernels.grouped_matmul import expert_weights, few_rows
from maxhydra.measure.kernels import relative_error

# Residual stream, hidden, experts, experts per token.
MODELS = {"qwen3-30b-a3b": (2048, 768, 128, 8), "gpt-oss-20b": (2880, 2880, 32, 4)}
FORMATS = ("bfloat16", "int8", "int4", "mxfp4")
# Calls per program, dispatches per timing, timings.
CALLS, DISPATCHES, TIMINGS = 16, 6, 3
DIRECTIONS = ("into", "out")
# Fields that are changed together for packed weights.
PAIRS = ({"columns", "warps"}, {"columns", "splits"}, {"terms", "stages"})


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    format: str
    tokens: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return MODELS[self.model]


class Timing(NamedTuple):
    tile: Any
    compiled: Callable[..., Any]


def random_matrices(case: Case, inputs: int, outputs: int, key: jax.Array) -> few_rows.Matrices:
    """Random codes; scales give outputs of about the size of the inputs."""
    E, scale = case.sizes[2], inputs**-0.5
    if case.format == "bfloat16":
        return few_rows.Matrices(jax.random.normal(key, (E, inputs, outputs), jnp.bfloat16) * jnp.bfloat16(scale))
    if case.format == "int8":
        codes = jax.lax.bitcast_convert_type(jax.random.bits(key, (E, inputs, outputs), jnp.uint8), jnp.int8)
        return few_rows.Matrices(codes, jnp.full((E, outputs), scale / 64, jnp.float32))
    codes = jax.random.bits(key, (E, inputs, outputs), jnp.uint8) & 15
    if case.format == "int4":
        scales = jax.random.uniform(key, (E, inputs // 64, outputs), minval=scale / 8, maxval=scale / 4)
        return expert_weights.pack_int4(codes, scales)
    return expert_weights.pack_mxfp4(codes, jax.random.randint(key, (E, inputs // 32, outputs), 118, 122))


def random_experts(case: Case) -> few_rows.Experts:
    D, F, _, _ = case.sizes
    make = jax.jit(random_matrices, static_argnums=(0, 1, 2))
    return few_rows.Experts(
        make(case, D, F, jax.random.key(0)), make(case, D, F, jax.random.key(1)), make(case, F, D, jax.random.key(2))
    )


def random_ids(case: Case) -> jax.Array:
    """[calls, M, K], other experts in successive calls of one token."""
    _, _, E, K = case.sizes
    if case.tokens == 1:
        return (jnp.arange(CALLS)[:, None, None] * K + jnp.arange(K)) * (E // K + 1) % E
    scores = jax.random.normal(jax.random.key(3), (CALLS, case.tokens, E))
    return jax.lax.top_k(scores, K)[1]


def activation(gate: jax.Array | None, up: jax.Array) -> jax.Array:
    assert gate is not None
    return jax.nn.silu(gate) * up


def default_tiles(case: Case, experts: few_rows.Experts) -> few_rows.Tiles:
    D, F, E, K = case.sizes
    groups, itemsize = min(E, case.tokens * K), experts.up.bytes_per_weight
    return few_rows.choose_tiles(case.tokens, case.tokens * K, groups, D, F, itemsize=itemsize, matrices=2)


def other_tiles(case: Case, direction: str, tile: few_rows.Tile, *, every: bool) -> Iterator[few_rows.Tile]:
    """The default tile first, then others that are valid."""
    D, F, _, _ = case.sizes
    terms, outputs = (D, F) if direction == "into" else (F, D)
    is_packed = case.format in ("int4", "mxfp4")
    steps = [n for n in (64, 128, 192, 256) if terms % n == 0 and (is_packed or n in (64, 128))]
    widths = [n for n in (32, 64, 128, 256) if outputs % n == 0]
    choices = itertools.product(
        {16, tile.rows},
        widths,
        steps,
        [n for n in (1, 2, 3, 4, 5, 6, 8, 9, 12, 15, 16) if n in (tile.splits, tile.splits * 2, tile.splits // 2)],
        (2, 4, 8),
        (2, 3, 4, 6),
    )
    yield tile
    for other in itertools.starmap(few_rows.Tile, choices):
        is_valid = terms % (other.terms * other.splits) == 0 and other != tile
        # Matmuls of few columns per warp need no matrix instruction; of many, more registers than there are.
        is_reasonable = 8 <= other.columns // other.warps <= 64
        changes = {name for name in other._fields if getattr(other, name) != getattr(tile, name)}
        is_near = len(changes) == 1 or (is_packed and changes in PAIRS)
        if is_valid and is_reasonable and (is_near or (every and len(changes) <= 3)):
            yield other


def kernel_call(case: Case, direction: str, experts: few_rows.Experts, tile: few_rows.Tile) -> Callable[..., Any]:
    """One of the two kernels for all calls; arguments: rows of each call, and the experts' ids."""
    R = case.tokens * case.sizes[3]

    # Traced once.
    @jax.jit
    def call(x: jax.Array, group: few_rows.Groups, experts: few_rows.Experts) -> jax.Array:
        matrices = experts.into if direction == "into" else (experts.down,)
        index = group.tokens_R if direction == "into" else 1
        return few_rows.multiply_rows(x, index, matrices, table_G3=group.table_G3, R=R, tile=tile, interpret=False)

    def run(rows: list[jax.Array], groups: list[few_rows.Groups], experts: few_rows.Experts) -> list[jax.Array]:
        return [call(x, group, experts) for x, group in zip(rows, groups, strict=True)]

    return run


def layer_call(case: Case, tiles: few_rows.Tiles | None) -> Callable[..., Any]:
    @jax.jit
    def call(x: jax.Array, ids: jax.Array, factors: jax.Array, experts: few_rows.Experts) -> jax.Array:
        return few_rows.apply_experts(x, ids, factors, experts, activation, tiles=tiles)

    def run(rows: Any, ids: Any, factors: jax.Array, experts: few_rows.Experts) -> list[jax.Array]:
        return [call(x, own, factors, experts) for x, own in zip(rows, ids, strict=True)]

    return run


def microseconds(compiled: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    jax.block_until_ready(compiled(*arguments))
    times = []
    for _ in range(TIMINGS):
        start = time.perf_counter()
        for _ in range(DISPATCHES):
            last = compiled(*arguments)
        jax.block_until_ready(last)
        times.append((time.perf_counter() - start) / DISPATCHES / CALLS * 1e6)
    return statistics.median(times)


def bytes_read(ids: jax.Array, matrices: tuple[few_rows.Matrices, ...]) -> float:
    """Weights and scales of the experts that are hit, the mean of the calls."""
    hit = sum(len(set(own.ravel().tolist())) for own in jax.device_get(ids)) / len(ids)
    parts = [part for matrix in matrices for part in (matrix.values, matrix.scales) if part is not None]
    return hit * sum(part.nbytes / part.shape[0] for part in parts)


def reference(case: Case, experts: few_rows.Experts, x: jax.Array, ids: jax.Array, factors: jax.Array) -> jax.Array:
    """One token in float32."""
    hit = [type(m)(*(None if part is None else part[ids[0]] for part in m)) for m in experts]
    if case.format in ("int4", "mxfp4"):
        wide = [expert_weights.unpack(matrix, jnp.dtype(jnp.float32)) for matrix in hit]
    else:
        wide = [m.values.astype(jnp.float32) * (1 if m.scales is None else m.scales[:, None]) for m in hit]
    with jax.default_matmul_precision("highest"):
        x = x.astype(jnp.float32)
        gate, up = (jnp.einsum("md,kdf->kf", x, weight) for weight in wide[:2])
        return jnp.einsum("kf,kfd,k->d", activation(gate, up), wide[2], factors[0])[None]


def run_case(case: Case, pool: ThreadPoolExecutor, facts: dict[str, Any], *, every: bool) -> None:
    (D, F, E, K), M = case.sizes, case.tokens
    experts, ids = random_experts(case), random_ids(case)
    groups = [jax.jit(few_rows.group_rows, static_argnums=1)(own, E) for own in ids]
    x, hidden = (
        [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(CALLS)]
        for shape in ((M, D), (M * K, F))
    )
    factors = jnp.full((M, K), 1 / K, jnp.float32)
    defaults = default_tiles(case, experts)

    def compile_kernel(direction: str, tile: few_rows.Tile) -> Timing:
        rows = x if direction == "into" else hidden
        try:
            return Timing(
                tile, jax.jit(kernel_call(case, direction, experts, tile)).lower(rows, groups, experts).compile()
            )
        except Exception as error:
            return Timing(tile, lambda *_, message=str(error)[:200]: message)

    best = []
    for direction, default in zip(DIRECTIONS, defaults, strict=True):
        tiles = list(dict.fromkeys(other_tiles(case, direction, default, every=every)))
        timings = list(pool.map(partial(compile_kernel, direction), tiles))
        rows = x if direction == "into" else hidden
        matrices = experts.into if direction == "into" else (experts.down,)
        found, failed = [], []
        for tile, compiled in timings:
            if isinstance(error := compiled(rows, groups, experts), str):
                failed.append({**tile._asdict(), "error": error})
                continue
            us = microseconds(compiled, (rows, groups, experts))
            found.append({**tile._asdict(), "us": round(us, 2), "tb_s": round(bytes_read(ids, matrices) / us / 1e6, 3)})
        found.sort(key=lambda line: line["us"])
        default_us = next((line["us"] for line in found if {**default._asdict()}.items() <= line.items()), None)
        print_line(facts, case, kernel=direction, default_us=default_us, tiles=found[:8], failed=failed[:2])
        best.append(few_rows.Tile(**{name: found[0][name] for name in few_rows.Tile._fields}))
    arguments, lines = (x, list(ids), factors, experts), {}
    for name, tiles in (("default", None), ("best", few_rows.Tiles(*best))):
        compiled = jax.jit(layer_call(case, tiles)).lower(*arguments).compile()
        lines[f"{name}_us"] = round(microseconds(compiled, arguments), 2)
        if M == 1:
            expected = reference(case, experts, x[0], ids[0], factors)
            lines[f"{name}_error"] = float(f"{relative_error(compiled(*arguments)[0], expected):.2g}")
    print_line(facts, case, kernel="layer", **lines)


def print_line(facts: dict[str, Any], case: Case, **values: Any) -> None:
    print(json.dumps({"bench": "few_rows", **dataclasses.asdict(case), **values, **facts}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--tokens", default="1,8,64")
    parser.add_argument("--all-tiles", action="store_true")
    arguments = parser.parse_args()
    open_target([])
    facts = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    tokens = [int(number) for number in arguments.tokens.split(",")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for model, format, number in itertools.product(arguments.models, arguments.formats.split(","), tokens):
            run_case(Case(model, format, number), pool, facts, every=arguments.all_tiles)


if __name__ == "__main__":
    main()
