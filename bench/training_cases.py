"""Calls of the kernels that training makes, over the sizes and masks that their tables name."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from checks import Case, Check, Kernel, only

from maxhydra.kernels import attention, gated_delta, grouped_matmul, linear_cross_entropy, qkv_rope, rms_norm
from maxhydra.kernels.attention import Request
from maxhydra.kernels.fp8_matmul import triton as float8

HALVES = ("bfloat16", "float16")
REFERENCE = "reference"
MASKS: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "causal": {},
    "window": {"window": 100},
    "chunk": {"chunk": 96},
    "softcap": {"softcap": 2.0},
    "segments": {"segments": True},
    "sinks": {"sinks": True},
    "everything": {"window": 150, "softcap": 2.0, "segments": True, "sinks": True},
}


def backends(table: dict[str, Any], call: Any) -> dict[str, Any]:
    """The call by each of a table; which serve it shows when they are called."""
    return {name: partial(call, name) for name in table if name != REFERENCE}


def attention_cases() -> Iterator[Case]:
    """In halves, which its kernels take."""
    for mask, H in itertools.product(MASKS, (64, 128, 192, 256)):
        yield Case("attention", "bfloat16", (2, 256, 8, 2, H), (("mask", mask),))
    for dtype, mask, H in itertools.product(HALVES, ("causal", "everything"), (64, 128, 256)):
        heads = (4, 4) if dtype == "bfloat16" else (6, 1)
        yield Case("attention", dtype, (1, 384, *heads, H), (("mask", mask),))


def check_attention(case: Case) -> Check:
    B, T, N, K, H = case.sizes
    mask = dict(MASKS[dict(case.asked)["mask"]])
    has_segments, has_sinks = mask.pop("segments", False), mask.pop("sinks", False)
    fields = {"causal": True, "window": None, "chunk": None, "softcap": None, **mask}
    request = Request(scale=H**-0.5, softmax_dtype="float32", is_length_split=False, **fields)
    # Two sequences and padding behind them.
    segments = jnp.broadcast_to(jnp.searchsorted(jnp.asarray([T // 3, T - 5]), jnp.arange(T), side="right"), (B, T))
    segments = jnp.asarray([1, 2, 0])[segments]
    tags = {"q_segments_BT": segments, "kv_segments_BS": segments} if has_segments else {}

    def call(backend: str, q: Any, k: Any, v: Any, sinks: Any = None) -> Any:
        return attention.attention(q, k, v, request, backend=backend, sinks_N=sinks, **tags)

    arrays = [case.draw(i, B, T, heads, H) for i, heads in enumerate((N, K, K))]
    sinks = [jnp.linspace(-1.0, 2.0, N)] if has_sinks else []
    return Check(backends(attention.BACKENDS, call), partial(call, REFERENCE), (*arrays, *sinks))


def grouped_cases() -> Iterator[Case]:
    for dtype, sizes in itertools.product(HALVES, ((512, 4, 256, 512), (1024, 8, 384, 128), (640, 1, 128, 256))):
        yield Case("grouped_matmul", dtype, sizes)


def check_grouped(case: Case) -> Check:
    """Groups of any number of rows, the second of none."""
    M, E, D, F = case.sizes
    ends = jnp.sort(jax.random.randint(jax.random.key(7), (E - 1,), 0, M))
    ends = ends.at[1:2].set(ends[0:1])
    sizes = jnp.diff(jnp.concatenate([jnp.zeros(1, int), ends, jnp.full(1, M)])).astype(jnp.int32)

    def call(backend: str, x: Any, w: Any) -> Any:
        return grouped_matmul.grouped_matmul(x, w, sizes, backend=backend)

    arrays = (case.draw(0, M, D), case.draw(1, E, D, F))
    return Check(backends(grouped_matmul.BACKENDS, call), partial(call, REFERENCE), arrays)


def delta_cases() -> Iterator[Case]:
    sizes = ((1, 192, 2, 4, 128), (2, 256, 1, 1, 128), (1, 130, 2, 2, 128))
    for dtype, size, has in itertools.product(("bfloat16", "float32"), sizes, (False, True)):
        yield Case("gated_delta", dtype, size, (("segments", has),))


def check_delta(case: Case) -> Check:
    B, T, M, N, H = case.sizes
    segments = jnp.broadcast_to(1 + (jnp.arange(T) > T // 3), (B, T)) if dict(case.asked)["segments"] else None

    def call(backend: str, q: Any, k: Any, v: Any, decay: Any, rate: Any, state: Any) -> Any:
        given = {"log_decay_BTN": decay, "rate_BTN": rate, "state_BNKV": state, "segments_BT": segments}
        return gated_delta.gated_delta(q, k, v, **given, backend=backend)

    q, k, v = (case.draw(i, B, T, heads, H) for i, heads in enumerate((M, M, N)))
    k = (k / jnp.linalg.norm(k.astype(jnp.float32), axis=-1, keepdims=True)).astype(k.dtype)
    decay = -jax.nn.softplus(case.draw(3, B, T, N, dtype="float32"))
    rate = jax.nn.sigmoid(case.draw(4, B, T, N, dtype="float32"))
    arrays = ((q * H**-0.5).astype(q.dtype), k, v, decay, rate, case.draw(5, B, N, H, H, dtype="float32"))
    return Check(backends(gated_delta.BACKENDS, call), partial(call, REFERENCE), arrays)


def norm_cases() -> Iterator[Case]:
    sizes = ((512, 256), (1024, 2048), (528, 3072), (512, 768), (512, 8192))
    yield from (Case("rms_norm", *one) for one in itertools.product(HALVES, sizes))


def check_norm(case: Case) -> Check:
    def call(backend: str, x: Any, scale: Any) -> Any:
        return rms_norm.rms_norm(x, scale, eps=1e-5, dtype=x.dtype, backend=backend)

    M, D = case.sizes
    arrays = (case.draw(0, 1, M, D), jnp.linspace(0.5, 2, D))
    return Check(backends(rms_norm.BACKENDS, call), partial(call, REFERENCE), arrays)


def heads_cases() -> Iterator[Case]:
    for dtype, (N, K), H in itertools.product(HALVES, ((4, 4), (6, 2)), (64, 128, 256)):
        yield Case("rotated_heads", dtype, (2, 48, N, K, H))


def check_heads(case: Case) -> Check:
    B, T, N, K, H = case.sizes
    angles = jnp.arange(T)[None, :, None] * jnp.linspace(0.01, 1, H // 2) * jnp.ones((B, 1, 1))

    def call(backend: str, heads: Any) -> Any:
        given = {"num_heads": N, "num_kv_heads": K, "backend": backend}
        return qkv_rope.qkv_rope(heads, jnp.cos(angles), jnp.sin(angles), **given)

    arrays = (case.draw(0, B, T, N + 2 * K, H),)
    return Check(backends(qkv_rope.BACKENDS, call), partial(call, REFERENCE), arrays)


def loss_cases() -> Iterator[Case]:
    asked = ((("chunk", 0), ("z_loss", 0.0)), (("chunk", 32), ("z_loss", 1e-3)))
    for dtype, V, given in itertools.product((*HALVES, "float32"), (320, 4096, 128256), asked):
        yield Case("linear_cross_entropy", dtype, (2, 64, 128, V), given)


def check_loss(case: Case) -> Check:
    """The logits are made outside of the kernel, in the case's format by all."""
    B, T, D, V = case.sizes
    targets = jax.random.randint(jax.random.key(5), (B, T), 0, V)

    def call(backend: str, hidden: Any, table: Any, weights: Any, **given: Any) -> Any:
        def logits_of(hidden: Any) -> Any:
            return jnp.einsum("btd,vd->btv", hidden, table)

        return linear_cross_entropy.linear_cross_entropy(logits_of, hidden, targets, weights, backend=backend, **given)

    given = dict(case.asked)
    weights = jnp.linspace(0.0, 1.0, B * T).reshape(B, T)
    arrays = (case.draw(0, B, T, D), (0.1 * case.draw(1, V, D)).astype(case.dtype), weights)
    wanted = partial(call, REFERENCE, chunk=0, z_loss=given["z_loss"])
    return Check(backends(linear_cross_entropy.BACKENDS, partial(call, **given)), wanted, arrays)


def float8_cases() -> Iterator[Case]:
    sizes = ((128, 128), (384, 256), (1024, 2048))
    for dtype, size, format in itertools.product(("bfloat16", "float32"), sizes, ("float8_e4m3fn", "float8_e5m2")):
        yield Case("float8", dtype, size, (("format", format),))


def check_float8(case: Case) -> Check:
    """A matrix rounded, as it is and turned; the product that follows is the library's."""
    format = jnp.dtype(dict(case.asked)["format"])

    def ours(x: Any) -> Any:
        return float8.rounded(x, jnp.float32(0.5), format, interpret=False)

    def wanted(x: Any) -> Any:
        numbers = (x / 0.5).astype(format)
        return numbers, numbers.T

    run = only("triton", float8.can_serve(case.sizes), ours)
    return Check(run, wanted, (case.draw(0, *case.sizes),), has_gradients=False)


KERNELS = {
    "attention": Kernel(attention_cases, check_attention),
    "grouped_matmul": Kernel(grouped_cases, check_grouped),
    "gated_delta": Kernel(delta_cases, check_delta),
    "rms_norm": Kernel(norm_cases, check_norm),
    "rotated_heads": Kernel(heads_cases, check_heads),
    "linear_cross_entropy": Kernel(loss_cases, check_loss),
    "float8": Kernel(float8_cases, check_float8),
}
