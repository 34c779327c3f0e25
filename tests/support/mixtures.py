"""A standalone mixture-of-experts layer over plain arrays, with reference implementations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxhydra.config.schema import model as config
from maxhydra.kernels.matmul import Layout
from maxhydra.layers import Context, MatmulSpec, MoeSpec, ParamBuilder
from maxhydra.sharding import Sharder

EMB, HIDDEN = 16, 12


class Mixture:
    """The MoE feed-forward of a layer kind, with its weights as a plain tree."""

    def __init__(self, moe: config.Moe, *, emb: int = EMB, hidden: int = HIDDEN, **parallel: Any):
        kind = config.Kind(feed_forward=config.FeedForward.moe, moe=moe)
        sizes = {"num_layers": 1, "emb_dim": emb, "mlp_dim": hidden, "num_heads": 1, "num_kv_heads": 1, "head_dim": 2}
        dtypes = config.Dtypes(compute=config.Dtype.float32)
        sections = {"kinds": {"layer": kind}, "dtypes": dtypes, "expert_parallel": config.ExpertParallel(**parallel)}
        model = config.Model(**sizes, **sections, vocab_size=8, context_length=64)
        self.spec, self.moe, self.emb = MoeSpec.of(model, kind), moe, emb
        matmul_spec = MatmulSpec(compute=jnp.dtype(jnp.float32), layout=Layout.plain)
        make = ParamBuilder(jax.random.key(0), dtype=jnp.dtype(jnp.float32), layers=None, matmul_spec=matmul_spec)
        self._graph, state = nnx.split(self.spec.build(make))
        self.weights: Any = nnx.to_pure_dict(state)
        keys = jax.random.split(jax.random.key(1), 100)
        leaves, tree = jax.tree.flatten(self.weights)
        # Biases are initialized to zero, which would hide them.
        perturbed = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=False)]
        self.weights = jax.tree.unflatten(tree, perturbed)

    def __call__(
        self,
        weights: Any,
        x: jax.Array,
        *,
        segments: jax.Array | None = None,
        sharder: Sharder | None = None,
        cache: Any = None,
    ) -> Any:
        positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        sharder = sharder or Sharder.single()
        ctx = Context(positions=positions, segments=segments, sharder=sharder, cache=cache, dropout_key=None)
        return nnx.merge(self._graph, weights)(x, ctx)

    def inputs(self, batch: int, length: int, seed: int = 2) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), (batch, length, self.emb))


def expert(weights: Any, index: int, x: jax.Array) -> jax.Array:
    """Reference of one expert: SwiGLU without biases."""
    gate, up, down = (weights["experts"][name]["kernel"][index] for name in ("gate", "up", "down"))
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def softmax_top_k(weights: Any, x: jax.Array, top_k: int) -> np.ndarray:
    """Reference routing weights [B, T, E]: softmax, the top k divided by their sum, zero for the others."""
    scores = jax.nn.softmax(x @ weights["router"]["kernel"])
    least = jnp.sort(scores, axis=-1)[..., -top_k][..., None]
    chosen = jnp.where(scores >= least, scores, 0)
    return chosen / chosen.sum(-1, keepdims=True)
