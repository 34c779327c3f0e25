"""TPU kernels with shapes of real models, as programs to lower or compile: values and gradients, if supported."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxhydra.kernels.attention import Request, splash
from maxhydra.kernels.attention.spec import TokenInfo
from maxhydra.kernels.gated_delta import gated_delta
from maxhydra.kernels.grouped_matmul import megablox
from maxhydra.kernels.paged_attention import Pages, pallas_tpu
from maxhydra.kernels.placement import Placement

TPU = Placement("tpu")


class Program(NamedTuple):
    """A function, and the shapes and dtypes of its arguments."""

    run: Callable[..., Any]
    arguments: tuple[tuple[tuple[int, ...], str], ...]
    kernels: int
    """Number of kernels in the lowered program."""

    def shapes(self, sharding: jax.sharding.Sharding | None = None) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding) for shape, dtype in self.arguments]


def request(**changes: Any) -> Request:
    fields = {"scale": 0.125, "causal": True, "window": None, "chunk": None, "softcap": None}
    return Request(**{**fields, **changes}, softmax_dtype="float32")


def attention(head_dim: int, dtype: str, *, value_dim: int | None = None, tags: bool, **changes: Any) -> Program:
    """1024 tokens, 8 query and 2 key heads; tags: with segments and sinks."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array, segments: jax.Array) -> Any:
        def total(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
            tokens = TokenInfo(*((segments, segments) if tags else (None, None)), None, None)
            out = splash.attention(q, k, v, request(**changes), tokens, sinks if tags else None)
            return jnp.sum(out.astype(jnp.float32))

        return jax.value_and_grad(total, argnums=(0, 1, 2, 3))(q, k, v, sinks)

    heads = [((1, 1024, n, d), dtype) for n, d in ((8, head_dim), (2, head_dim), (2, value_dim or head_dim))]
    return Program(run, (*heads, ((8,), "float32"), ((1, 1024), "int32")), kernels=3)


def grouped(rows: int, inputs: int, outputs: int, dtype: str) -> Program:
    def run(x: jax.Array, w: jax.Array, sizes: jax.Array) -> Any:
        def total(x: jax.Array, w: jax.Array) -> jax.Array:
            return jnp.sum(megablox.grouped_matmul(x, w, sizes).astype(jnp.float32) ** 2)

        return jax.grad(total, argnums=(0, 1))(x, w)

    return Program(run, (((rows, inputs), dtype), ((4, inputs, outputs), dtype), ((4,), "int32")), kernels=3)


def paged(head_dim: int, page: int, dtype: str, **changes: Any) -> Program:
    """16 rows of up to 1024 tokens, 32 query and 8 key heads, updated in place."""

    def run(heads: jax.Array, key: jax.Array, value: jax.Array, table: jax.Array, length: jax.Array) -> Any:
        return pallas_tpu.attention(heads[None], None, Pages(key, value, table, length), request(**changes))

    store = ((256, 8, page, head_dim), dtype)
    rows = ((16, 48, head_dim), dtype), store, store, ((16, 1024 // page), "int32"), ((16,), "int32")
    return Program(run, rows, kernels=1)


def delta() -> Program:
    """512 tokens, 4 key heads and 8 value heads of 128."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, rate: jax.Array) -> Any:
        def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            arguments = {"log_decay_BTN": decay, "rate_BTN": rate, "state_BNKV": None, "segments_BT": None}
            out, state = gated_delta(q, k, v, **arguments, backend="auto", place=TPU)
            return jnp.sum(out) + jnp.sum(state)

        return jax.value_and_grad(total, argnums=(0, 1, 2))(q, k, v)

    sizes = (1, 512, 4, 128), (1, 512, 4, 128), (1, 512, 8, 128), (1, 512, 8), (1, 512, 8)
    return Program(run, tuple((size, "float32") for size in sizes), kernels=1)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "attention": partial(attention, 64, "bfloat16", tags=False),
    "attention_everything": partial(attention, 128, "bfloat16", tags=True, window=200, softcap=30.0),
    "attention_chunk": partial(attention, 256, "bfloat16", tags=True, chunk=300),
    "attention_latent": partial(attention, 192, "bfloat16", value_dim=128, tags=False),
    "attention_float32": partial(attention, 128, "float32", tags=True),
    "grouped_matmul": partial(grouped, 1024, 2048, 7168, "bfloat16"),
    "grouped_matmul_float32": partial(grouped, 1024, 1024, 1536, "float32"),
    "paged_attention": partial(paged, 64, 16, "bfloat16"),
    "paged_attention_window": partial(paged, 128, 64, "bfloat16", window=100, softcap=30.0),
    "paged_attention_float32": partial(paged, 128, 8, "float32"),
    "gated_delta": delta,
}
