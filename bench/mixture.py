"""Times the parts of a mixture of experts in training on this GPU. Prints one JSON line per part.

    python bench/mixture.py [model=qwen3-30b-a3b] [batch=4] [train.seq_len=4096] [OVERRIDES...]

One layer with random weights and tokens, in the compute dtype. `router`, `experts` (sorting, copies, matmuls, sums) and
`layer` (both, rematerialized by the config's policy) give milliseconds of the forward pass and of both passes, the
matmuls of the experts TFLOP/s, with the loads of this router and with equal ones. The script uses only functions that
exist since November 2026, so PYTHONPATH=OTHER_TREE times an older tree.
"""

import json
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from arguments import split_arguments
from flax import nnx
from target import open_target

from maxhydra.kernels.grouped_matmul import grouped_matmul
from maxhydra.layers import Context, ParamBuilder
from maxhydra.measure.kernels import milliseconds
from maxhydra.model.block import BlockSpec, Remat, is_cast
from maxhydra.model.decoder import DecoderSpec
from maxhydra.sharding import Sharder


class Layer:
    """The feed-forward of one layer as functions of weights and tokens."""

    def __init__(self, config: Any, batch: int) -> None:
        model = config.model
        spec = DecoderSpec.of(model)
        block = BlockSpec.of(model, model.pattern[-1])
        self.moe, self.remat = block.feed_forward, Remat.of(model.remat)
        compute = spec.matmul_spec.compute
        make = ParamBuilder(jax.random.key(0), dtype=jnp.dtype(jnp.float32), layers=None, matmul_spec=spec.matmul_spec)

        @jax.jit
        def build() -> Any:
            state = nnx.state(self.moe.build(make.below("mlp")))

            def cast(weight: nnx.Variable) -> nnx.Variable:
                return weight.replace(weight[...].astype(compute)) if is_cast(weight) else weight

            return jax.tree.map(cast, state, is_leaf=lambda node: isinstance(node, nnx.Variable))

        self.graph = nnx.graphdef(nnx.eval_shape(lambda: self.moe.build(make.below("mlp"))))
        self.weights = build()
        shape = (batch, config.train.seq_len)
        self.x = jax.random.normal(jax.random.key(1), (*shape, model.emb_dim), compute)
        positions = jnp.broadcast_to(jnp.arange(shape[1]), shape)
        self.ctx = Context(
            positions=positions, segments=positions * 0 + 1, sharder=Sharder.single(), cache=None, dropout_key=None
        )

    def module(self, weights: Any) -> Any:
        return nnx.merge(self.graph, weights)

    def router(self, weights: Any, x: jax.Array) -> Any:
        routing = self.module(weights).router(x, self.ctx)
        return routing.weights_BTK, routing.shares_BTE

    def experts(self, weights: Any, x: jax.Array, ids: jax.Array, shares: jax.Array) -> jax.Array:
        from maxhydra.layers.expert_rows import RoutedTokens

        routed = RoutedTokens(x, ids, shares)
        return self.module(weights).experts(routed, self.ctx, capacity=None, is_real_BT=self.ctx.is_real_BT).out_BTD

    def all(self, weights: Any, x: jax.Array) -> jax.Array:
        run = self.remat.wrap(lambda weights, x, ctx: self.module(weights)(x, ctx).out_BTD, in_loop=False)
        return run(weights, x, self.ctx)


def both(function: Any, *arrays: Any) -> Any:
    """Outputs and gradients by all arrays of floats."""
    floats = [jnp.issubdtype(jax.tree.leaves(array)[0].dtype, jnp.floating) for array in arrays]

    def of_floats(*given: Any) -> Any:
        remaining = iter(given)
        return function(
            *(next(remaining) if is_float else array for is_float, array in zip(floats, arrays, strict=True))
        )

    out, pull_back = jax.vjp(of_floats, *(array for is_float, array in zip(floats, arrays, strict=True) if is_float))
    return out, pull_back(jax.tree.map(lambda x: (x + 1).astype(x.dtype), out))


def report(part: str, **facts: Any) -> None:
    head = {"bench": "mixture", "device": jax.devices()[0].device_kind, "jax": jax.__version__, "part": part}
    print(json.dumps({**head, **facts}), flush=True)


def time_part(part: str, function: Any, *arrays: Any) -> None:
    forward, backward = (milliseconds(run, [arrays]) for run in (function, partial(both, function)))
    report(part, forward_ms=round(forward, 3), both_ms=round(backward, 3))


def time_matmuls(layer: Layer, sizes: jax.Array, name: str) -> None:
    """TFLOP/s of the three matmuls of an expert, of the gradients of rows, and of those of matrices."""
    experts = layer.module(layer.weights).experts
    rows = int(jnp.sum(sizes))
    for kernel in ("up", "down"):
        w = getattr(experts, kernel).weight
        _, D, F = w.shape
        x, d = (jax.random.normal(jax.random.key(i), (rows, size), w.dtype) for i, size in enumerate((D, F)))
        run = partial(grouped_matmul, sizes_E=sizes, backend=experts.spec.kernel.backend)
        passes = {
            "forward": lambda x, w, d, run=run: run(x, w),
            "rows": lambda x, w, d, run=run: jax.vjp(lambda x: run(x, w), x)[1](d),
            "matrices": lambda x, w, d, run=run: jax.vjp(lambda w: run(x, w), w)[1](d),
        }
        tflop = 2 * rows * D * F / 1e12
        ms = {name: milliseconds(function, [(x, w, d)]) for name, function in passes.items()}
        tflops = {name: round(tflop / t * 1e3, 1) for name, t in ms.items()}
        report(f"{kernel}, {name} loads", shape=[rows, len(sizes), D, F], tflops=tflops)


def main(arguments: list[str]) -> None:
    own, overrides = split_arguments(arguments, ("batch",))
    if not any(override.startswith("model=") for override in overrides):
        overrides = ["model=qwen3-30b-a3b", *overrides]
    batch = int(own.get("batch", 4))
    target, _ = open_target(["train.seq_len=4096", "model.remat.policy=minimal", *overrides])
    layer = Layer(target.config, batch)
    routing = jax.jit(lambda weights, x: layer.module(weights).router(x, layer.ctx))(layer.weights, layer.x)
    loads = jnp.sum(routing.ids_BTK.reshape(-1, 1) == jnp.arange(layer.moe.router.experts), axis=0, dtype=jnp.int32)
    report(
        "loads",
        largest_over_mean=round(float(jnp.max(loads) / jnp.mean(loads)), 2),
        deviation=round(float(jnp.std(loads) / jnp.mean(loads)), 2),
    )
    time_part("router", layer.router, layer.weights, layer.x)
    time_part("experts", layer.experts, layer.weights, layer.x, routing.ids_BTK, routing.weights_BTK)
    time_part("layer", layer.all, layer.weights, layer.x)
    time_matmuls(layer, loads, "routed")
    time_matmuls(layer, jnp.full_like(loads, jnp.sum(loads) // len(loads)), "equal")


if __name__ == "__main__":
    main(sys.argv[1:])
