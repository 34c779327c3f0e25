"""Manifold-constrained hyper-connections (Xie et al., 2025): n residual streams instead of one.

A branch f, which is attention or a feed-forward with its norm, reads the sum of the streams weighted by H_pre, and its
output is added to each stream, weighted by H_post, after H_res has mixed the streams:

    x' = H_res x + H_post f(H_pre x)        x [n, D], H_pre [1, n], H_post [n, 1], H_res [n, n]

The weights depend on the token: with u = RMSNorm of all streams, H_pre = sigmoid(a_pre u W_pre + b_pre), H_post =
2 sigmoid(a_post u W_post + b_post), and H_res = Sinkhorn(a_res u W_res + b_res), which is doubly stochastic, so that
mixing keeps the mean of the streams at any depth.

Streams are concatenated in the residual stream, [B, T, n * D]. B batch, T tokens, n streams, D width of a stream.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxhydra.config.schema import model as config
from maxhydra.layers.norm import NormSpec
from maxhydra.layers.params import ParamBuilder

# Initial value of the factors a.
INITIAL_FACTOR = 0.01


@dataclasses.dataclass(frozen=True)
class HyperSpec:
    """Sizes and options of hyper-connections, resolved from the config."""

    emb_dim: int
    streams: int
    iterations: int
    norm: NormSpec

    @classmethod
    def of(cls, model: config.Model) -> "HyperSpec | None":
        """None for models with one residual stream."""
        section = model.hyper_connections
        if section.streams == 1:
            return None
        return cls(model.emb_dim, section.streams, section.sinkhorn_iterations, NormSpec.of(model))

    def forward_flops(self) -> float:
        """Forward FLOPs per token of one layer: weights and mixing at two branches."""
        n, D = self.streams, self.emb_dim
        return 2 * 2.0 * (n * D * (2 * n + n * n) + n * D * (2 + n))


def expand_streams(x_BTD: jax.Array, spec: HyperSpec | None) -> jax.Array:
    """The embedding in every stream; itself for one residual stream."""
    return x_BTD if spec is None else jnp.tile(x_BTD, (1, 1, spec.streams))


def sum_streams(x_BTS: jax.Array, spec: HyperSpec | None) -> jax.Array:
    """The sum of the streams; itself for one residual stream."""
    if spec is None:
        return x_BTS
    x_BTnD = x_BTS.reshape(*x_BTS.shape[:2], spec.streams, spec.emb_dim)
    return jnp.sum(x_BTnD, axis=2, dtype=jnp.float32).astype(x_BTS.dtype)


class StreamWeights(NamedTuple):
    """The weights of a branch, in float32."""

    pre_BTn: jax.Array
    post_BTn: jax.Array
    mix_BTnn: jax.Array
    """[..., i, j]: weight of the old stream j in the new stream i."""


class HyperConnection(nnx.Module):
    """The connection of one branch to the streams."""

    def __init__(self, spec: HyperSpec, make: ParamBuilder):
        self.spec = spec
        n, S = spec.streams, spec.streams * spec.emb_dim
        outputs = 2 * n + n * n
        self.norm = spec.norm.build(S, make)
        self.kernel = make.matrix((S,), (outputs,), ("embed", None), std=S**-0.5, is_wide=True)
        self.bias = make.zeros((outputs,), (None,))
        self.factor = make.random((3,), (None,), lambda key, shape: jnp.full(shape, INITIAL_FACTOR))

    @jax.named_scope("hyper_connection")
    def weights(self, x_BTS: jax.Array) -> StreamWeights:
        n = self.spec.streams
        normed_BTS, kernel_SO = self.norm(x_BTS).astype(jnp.float32), self.kernel[...].astype(jnp.float32)
        out_BTO = jnp.einsum("BTS,SO->BTO", normed_BTS, kernel_SO, precision=jax.lax.Precision.HIGHEST)
        factor_O = jnp.repeat(self.factor[...].astype(jnp.float32), np.array([n, n, n * n]))
        logits_BTO = factor_O * out_BTO + self.bias[...].astype(jnp.float32)
        pre_BTn, post_BTn, mix_BTO = jnp.split(logits_BTO, (n, 2 * n), axis=-1)
        mix_BTnn = sinkhorn(mix_BTO.reshape(*mix_BTO.shape[:2], n, n), self.spec.iterations)
        return StreamWeights(jax.nn.sigmoid(pre_BTn), 2 * jax.nn.sigmoid(post_BTn), mix_BTnn)

    def read(self, x_BTS: jax.Array, weights: StreamWeights) -> jax.Array:
        """The input of the branch, H_pre x."""
        streams_BTnD = self._streams(x_BTS)
        return jnp.einsum("BTnD,BTn->BTD", streams_BTnD, weights.pre_BTn).astype(x_BTS.dtype)

    def write(self, x_BTS: jax.Array, branch_BTD: jax.Array, weights: StreamWeights) -> jax.Array:
        """The streams after the branch, H_res x + H_post branch."""
        mixed_BTnD = jnp.einsum("BTij,BTjD->BTiD", weights.mix_BTnn, self._streams(x_BTS))
        added_BTnD = weights.post_BTn[..., None] * branch_BTD.astype(jnp.float32)[:, :, None]
        return (mixed_BTnD + added_BTnD).astype(x_BTS.dtype).reshape(x_BTS.shape)

    def _streams(self, x_BTS: jax.Array) -> jax.Array:
        return x_BTS.astype(jnp.float32).reshape(*x_BTS.shape[:2], self.spec.streams, self.spec.emb_dim)


def sinkhorn(logits: jax.Array, iterations: int) -> jax.Array:
    """exp(logits) made doubly stochastic by normalizing columns, then rows (Sinkhorn and Knopp, 1967).

    In the logarithm, where large logits do not overflow.
    """

    def normalize(log: jax.Array, _: None) -> tuple[jax.Array, None]:
        log = log - jax.nn.logsumexp(log, axis=-2, keepdims=True)
        return log - jax.nn.logsumexp(log, axis=-1, keepdims=True), None

    return jnp.exp(jax.lax.scan(normalize, logits, None, length=iterations)[0])
