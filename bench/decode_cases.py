"""Check cases of the decoding kernels: fused matmuls of few rows, and paged attention. None has gradients."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from checks import Case, Check, Kernel, single_backend

from maxhydra.config.schema.model import Pairs
from maxhydra.kernels.attention import Request
from maxhydra.kernels.attention.reference import attention as reference_attention
from maxhydra.kernels.attention.spec import TokenInfo
from maxhydra.kernels.fused_linear import (
    Epilogue,
    NormParams,
    argmax,
    embed_norm,
    gemv,
    reference,
    small_batch,
    split_k_reduce,
    swiglu_prefill,
)
from maxhydra.kernels.grouped_matmul import expert_weights, few_rows
from maxhydra.kernels.int8_weight_matmul import triton as int8_triton
from maxhydra.kernels.paged_attention import Pages, find_backend, paged_attention, write_prompts
from maxhydra.kernels.placement import Placement
from maxhydra.layers.rope import Rotation, paged_rope_factors, rotate

FLOAT32 = jnp.dtype(jnp.float32)
EPILOGUES = ("none", "norm and gate", "norm and residual")
EPS = 1e-3


def make_epilogue(name: str, scale_K: jax.Array, residual_MN: jax.Array) -> Epilogue:
    """The named epilogue with these arrays."""
    norm = NormParams(scale_K, offset=1.0, eps=EPS)
    if name == "norm and gate":
        return Epilogue(norm=norm, activation=jax.nn.silu)
    return Epilogue(norm=norm, residual_MN=residual_MN) if name == "norm and residual" else Epilogue()


def gemv_cases() -> Iterator[Case]:
    """All branches of the tile choice; int8 codes, and weights in the dtype of the rows."""
    sizes = ((64, 128), (2048, 2048), (3072, 2048), (8192, 512), (2048, 8192))
    for dtype, size, codes, name in itertools.product(("bfloat16", "float32"), sizes, (True, False), EPILOGUES):
        yield Case("gemv", dtype, size, (("int8", codes), ("epilogue", name)))


def check_gemv(case: Case) -> Check:
    (N, K), options = case.sizes, dict(case.options)
    rows = N * (2 if "gate" in options["epilogue"] else 1)
    codes = jax.random.randint(jax.random.key(1), (rows, K), -127, 128, jnp.int8)
    scales = jnp.linspace(0.001, 0.01, rows)

    def call(matmul: Callable[..., Any], x: Any, scale: Any, residual: Any, weight: Any) -> Any:
        parts = (codes, scales) if options["int8"] else (weight, None)
        return matmul(x, *parts, make_epilogue(options["epilogue"], scale, residual), FLOAT32)

    arrays = (case.sample(0, 1, K), case.sample(2, K), case.sample(3, 1, N), case.sample(4, rows, K))
    run = partial(call, partial(gemv.gemv_linear, interpret=False))
    is_supported = gemv.is_supported(N, K, case.dtype)
    return Check(
        single_backend("triton", is_supported, run), partial(call, reference.linear), arrays, has_gradients=False
    )


def small_batch_cases() -> Iterator[Case]:
    sizes = ((256, 512), (2048, 2048), (2048, 8192))
    for M, (N, K), name in itertools.product((2, 33, 64), sizes, (*EPILOGUES, "then norm")):
        yield Case("small_batch", "bfloat16", (M, N, K), (("epilogue", name),))


def check_small_batch(case: Case) -> Check:
    (M, N, K), name = case.sizes, dict(case.options)["epilogue"]
    is_gated = "gate" in name
    arrays = (
        case.sample(0, M, K),
        case.sample(1, N * (2 if is_gated else 1), K),
        case.sample(2, K),
        case.sample(3, M, N),
        case.sample(4, N),
    )

    def kernel(x: Any, weight: Any, scale: Any, residual: Any, next_scale: Any) -> Any:
        if name != "then norm":
            return small_batch.small_batch_linear(
                x, weight, make_epilogue(name, scale, residual), x.dtype, interpret=False
            )
        parts = small_batch.partial_sums(x, weight, Epilogue(residual_MN=residual), x.dtype, interpret=False)
        return split_k_reduce.reduce_add_norm(
            parts, residual, NormParams(next_scale, 1.0, EPS), x.dtype, interpret=False
        )

    def reference_call(x: Any, weight: Any, scale: Any, residual: Any, next_scale: Any) -> Any:
        if name != "then norm":
            return reference.linear(x, weight, None, make_epilogue(name, scale, residual), FLOAT32)
        new_residual = reference.linear(x, weight, None, Epilogue(residual_MN=residual), FLOAT32)
        return new_residual, NormParams(next_scale, 1.0, EPS)(new_residual)

    is_supported = small_batch.is_supported(M, N, K, case.dtype, is_gated=is_gated) and split_k_reduce.is_supported(N)
    return Check(single_backend("triton", is_supported, kernel), reference_call, arrays, has_gradients=False)


def few_rows_cases() -> Iterator[Case]:
    """One token, fewer rows than experts, and more; the last token is padding."""
    sizes = ((8, 4, 320, 576), (16, 2, 512, 768))
    formats = ("bfloat16", "int8", "int4", "int4_16", "mxfp4")
    for M, (E, K, D, F), format in itertools.product((1, 3, 64), sizes, formats):
        yield Case("few_rows", "bfloat16", (M, E, K, D, F), (("format", format), ("bias", E == 8)))


def random_matrices(format: str, number: int, shape: tuple[int, int, int]) -> tuple[few_rows.Matrices, jax.Array]:
    """Random weights of about 0.02 in a format, and in float32; all codes occur. int4_16: in groups of 16, not 64."""
    E, inputs, outputs = shape
    key = jax.random.key(number)
    if format == "bfloat16":
        weight = (0.02 * jax.random.normal(key, shape)).astype(jnp.bfloat16)
        return few_rows.Matrices(weight), weight.astype(jnp.float32)
    if format == "int8":
        codes = jax.random.randint(key, shape, -127, 128, jnp.int8)
        scales = jnp.linspace(0.0001, 0.0005, E * outputs).reshape(E, outputs)
        return few_rows.Matrices(codes, scales), codes * scales[:, None]
    codes = jax.random.randint(key, shape, 0, 16, jnp.uint8)
    if format.startswith("int4"):
        group = int(format.partition("_")[2] or 64)
        scales = jnp.linspace(0.002, 0.01, E * (inputs // group) * outputs).reshape(E, -1, outputs)
        values = (codes ^ 8).astype(jnp.float32) - 8
        return expert_weights.pack_int4(codes, scales), values * jnp.repeat(scales, group, axis=1)
    exponents = jax.random.randint(key, (E, inputs // 32, outputs), 117, 123, jnp.int32)
    magnitudes = jnp.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = jnp.concatenate([magnitudes, -magnitudes])[codes]
    return expert_weights.pack_mxfp4(codes, exponents), values * jnp.repeat(2.0 ** (exponents - 127), 32, axis=1)


def check_few_rows(case: Case) -> Check:
    (M, E, K, D, F), options = case.sizes, dict(case.options)
    ids = jax.lax.top_k(jax.random.normal(jax.random.key(9), (M, E)), K)[1]
    ids = ids if M == 1 else ids.at[-1].set(-1)
    shapes = ((E, D, F), (E, D, F), (E, F, D))
    matrices, wide = zip(*[random_matrices(options["format"], i, shape) for i, shape in enumerate(shapes)], strict=True)

    def biased(biases: Any) -> tuple[Any, ...]:
        return (*biases, None) if options["bias"] else (None,) * 3

    def activation(gate: jax.Array | None, up: jax.Array) -> jax.Array:
        return jax.nn.silu(gate) * up

    def kernel(x: Any, factors: Any, biases: Any) -> Any:
        experts = [matrix._replace(bias_EN=bias) for matrix, bias in zip(matrices, biased(biases), strict=True)]
        return few_rows.apply_experts(x, ids, factors, few_rows.Experts(*experts), activation)

    def reference_call(x: Any, factors: Any, biases: Any) -> Any:
        added = [0 if bias is None else bias[:, None] for bias in biased(biases)]
        gate, up = (jnp.einsum("md,edf->emf", x, w) + bias for w, bias in zip(wide[:2], added[:2], strict=True))
        outs = jnp.einsum("emf,efd->med", activation(gate, up), wide[2])
        factors_ME = jnp.sum(jnp.where(ids[..., None] == jnp.arange(E), factors[..., None], 0), axis=1)
        return jnp.einsum("med,me->md", outs, factors_ME)

    arrays = (case.sample(5, M, D), case.sample(6, M, K), (case.sample(7, E, F), case.sample(8, E, F)))
    is_supported = few_rows.is_supported(M, few_rows.Experts(*matrices), case.dtype)
    return Check(single_backend("triton", is_supported, kernel), reference_call, arrays, has_gradients=False)


def embed_norm_cases() -> Iterator[Case]:
    yield from (Case("embed_norm", "bfloat16", (M, N)) for M, N in itertools.product((2, 17, 64), (256, 768, 2048)))


def check_embed_norm(case: Case) -> Check:
    M, N = case.sizes
    tokens = jax.random.randint(jax.random.key(1), (M,), 0, 100)

    def reference_call(table: Any, scale: Any) -> Any:
        return table[tokens], NormParams(scale, 1.0, EPS)(table[tokens])

    def kernel(table: Any, scale: Any) -> Any:
        return embed_norm.embed_and_norm(table, tokens, NormParams(scale, 1.0, EPS), interpret=False)

    is_supported = embed_norm.is_supported(M, N, case.dtype)
    return Check(
        single_backend("triton", is_supported, kernel),
        reference_call,
        (case.sample(0, 100, N), case.sample(2, N)),
        has_gradients=False,
    )


def argmax_cases() -> Iterator[Case]:
    for M, (N, K) in itertools.product((16, 40, 64), ((16384, 256), (128256, 512))):
        yield Case("argmax", "bfloat16", (M, N, K))


def check_argmax(case: Case) -> Check:
    """The largest output, and the reference output at the returned index."""
    M, N, K = case.sizes

    def outputs(x: Any, weight: Any) -> Any:
        return jnp.einsum("mk,nk->mn", x.astype(jnp.float32), weight.astype(jnp.float32), precision="highest")

    def kernel(x: Any, weight: Any) -> Any:
        top, index = argmax.matmul_argmax(x, weight, jnp.dtype(case.dtype), interpret=False)
        return top, jnp.take_along_axis(outputs(x, weight), index[:, None], axis=1)[:, 0]

    def reference_call(x: Any, weight: Any) -> Any:
        top = jnp.max(outputs(x, weight), axis=1)
        return top, top

    is_supported = argmax.is_supported(M, N, K, case.dtype)
    arrays = (case.sample(0, M, K), case.sample(1, N, K))
    return Check(single_backend("triton", is_supported, kernel), reference_call, arrays, has_gradients=False)


def swiglu_prefill_cases() -> Iterator[Case]:
    sizes = ((1024, 128, 64), (1152, 256, 2048), (4096, 1024, 512))
    yield from (Case("swiglu_prefill", "bfloat16", size) for size in sizes)


def check_swiglu_prefill(case: Case) -> Check:
    M, N, K = case.sizes

    def reference_call(x: Any, weight: Any) -> Any:
        return reference.linear(x, weight, None, Epilogue(activation=jax.nn.silu), FLOAT32)

    is_supported = swiglu_prefill.is_supported(M, N, K, case.dtype, jax.nn.silu)
    run = single_backend("mosaic", is_supported, lambda x, weight: swiglu_prefill.swiglu_matmul(x, weight, jax.nn.silu))
    return Check(run, reference_call, (case.sample(0, M, K), case.sample(1, 2 * N, K)), has_gradients=False)


def int8_cases() -> Iterator[Case]:
    sizes = ((48, 192), (2048, 2048), (2048, 8192), (16384, 512))
    for dtype, M, size in itertools.product(("bfloat16", "float32"), (2, 19, 64), sizes):
        yield Case("int8", dtype, (M, *size))


def check_int8(case: Case) -> Check:
    M, N, K = case.sizes
    codes = jax.random.randint(jax.random.key(1), (N, K), -127, 128, jnp.int8)
    scales = jnp.linspace(0.001, 0.01, N)

    def reference_call(x: Any) -> Any:
        return reference.linear(x, codes, scales, Epilogue(), FLOAT32)

    is_supported = int8_triton.is_supported(M, N, K, case.dtype)
    run = single_backend(
        "triton", is_supported, lambda x: int8_triton.small_batch_matmul(x, codes, scales, FLOAT32, interpret=False)
    )
    return Check(run, reference_call, (case.sample(0, M, K),), has_gradients=False)


def pages_cases() -> Iterator[Case]:
    """Few and many heads, short rows, and long rows whose tokens are split over several programs."""
    sizes = ((5, 2, 3, 64, 16, 7), (40, 8, 4, 64, 16, 20), (2, 8, 4, 128, 16, 260), (3, 1, 8, 128, 4, 40))
    options = ((), (("window", 30),), (("softcap", 2.0),))
    for dtype, size, case_options in itertools.product(("bfloat16", "float16", "float32"), sizes, options):
        yield Case("paged_attention", dtype, size, case_options)


def pages_of(case: Case) -> tuple[jax.Array, jax.Array]:
    """Page tables in random order, and row lengths, the second of which is zero."""
    B, *_, Z, W = case.sizes
    table = jax.random.permutation(jax.random.key(3), B * W).reshape(B, W).astype(jnp.int32)
    return table, jax.random.randint(jax.random.key(4), (B,), 1, W * Z + 1).at[1].set(0).astype(jnp.int32)


def check_pages(case: Case) -> Check:
    """The new tokens are given as two partial sums; the kernel rotates them and writes them to their pages."""
    B, K, G, H, Z, W = case.sizes
    (table, lengths), N = pages_of(case), K * G
    fields = {"window": None, "chunk": None, "softcap": None, **dict(case.options)}
    request = Request(scale=H**-0.5, causal=True, softmax_dtype="float32", **fields)
    rotation = Rotation(tuple(1000 ** (-i / H) for i in range(H // 2)), amplitude=1.0, pairs=Pairs.halves)
    shape, place = (B * W, K, Z, H), Placement.here()
    arrays = (case.sample(0, 2, B, N + 2 * K, H, dtype="float32"), case.sample(1, *shape), case.sample(2, *shape))
    backend = find_backend(Pages(*arrays[1:], table, lengths), case.dtype, place)

    def kernel(parts: Any, key: Any, value: Any) -> Any:
        turn, pages = paged_rope_factors(lengths - 1, rotation), Pages(key, value, table, lengths)
        out, pages = paged_attention(parts, turn, pages, request, then=None, backend=backend or "")
        return out, pages.key_PKZH, pages.value_PKZH

    def reference_call(parts: Any, key: Any, value: Any) -> Any:
        q, new_key, new_value = jnp.split(jnp.sum(parts, axis=0), [N, N + K], axis=1)
        q, new_key = (rotate(x[:, None], (lengths - 1)[:, None], rotation)[:, 0] for x in (q, new_key))
        last = jnp.maximum(lengths - 1, 0)
        page = jnp.where(lengths > 0, table[jnp.arange(B), last // Z], B * W)
        key, value = (
            old.at[page, :, last % Z].set(new, mode="drop") for old, new in ((key, new_key), (value, new_value))
        )
        rows = [old[table].swapaxes(2, 3).reshape(B, W * Z, K, H) for old in (key, value)]
        indices = jnp.arange(W * Z)[None]
        tokens = TokenInfo(None, None, (lengths - 1)[:, None], jnp.where(indices < lengths[:, None], indices, -1))
        return reference_attention(q[:, None], *rows, request, tokens, None)[:, 0], key, value

    return Check(single_backend(str(backend), backend is not None, kernel), reference_call, arrays, has_gradients=False)


def prefill_write_cases() -> Iterator[Case]:
    sizes = ((5, 2, 1, 64, 16, 7), (64, 8, 1, 64, 16, 4), (3, 1, 1, 128, 4, 40))
    yield from (Case("prefill_write", *case) for case in itertools.product(("bfloat16", "float32"), sizes))


def check_prefill_write(case: Case) -> Check:
    B, K, _, H, Z, W = case.sizes
    (table, lengths), shape = pages_of(case), (B * W, K, Z, H)
    arrays = tuple(case.sample(i, *shape) for i in range(2)) + tuple(
        case.sample(2 + i, B, W * Z, K, H) for i in range(2)
    )

    backend = find_backend(Pages(*arrays[:2], table, lengths), case.dtype, Placement.here())

    def kernel(key: Any, value: Any, new_key: Any, new_value: Any) -> Any:
        pages = write_prompts(Pages(key, value, table, lengths), new_key, new_value, Placement.here())
        assert pages is not None
        return pages.key_PKZH, pages.value_PKZH

    def reference_call(key: Any, value: Any, new_key: Any, new_value: Any) -> Any:
        is_used = jnp.arange(W)[None] * Z < lengths[:, None]
        pages = jnp.where(is_used, table, B * W)
        return tuple(
            old.at[pages].set(new.reshape(B, W, Z, K, H).swapaxes(2, 3), mode="drop")
            for old, new in ((key, new_key), (value, new_value))
        )

    return Check(single_backend(str(backend), backend is not None, kernel), reference_call, arrays, has_gradients=False)


KERNELS = {
    "gemv": Kernel(gemv_cases, check_gemv),
    "small_batch": Kernel(small_batch_cases, check_small_batch),
    "few_rows": Kernel(few_rows_cases, check_few_rows),
    "embed_norm": Kernel(embed_norm_cases, check_embed_norm),
    "argmax": Kernel(argmax_cases, check_argmax),
    "swiglu_prefill": Kernel(swiglu_prefill_cases, check_swiglu_prefill),
    "int8": Kernel(int8_cases, check_int8),
    "paged_attention": Kernel(pages_cases, check_pages),
    "prefill_write": Kernel(prefill_write_cases, check_prefill_write),
}
