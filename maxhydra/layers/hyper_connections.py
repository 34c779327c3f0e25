"""Manifold-constrained hyper-connections (Xie et al., 2025): n residual streams instead of one.

A branch f, which is attention or a feed-forward with its norm, reads the sum of the streams weighted by H_pre, and its
output is added to each stream, weighted by H_post, after H_res has mixed the streams:

    x' = H_res x + H_post f(H_pre x)        x [n, D], H_pre [1, n], H_post [n, 1], H_res [n, n]

The weights depend on the token: with u = RMSNorm of all streams, H_pre = sigmoid(a_pre u W_pre + b_pre), H_post =
2 sigmoid(a_post u W_post + b_post), and H_res = Sinkhorn(a_res u W_res + b_res), which is doubly stochastic, so that
mixing keeps the mean of the streams at any depth.

The form `weighted` (DeepSeek-V4, 2026) has a norm without scale, a small constant in H_pre and in the normalizations,
and its H_res is the transposed Sinkhorn matrix. After the last layer the streams are summed by weights like H_pre.

Streams are concatenated in the residual stream, [B, T, n * D]. B batch, T tokens, n streams, D width of a stream.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxhydra.config.schema import model as config
from maxhydra.config.schema.residual import StreamForm
from maxhydra.kernels.rms_norm.reference import unit_rms
from maxhydra.layers.norm import NormSpec
from maxhydra.layers.params import ParamBuilder

# Initial value of the factors a.
INITIAL_FACTOR = 0.01
# Added in H_pre and in the normalizations of the form `weighted`.
EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class HyperSpec:
    """Sizes and options of hyper-connections, resolved from the config."""

    emb_dim: int
    streams: int
    iterations: int
    norm: NormSpec
    is_weighted: bool
    """Whether the form is `weighted`."""

    @classmethod
    def of(cls, model: config.Model) -> "HyperSpec | None":
        """None for models with one residual stream."""
        section = model.hyper_connections
        if section.streams == 1:
            return None
        is_weighted = section.form is StreamForm.weighted
        return cls(model.emb_dim, section.streams, section.sinkhorn_iterations, NormSpec.of(model), is_weighted)

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


class StreamLogits(nnx.Module):
    """a u W + b, u the norm of all streams: logits of weights that depend on the token."""

    def __init__(self, spec: HyperSpec, sizes: tuple[int, ...], make: ParamBuilder):
        """`sizes`: numbers of weights that have a factor each."""
        self.spec, self.sizes = spec, sizes
        S, outputs = spec.streams * spec.emb_dim, sum(sizes)
        self.norm = None if spec.is_weighted else spec.norm.build(S, make)
        self.kernel = make.matrix((S,), (outputs,), ("embed", None), std=S**-0.5, is_wide=True)
        self.bias = make.zeros((outputs,), (None,))
        self.factor = make.random((len(sizes),), (None,), lambda key, shape: jnp.full(shape, INITIAL_FACTOR))

    def logits(self, x_BTS: jax.Array) -> jax.Array:
        normed_BTS = unit_rms(x_BTS, self.spec.norm.eps) if self.norm is None else self.norm(x_BTS).astype(jnp.float32)
        kernel_SO = self.kernel[...].astype(jnp.float32)
        out_BTO = jnp.einsum("BTS,SO->BTO", normed_BTS, kernel_SO, precision=jax.lax.Precision.HIGHEST)
        factor_O = jnp.repeat(self.factor[...].astype(jnp.float32), np.array(self.sizes))
        return factor_O * out_BTO + self.bias[...].astype(jnp.float32)

    def streams(self, x_BTS: jax.Array) -> jax.Array:
        """[B, T, n, D] in float32."""
        return x_BTS.astype(jnp.float32).reshape(*x_BTS.shape[:2], self.spec.streams, self.spec.emb_dim)


class StreamHead(StreamLogits):
    """The weighted sum of the streams before the final norm."""

    def __init__(self, spec: HyperSpec, make: ParamBuilder):
        super().__init__(spec, (spec.streams,), make)

    @jax.named_scope("hyper_connection")
    def __call__(self, x_BTS: jax.Array) -> jax.Array:
        weights_BTn = jax.nn.sigmoid(self.logits(x_BTS)) + EPS
        return jnp.einsum("BTnD,BTn->BTD", self.streams(x_BTS), weights_BTn).astype(x_BTS.dtype)


class HyperConnection(StreamLogits):
    """The connection of one branch to the streams."""

    def __init__(self, spec: HyperSpec, make: ParamBuilder):
        super().__init__(spec, (spec.streams, spec.streams, spec.streams**2), make)

    @jax.named_scope("hyper_connection")
    def weights(self, x_BTS: jax.Array) -> StreamWeights:
        n, iterations = self.spec.streams, self.spec.iterations
        pre_BTn, post_BTn, mix_BTO = jnp.split(self.logits(x_BTS), (n, 2 * n), axis=-1)
        pre_BTn, post_BTn = jax.nn.sigmoid(pre_BTn), 2 * jax.nn.sigmoid(post_BTn)
        mix_BTnn = mix_BTO.reshape(*mix_BTO.shape[:2], n, n)
        if self.spec.is_weighted:
            return StreamWeights(pre_BTn + EPS, post_BTn, floored_sinkhorn(mix_BTnn.mT, iterations))
        return StreamWeights(pre_BTn, post_BTn, sinkhorn(mix_BTnn, iterations))

    def read(self, x_BTS: jax.Array, weights: StreamWeights) -> jax.Array:
        """The input of the branch, H_pre x."""
        streams_BTnD = self.streams(x_BTS)
        return jnp.einsum("BTnD,BTn->BTD", streams_BTnD, weights.pre_BTn).astype(x_BTS.dtype)

    def write(self, x_BTS: jax.Array, branch_BTD: jax.Array, weights: StreamWeights) -> jax.Array:
        """The streams after the branch, H_res x + H_post branch."""
        combined_BTnD = jnp.einsum("BTij,BTjD->BTiD", weights.mix_BTnn, self.streams(x_BTS))
        added_BTnD = weights.post_BTn[..., None] * branch_BTD.astype(jnp.float32)[:, :, None]
        return (combined_BTnD + added_BTnD).astype(x_BTS.dtype).reshape(x_BTS.shape)


def sinkhorn(logits: jax.Array, iterations: int) -> jax.Array:
    """exp(logits) made doubly stochastic by normalizing columns, then rows (Sinkhorn and Knopp, 1967).

    In the logarithm, where large logits do not overflow.
    """

    def normalize(log: jax.Array, _: None) -> tuple[jax.Array, None]:
        log = log - jax.nn.logsumexp(log, axis=-2, keepdims=True)
        return log - jax.nn.logsumexp(log, axis=-1, keepdims=True), None

    return jnp.exp(jax.lax.scan(normalize, logits, None, length=iterations)[0])


def floored_sinkhorn(logits: jax.Array, iterations: int) -> jax.Array:
    """`sinkhorn` with EPS added to the entries after the first normalization, and to every later sum."""

    def normalize(matrix: jax.Array, axis: int) -> jax.Array:
        return matrix / (jnp.sum(matrix, axis=axis, keepdims=True) + EPS)

    def both(matrix: jax.Array, _: None) -> tuple[jax.Array, None]:
        return normalize(normalize(matrix, -2), -1), None

    first = normalize(jax.nn.softmax(logits, axis=-2) + EPS, -1)
    return jax.lax.scan(both, first, None, length=iterations - 1)[0]
