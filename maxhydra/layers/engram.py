"""Engram (Cheng et al., 2026): a memory of n-grams, looked up by hash and gated by the residual stream.

The tokens of each n-gram that ends at a position are hashed by several heads, each to a row of a separate table. The
concatenated rows e of all heads and orders are the memory of the position. For each residual stream x:

    gate = sigmoid(sign(s) sqrt(|s|)),  s = norm(x) . norm(key(e)) / sqrt(D)
    u = gate * value(e),  x' = x + u + silu(convolution(norm(u)))

The convolution is causal and depthwise, over every max_ngram-th token. N-grams and the convolution do not cross the
start of a document: a special token id, and zeros, take the place of earlier tokens.

B batch, T tokens, n residual streams, D width of a stream, S = n * D, E width of the memory, H heads of all orders, P
earlier tokens, W taps.
"""

import dataclasses
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxhydra.config.schema import model as config
from maxhydra.kernels.rms_norm.reference import unit_rms
from maxhydra.layers.context import Context
from maxhydra.layers.kv_cache import CacheSpec, StateSpec
from maxhydra.layers.params import Dtypes, ParamBuilder
from maxhydra.layers.short_convolution import last_tokens
from maxhydra.layers.table_lookup import look_up

# Rows of the tables are a multiple of this, so that devices can share them.
ROW_MULTIPLE = 128
# Smallest magnitude under the square root of the gate, whose slope is infinite at zero.
TINY = 1e-6


@dataclasses.dataclass(frozen=True)
class EngramSpec:
    """Sizes and hash functions of the memory in one layer kind, resolved from the config."""

    emb_dim: int
    streams: int
    vocab_size: int
    rows: tuple[tuple[int, ...], ...]
    """Rows of each head's table, by order from bigrams on: distinct primes."""
    multipliers: tuple[int, ...]
    """Odd factors of the tokens in a hash, from the last token of the n-gram to the first."""
    head_dim: int
    taps: int
    norm_eps: float
    init_scale: float
    dtypes: Dtypes

    @classmethod
    def of(cls, model: config.Model, kind: config.Kind) -> "EngramSpec | None":
        """None for layer kinds without a memory."""
        section = kind.engram
        if not section.vocab_sizes:
            return None
        # Token id times factor stays below 2^31.
        most = max(1, (2**31 - 1) // (model.vocab_size + 1) // 2)
        odd = 2 * np.random.default_rng(section.seed).integers(0, most, len(section.vocab_sizes) + 1) + 1
        return cls(
            emb_dim=model.emb_dim,
            streams=model.hyper_connections.streams,
            vocab_size=model.vocab_size,
            rows=distinct_primes(section.vocab_sizes, section.num_heads),
            multipliers=tuple(int(factor) for factor in odd),
            head_dim=section.head_dim,
            taps=section.kernel_size,
            norm_eps=model.norm_eps,
            init_scale=model.init_scale,
            dtypes=Dtypes.of(model.dtypes),
        )

    @property
    def max_ngram(self) -> int:
        return len(self.rows) + 1

    @property
    def heads(self) -> int:
        return sum(len(rows) for rows in self.rows)

    @property
    def table_rows(self) -> int:
        total = sum(sum(rows) for rows in self.rows)
        return -(-total // ROW_MULTIPLE) * ROW_MULTIPLE

    def forward_flops(self) -> float:
        """Forward FLOPs per token: two projections of the memory, and the convolution."""
        widths = (self.streams + 1) * self.emb_dim
        return 2.0 * self.heads * self.head_dim * widths + 2.0 * self.taps * self.streams * self.emb_dim

    def idle_parameters(self) -> int:
        return (self.table_rows - self.heads) * self.head_dim


def distinct_primes(starts: list[int], heads: int) -> tuple[tuple[int, ...], ...]:
    """For each start, the next `heads` primes from there on that no earlier start has."""
    used: set[int] = set()
    found: list[tuple[int, ...]] = []
    for start in starts:
        numbers = (number for number in count(start) if number not in used and _is_prime(number))
        found.append(tuple(next(numbers) for _ in range(heads)))
        used.update(found[-1])
    return tuple(found)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, int(number**0.5) + 1))


class Engram(nnx.Module):
    """The memory of one layer."""

    def __init__(self, spec: EngramSpec, make: ParamBuilder):
        self.spec = spec
        D, S, E = spec.emb_dim, spec.streams * spec.emb_dim, spec.heads * spec.head_dim
        axes, scale = (None, "embed"), spec.init_scale
        self.table = make.matrix((spec.table_rows,), (spec.head_dim,), ("vocab", "embed"), std=scale * D**-0.5)
        self.key = make.projection("key", (E,), (S,), axes, scale=scale, has_bias=True)
        self.value = make.projection("value", (E,), (D,), axes, scale=scale, has_bias=True)
        self.key_norm, self.query_norm, self.filter_norm = (make.ones((S,), ("norm",)) for _ in range(3))
        # The convolution starts at zero, as an identity.
        self.filter = make.zeros((spec.taps, S), (None, "embed"))

    @jax.named_scope("engram")
    def __call__(self, x_BTS: jax.Array, ctx: Context) -> tuple[jax.Array, Any]:
        """The residual streams [B, T, n * D] with the memory added, and the updated cache."""
        spec, (B, T, _) = self.spec, x_BTS.shape
        previous = {} if ctx.cache is None else ctx.cache.read(ctx.rows)
        assert ctx.tokens is not None
        ids_BTH, tokens_BP = self._hash(ctx.tokens, previous.get("tokens"), ctx)
        rows = look_up(self.table[...], ids_BTH.reshape(B, T * spec.heads), ctx, dtype=spec.dtypes.compute)
        memory_BTE = rows.reshape(B, T, spec.heads * spec.head_dim)
        key_BTnD, query_BTnD = self._norm(self.key(memory_BTE, ctx), self.key_norm), self._norm(x_BTS, self.query_norm)
        similarity_BTn = jnp.sum(query_BTnD * key_BTnD, axis=-1) * spec.emb_dim**-0.5
        root_BTn = jnp.sign(similarity_BTn) * jnp.sqrt(jnp.maximum(jnp.abs(similarity_BTn), TINY))
        value_BTD = self.value(memory_BTE, ctx).astype(jnp.float32)
        gated_BTnD = jax.nn.sigmoid(root_BTn)[..., None] * value_BTD[:, :, None]
        normed_BTnD = self._norm(gated_BTnD.reshape(B, T, -1), self.filter_norm).astype(spec.dtypes.compute)
        filtered_BTnD, tail_BPnD = self._convolve(normed_BTnD, previous.get("tail"), ctx)
        added_BTS = (gated_BTnD + jax.nn.silu(filtered_BTnD)).astype(x_BTS.dtype).reshape(x_BTS.shape)
        cache = None if ctx.cache is None else ctx.cache.write({"tokens": tokens_BP, "tail": tail_BPnD}, ctx.rows)
        return ctx.constrain_stream(x_BTS + added_BTS), cache

    def empty_cache(self, cache_spec: CacheSpec, layers: int) -> Any:
        """The last tokens, and the last inputs of the convolution."""
        spec = self.spec
        tail = StateSpec((self._reach, spec.streams, spec.emb_dim), spec.dtypes.compute, (None, None, None))
        tokens = StateSpec((spec.max_ngram - 1,), jnp.int32, (None,))
        return cache_spec.states(layers, {"tokens": tokens, "tail": tail})

    @property
    def _reach(self) -> int:
        """Earlier tokens that the convolution reads."""
        return (self.spec.taps - 1) * self.spec.max_ngram

    def _hash(self, tokens_BT: jax.Array, last_BP: jax.Array | None, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """[B, T, H] row of each head in the table, and the last tokens for the cache."""
        spec, before = self.spec, self.spec.max_ngram - 1
        last_BP = jnp.zeros((tokens_BT.shape[0], before), tokens_BT.dtype) if last_BP is None else last_BP
        all_BS = jnp.concatenate([last_BP.astype(tokens_BT.dtype), tokens_BT], axis=1)
        hashed_BT, first, ids = tokens_BT * spec.multipliers[0], 0, []
        for distance, rows in enumerate(spec.rows, 1):
            earlier_BT = all_BS[:, before - distance : all_BS.shape[1] - distance]
            # The special id of positions before the document.
            earlier_BT = jnp.where(ctx.positions >= distance, earlier_BT, spec.vocab_size)
            hashed_BT = hashed_BT ^ (earlier_BT * spec.multipliers[distance])
            starts = first + np.cumsum([0, *rows[:-1]])
            ids.append(hashed_BT[..., None] % np.array(rows, np.int32) + np.array(starts, np.int32))
            first += sum(rows)
        tail = last_tokens(all_BS[:, :, None, None], ctx.segments, before)[:, :, 0, 0]
        return jnp.concatenate(ids, axis=-1), tail

    def _norm(self, x_BTS: jax.Array, scale: nnx.Param) -> jax.Array:
        """Each stream normalized separately, [B, T, n, D] in float32."""
        x_BTnD = x_BTS.astype(jnp.float32).reshape(*x_BTS.shape[:2], self.spec.streams, self.spec.emb_dim)
        return unit_rms(x_BTnD, self.spec.norm_eps) * scale[...].astype(jnp.float32).reshape(x_BTnD.shape[2:])

    def _convolve(self, x_BTnD: jax.Array, tail_BPnD: jax.Array | None, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """The convolution in float32, and its last inputs for the cache."""
        spec, T = self.spec, x_BTnD.shape[1]
        if tail_BPnD is None:
            tail_BPnD = jnp.zeros((x_BTnD.shape[0], self._reach, *x_BTnD.shape[2:]), x_BTnD.dtype)
        all_BSnD = jnp.concatenate([tail_BPnD.astype(x_BTnD.dtype), x_BTnD], axis=1)
        filter_WnD = self.filter[...].astype(jnp.float32).reshape(spec.taps, *x_BTnD.shape[2:])
        total_BTnD = jnp.zeros(x_BTnD.shape, jnp.float32)
        for tap in range(spec.taps):
            distance = (spec.taps - 1 - tap) * spec.max_ngram
            earlier_BTnD = all_BSnD[:, self._reach - distance : self._reach - distance + T]
            is_inside_BT = (ctx.positions >= distance)[:, :, None, None]
            total_BTnD += jnp.where(is_inside_BT, earlier_BTnD.astype(jnp.float32), 0) * filter_WnD[tap]
        return total_BTnD, last_tokens(all_BSnD, ctx.segments, self._reach)
