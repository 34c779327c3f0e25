"""Check cases of the training kernels, over the sizes and masks of their capability tables."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from checks import Case, Check, Kernel, single_backend

from maxhydra.kernels import attention, gated_delta, grouped_matmul, linear_cross_entropy, qkv_rope, rms_norm
from maxhydra.kernels.attention import Request
from maxhydra.kernels.fp8_matmul import triton as fp8_triton
from maxhydra.kernels.grouped_matmul import row_copies

HALF_DTYPES = ("bfloat16", "float16")
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
    """The call on every backend of a table; unsupported ones raise when called."""
    return {name: partial(call, name) for name in table if name != REFERENCE}


def attention_cases() -> Iterator[Case]:
    """In half precision, which the kernels require."""
    for mask, H in itertools.product(MASKS, (64, 128, 192, 256)):
        yield Case("attention", "bfloat16", (2, 256, 8, 2, H), (("mask", mask),))
    for dtype, mask, H in itertools.product(HALF_DTYPES, ("causal", "everything"), (64, 128, 256)):
        heads = (4, 4) if dtype == "bfloat16" else (6, 1)
        yield Case("attention", dtype, (1, 384, *heads, H), (("mask", mask),))


def check_attention(case: Case) -> Check:
    B, T, N, K, H = case.sizes
    mask = dict(MASKS[dict(case.options)["mask"]])
    has_segments, has_sinks = mask.pop("segments", False), mask.pop("sinks", False)
    fields = {"causal": True, "window": None, "chunk": None, "softcap": None, **mask}
    request = Request(scale=H**-0.5, softmax_dtype="float32", **fields)
    # Two sequences followed by padding.
    segments = jnp.broadcast_to(jnp.searchsorted(jnp.asarray([T // 3, T - 5]), jnp.arange(T), side="right"), (B, T))
    segments = jnp.asarray([1, 2, 0])[segments]
    segment_arrays = {"q_segments_BT": segments, "kv_segments_BS": segments} if has_segments else {}

    def call(backend: str, q: Any, k: Any, v: Any, sinks: Any = None) -> Any:
        return attention.attention(q, k, v, request, backend=backend, sinks_N=sinks, **segment_arrays)

    arrays = [case.sample(i, B, T, heads, H) for i, heads in enumerate((N, K, K))]
    sinks = [jnp.linspace(-1.0, 2.0, N)] if has_sinks else []
    return Check(backends(attention.BACKENDS, call), partial(call, REFERENCE), (*arrays, *sinks))


def grouped_cases(kernel: str) -> Iterator[Case]:
    """Also sizes that the tiles do not divide."""
    all_sizes = ((512, 4, 256, 512), (1024, 8, 384, 128), (640, 1, 128, 256), (724, 8, 320, 2880), (100, 4, 208, 48))
    all_sizes += ((2048, 24, 384, 1536),)
    for dtype, sizes in itertools.product(HALF_DTYPES, all_sizes):
        yield Case(kernel, dtype, sizes)


def group_sizes(M: int, E: int) -> jax.Array:
    """Random sizes of groups that have all rows; the second group is empty."""
    ends = jnp.sort(jax.random.randint(jax.random.key(7), (E - 1,), 0, M))
    ends = ends.at[1:2].set(ends[0:1])
    return jnp.diff(jnp.concatenate([jnp.zeros(1, int), ends, jnp.full(1, M)])).astype(jnp.int32)


def check_grouped(case: Case) -> Check:
    M, E, D, F = case.sizes
    sizes = group_sizes(M, E)

    def call(backend: str, x: Any, w: Any) -> Any:
        return grouped_matmul.grouped_matmul(x, w, sizes, backend=backend)

    arrays = (case.sample(0, M, D), case.sample(1, E, D, F))
    return Check(backends(grouped_matmul.BACKENDS, call), partial(call, REFERENCE), arrays)


def check_grouped_pair(case: Case) -> Check:
    """Two matmuls of the same rows."""
    M, E, D, F = case.sizes
    sizes = group_sizes(M, E)

    def call(backend: str, *arrays: Any) -> Any:
        return grouped_matmul.grouped_matmul_pair(*arrays, sizes, backend=backend)

    arrays = (case.sample(0, M, D), case.sample(1, E, D, F), case.sample(2, E, D, F))
    return Check(backends(grouped_matmul.BACKENDS, call), partial(call, REFERENCE), arrays)


def row_cases() -> Iterator[Case]:
    for dtype, D, K in itertools.product(HALF_DTYPES, (64, 2048, 2880), (1, 8)):
        yield Case("copy_to_rows", dtype, (512, K, D))


def check_rows(case: Case) -> Check:
    """Each token in the rows of its experts; exact."""
    M, K, D = case.sizes
    rows = jax.random.permutation(jax.random.key(3), M * K).reshape(M, K).astype(jnp.int32)
    tokens = case.sample(0, M, D)

    def reference(x: Any) -> Any:
        return jnp.zeros((M * K, D), x.dtype).at[rows].set(x[:, None])

    is_supported = row_copies.is_supported(tokens, K, jax.default_backend())
    run = single_backend("triton", is_supported, lambda x: row_copies.copy_to_rows(x, rows))
    return Check(run, reference, (tokens,), has_gradients=False)


def delta_cases() -> Iterator[Case]:
    sizes = ((1, 192, 2, 4, 128), (2, 256, 1, 1, 128), (1, 130, 2, 2, 128))
    for dtype, size, has_segments in itertools.product(("bfloat16", "float32"), sizes, (False, True)):
        yield Case("gated_delta", dtype, size, (("segments", has_segments),))


def check_delta(case: Case) -> Check:
    B, T, M, N, H = case.sizes
    segments = jnp.broadcast_to(1 + (jnp.arange(T) > T // 3), (B, T)) if dict(case.options)["segments"] else None

    def call(backend: str, q: Any, k: Any, v: Any, decay: Any, rate: Any, state: Any) -> Any:
        arguments = {"log_decay_BTN": decay, "rate_BTN": rate, "state_BNKV": state, "segments_BT": segments}
        return gated_delta.gated_delta(q, k, v, **arguments, backend=backend)

    q, k, v = (case.sample(i, B, T, heads, H) for i, heads in enumerate((M, M, N)))
    k = (k / jnp.linalg.norm(k.astype(jnp.float32), axis=-1, keepdims=True)).astype(k.dtype)
    decay = -jax.nn.softplus(case.sample(3, B, T, N, dtype="float32"))
    rate = jax.nn.sigmoid(case.sample(4, B, T, N, dtype="float32"))
    arrays = ((q * H**-0.5).astype(q.dtype), k, v, decay, rate, case.sample(5, B, N, H, H, dtype="float32"))
    return Check(backends(gated_delta.BACKENDS, call), partial(call, REFERENCE), arrays)


def norm_cases() -> Iterator[Case]:
    sizes = ((512, 256), (1024, 2048), (528, 3072), (512, 768), (512, 8192))
    yield from (Case("rms_norm", *case) for case in itertools.product(HALF_DTYPES, sizes))


def check_norm(case: Case) -> Check:
    def call(backend: str, x: Any, scale: Any) -> Any:
        return rms_norm.rms_norm(x, scale, eps=1e-5, dtype=x.dtype, backend=backend)

    M, D = case.sizes
    arrays = (case.sample(0, 1, M, D), jnp.linspace(0.5, 2, D))
    return Check(backends(rms_norm.BACKENDS, call), partial(call, REFERENCE), arrays)


def qkv_rope_cases() -> Iterator[Case]:
    for dtype, (N, K), H in itertools.product(HALF_DTYPES, ((4, 4), (6, 2)), (64, 128, 256)):
        yield Case("qkv_rope", dtype, (2, 48, N, K, H))


def check_qkv_rope(case: Case) -> Check:
    B, T, N, K, H = case.sizes
    angles = jnp.arange(T)[None, :, None] * jnp.linspace(0.01, 1, H // 2) * jnp.ones((B, 1, 1))

    def call(backend: str, heads: Any) -> Any:
        arguments = {"num_heads": N, "num_kv_heads": K, "backend": backend}
        return qkv_rope.qkv_rope(heads, jnp.cos(angles), jnp.sin(angles), **arguments)

    arrays = (case.sample(0, B, T, N + 2 * K, H),)
    return Check(backends(qkv_rope.BACKENDS, call), partial(call, REFERENCE), arrays)


def loss_cases() -> Iterator[Case]:
    options = ((("chunk", 0), ("z_loss", 0.0)), (("chunk", 32), ("z_loss", 1e-3)))
    for dtype, V, case_options in itertools.product((*HALF_DTYPES, "float32"), (320, 4096, 128256), options):
        yield Case("linear_cross_entropy", dtype, (2, 64, 128, V), case_options)


def check_loss(case: Case) -> Check:
    """The logits are computed outside of the kernel, in the case's dtype for all backends."""
    B, T, D, V = case.sizes
    targets = jax.random.randint(jax.random.key(5), (B, T), 0, V)

    def call(backend: str, hidden: Any, table: Any, weights: Any, **options: Any) -> Any:
        def logits_of(hidden: Any) -> Any:
            return jnp.einsum("btd,vd->btv", hidden, table)

        return linear_cross_entropy.linear_cross_entropy(
            logits_of, hidden, targets, weights, backend=backend, **options
        )

    options = dict(case.options)
    weights = jnp.linspace(0.0, 1.0, B * T).reshape(B, T)
    arrays = (case.sample(0, B, T, D), (0.1 * case.sample(1, V, D)).astype(case.dtype), weights)
    reference = partial(call, REFERENCE, chunk=0, z_loss=options["z_loss"])
    return Check(backends(linear_cross_entropy.BACKENDS, partial(call, **options)), reference, arrays)


def fp8_cases() -> Iterator[Case]:
    sizes = ((128, 128), (384, 256), (1024, 2048))
    for dtype, size, fp8_dtype in itertools.product(("bfloat16", "float32"), sizes, ("float8_e4m3fn", "float8_e5m2")):
        yield Case("fp8_quantize", dtype, size, (("format", fp8_dtype),))


def check_fp8(case: Case) -> Check:
    """Quantization of a matrix and its transpose; the matmul that follows is a library call."""
    fp8_dtype = jnp.dtype(dict(case.options)["format"])

    def quantize(x: Any) -> Any:
        return fp8_triton.quantize(x, jnp.float32(0.5), fp8_dtype, interpret=False)

    def reference(x: Any) -> Any:
        values = (x / 0.5).astype(fp8_dtype)
        return values, values.T

    run = single_backend("triton", fp8_triton.is_supported(case.sizes), quantize)
    return Check(run, reference, (case.sample(0, *case.sizes),), has_gradients=False)


KERNELS = {
    "attention": Kernel(attention_cases, check_attention),
    "grouped_matmul": Kernel(partial(grouped_cases, "grouped_matmul"), check_grouped),
    "grouped_matmul_pair": Kernel(partial(grouped_cases, "grouped_matmul_pair"), check_grouped_pair),
    "copy_to_rows": Kernel(row_cases, check_rows),
    "gated_delta": Kernel(delta_cases, check_delta),
    "rms_norm": Kernel(norm_cases, check_norm),
    "qkv_rope": Kernel(qkv_rope_cases, check_qkv_rope),
    "linear_cross_entropy": Kernel(loss_cases, check_loss),
    "fp8_quantize": Kernel(fp8_cases, check_fp8),
}
