"""Calls of the kernels that decoding makes: products of few rows with what stands around them, and pages. None has
gradients."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from checks import Case, Check, Kernel, only

from maxhydra.config.schema.model import Pairs
from maxhydra.kernels.attention import Request
from maxhydra.kernels.attention.reference import attention as reference_attention
from maxhydra.kernels.attention.spec import TokenInfo
from maxhydra.kernels.fused_linear import (
    Epilogue,
    Norm,
    argmax,
    embed_norm,
    gemv,
    reference,
    small_batch,
    swiglu_prefill,
)
from maxhydra.kernels.fused_linear import split_k_reduce as row_kernel
from maxhydra.kernels.int8_weight_matmul import triton as int8
from maxhydra.kernels.paged_attention import Pages, filled, paged_attention, serving
from maxhydra.kernels.placement import Placement
from maxhydra.layers.rope import Rotation, rotate, turns

FLOAT32 = jnp.dtype(jnp.float32)
AROUND = ("nothing", "norm and gate", "norm and onto")
EPS = 1e-3


def around(name: str, scale_K: jax.Array, onto_MN: jax.Array) -> Epilogue:
    """Of what is in the arrays."""
    norm = Norm(scale_K, offset=1.0, eps=EPS)
    if name == "norm and gate":
        return Epilogue(norm=norm, activation=jax.nn.silu)
    return Epilogue(norm=norm, onto_MN=onto_MN) if name == "norm and onto" else Epilogue()


def one_row_cases() -> Iterator[Case]:
    """Of each way that its tile is chosen; codes in int8, and weights in the format of the rows."""
    sizes = ((64, 128), (2048, 2048), (3072, 2048), (8192, 512), (2048, 8192))
    for dtype, size, codes, name in itertools.product(("bfloat16", "float32"), sizes, (True, False), AROUND):
        yield Case("one_row", dtype, size, (("int8", codes), ("around", name)))


def check_one_row(case: Case) -> Check:
    (N, K), asked = case.sizes, dict(case.asked)
    rows = N * (2 if "gate" in asked["around"] else 1)
    codes = jax.random.randint(jax.random.key(1), (rows, K), -127, 128, jnp.int8)
    scales = jnp.linspace(0.001, 0.01, rows)

    def call(product: Callable[..., Any], x: Any, scale: Any, onto: Any, weight: Any) -> Any:
        parts = (codes, scales) if asked["int8"] else (weight, None)
        return product(x, *parts, around(asked["around"], scale, onto), FLOAT32)

    arrays = (case.draw(0, 1, K), case.draw(2, K), case.draw(3, 1, N), case.draw(4, rows, K))
    run = partial(call, partial(gemv.product, interpret=False))
    able = gemv.can_serve(N, K, case.dtype)
    return Check(only("triton", able, run), partial(call, reference.product), arrays, has_gradients=False)


def few_rows_cases() -> Iterator[Case]:
    sizes = ((256, 512), (2048, 2048), (2048, 8192))
    for M, (N, K), name in itertools.product((2, 33, 64), sizes, (*AROUND, "then norm")):
        yield Case("few_rows", "bfloat16", (M, N, K), (("around", name),))


def check_few_rows(case: Case) -> Check:
    (M, N, K), name = case.sizes, dict(case.asked)["around"]
    is_gated = "gate" in name
    arrays = (
        case.draw(0, M, K),
        case.draw(1, N * (2 if is_gated else 1), K),
        case.draw(2, K),
        case.draw(3, M, N),
        case.draw(4, N),
    )

    def ours(x: Any, weight: Any, scale: Any, onto: Any, next_scale: Any) -> Any:
        if name != "then norm":
            return small_batch.product(x, weight, around(name, scale, onto), x.dtype, interpret=False)
        parts = small_batch.summands(x, weight, Epilogue(onto_MN=onto), x.dtype, interpret=False)
        return row_kernel.summed(parts, onto, Norm(next_scale, 1.0, EPS), x.dtype, interpret=False)

    def wanted(x: Any, weight: Any, scale: Any, onto: Any, next_scale: Any) -> Any:
        if name != "then norm":
            return reference.product(x, weight, None, around(name, scale, onto), FLOAT32)
        stream = reference.product(x, weight, None, Epilogue(onto_MN=onto), FLOAT32)
        return stream, Norm(next_scale, 1.0, EPS)(stream)

    able = small_batch.can_serve(M, N, K, case.dtype, is_gated=is_gated) and row_kernel.can_serve(N)
    return Check(only("triton", able, ours), wanted, arrays, has_gradients=False)


def first_rows_cases() -> Iterator[Case]:
    yield from (Case("first_rows", "bfloat16", (M, N)) for M, N in itertools.product((2, 17, 64), (256, 768, 2048)))


def check_first_rows(case: Case) -> Check:
    M, N = case.sizes
    tokens = jax.random.randint(jax.random.key(1), (M,), 0, 100)

    def wanted(table: Any, scale: Any) -> Any:
        return table[tokens], Norm(scale, 1.0, EPS)(table[tokens])

    def ours(table: Any, scale: Any) -> Any:
        return embed_norm.looked_up(table, tokens, Norm(scale, 1.0, EPS), interpret=False)

    able = embed_norm.can_serve(M, N, case.dtype)
    return Check(only("triton", able, ours), wanted, (case.draw(0, 100, N), case.draw(2, N)), has_gradients=False)


def largest_cases() -> Iterator[Case]:
    for M, (N, K) in itertools.product((16, 40, 64), ((16384, 256), (128256, 512))):
        yield Case("largest", "bfloat16", (M, N, K))


def check_largest(case: Case) -> Check:
    """The largest output, and what the reference has at the place that was found."""
    M, N, K = case.sizes

    def outputs(x: Any, weight: Any) -> Any:
        return jnp.einsum("mk,nk->mn", x.astype(jnp.float32), weight.astype(jnp.float32), precision="highest")

    def ours(x: Any, weight: Any) -> Any:
        top, place = argmax.largest(x, weight, jnp.dtype(case.dtype), interpret=False)
        return top, jnp.take_along_axis(outputs(x, weight), place[:, None], axis=1)[:, 0]

    def wanted(x: Any, weight: Any) -> Any:
        top = jnp.max(outputs(x, weight), axis=1)
        return top, top

    able = argmax.can_serve(M, N, K, case.dtype)
    arrays = (case.draw(0, M, K), case.draw(1, N, K))
    return Check(only("triton", able, ours), wanted, arrays, has_gradients=False)


def many_rows_cases() -> Iterator[Case]:
    sizes = ((1024, 128, 64), (1152, 256, 2048), (4096, 1024, 512))
    yield from (Case("many_rows", "bfloat16", size) for size in sizes)


def check_many_rows(case: Case) -> Check:
    M, N, K = case.sizes

    def wanted(x: Any, weight: Any) -> Any:
        return reference.product(x, weight, None, Epilogue(activation=jax.nn.silu), FLOAT32)

    able = swiglu_prefill.can_serve(M, N, K, case.dtype, jax.nn.silu)
    run = only("mosaic", able, lambda x, weight: swiglu_prefill.gated(x, weight, jax.nn.silu))
    return Check(run, wanted, (case.draw(0, M, K), case.draw(1, 2 * N, K)), has_gradients=False)


def int8_cases() -> Iterator[Case]:
    sizes = ((48, 192), (2048, 2048), (2048, 8192), (16384, 512))
    for dtype, M, size in itertools.product(("bfloat16", "float32"), (2, 19, 64), sizes):
        yield Case("int8", dtype, (M, *size))


def check_int8(case: Case) -> Check:
    M, N, K = case.sizes
    codes = jax.random.randint(jax.random.key(1), (N, K), -127, 128, jnp.int8)
    scales = jnp.linspace(0.001, 0.01, N)

    def wanted(x: Any) -> Any:
        return reference.product(x, codes, scales, Epilogue(), FLOAT32)

    able = int8.can_serve(M, N, K, case.dtype)
    run = only("triton", able, lambda x: int8.product(x, codes, scales, FLOAT32, interpret=False))
    return Check(run, wanted, (case.draw(0, M, K),), has_gradients=False)


def pages_cases() -> Iterator[Case]:
    """Few heads and many, short rows and long ones, of which several programs share the tokens."""
    sizes = ((5, 2, 3, 64, 16, 7), (40, 8, 4, 64, 16, 20), (2, 8, 4, 128, 16, 260), (3, 1, 8, 128, 4, 40))
    asked = ((), (("window", 30),), (("softcap", 2.0),))
    for dtype, size, given in itertools.product(("bfloat16", "float16", "float32"), sizes, asked):
        yield Case("paged_attention", dtype, size, given)


def pages_of(case: Case) -> tuple[jax.Array, jax.Array]:
    """Tables of pages in any order, and lengths of rows, the second of none."""
    B, *_, Z, W = case.sizes
    table = jax.random.permutation(jax.random.key(3), B * W).reshape(B, W).astype(jnp.int32)
    return table, jax.random.randint(jax.random.key(4), (B,), 1, W * Z + 1).at[1].set(0).astype(jnp.int32)


def check_pages(case: Case) -> Check:
    """The new tokens come as two parts of a sum, are turned, and written on the way."""
    B, K, G, H, Z, W = case.sizes
    (table, lengths), N = pages_of(case), K * G
    fields = {"window": None, "chunk": None, "softcap": None, **dict(case.asked)}
    request = Request(scale=H**-0.5, causal=True, softmax_dtype="float32", is_length_split=False, **fields)
    rotation = Rotation(tuple(1000 ** (-i / H) for i in range(H // 2)), amplitude=1.0, pairs=Pairs.halves)
    shape, place = (B * W, K, Z, H), Placement.here()
    arrays = (case.draw(0, 2, B, N + 2 * K, H, dtype="float32"), case.draw(1, *shape), case.draw(2, *shape))
    backend = serving(Pages(*arrays[1:], table, lengths), case.dtype, place)

    def ours(parts: Any, key: Any, value: Any) -> Any:
        turn, pages = turns(lengths - 1, rotation), Pages(key, value, table, lengths)
        out, pages = paged_attention(parts, turn, pages, request, then=None, backend=backend or "")
        return out, pages.key_PKZH, pages.value_PKZH

    def wanted(parts: Any, key: Any, value: Any) -> Any:
        q, new_key, new_value = jnp.split(jnp.sum(parts, axis=0), [N, N + K], axis=1)
        q, new_key = (rotate(x[:, None], (lengths - 1)[:, None], rotation)[:, 0] for x in (q, new_key))
        last = jnp.maximum(lengths - 1, 0)
        page = jnp.where(lengths > 0, table[jnp.arange(B), last // Z], B * W)
        key, value = (
            old.at[page, :, last % Z].set(new, mode="drop") for old, new in ((key, new_key), (value, new_value))
        )
        rows = [old[table].swapaxes(2, 3).reshape(B, W * Z, K, H) for old in (key, value)]
        places = jnp.arange(W * Z)[None]
        tokens = TokenInfo(None, None, (lengths - 1)[:, None], jnp.where(places < lengths[:, None], places, -1))
        return reference_attention(q[:, None], *rows, request, tokens, None)[:, 0], key, value

    return Check(only(str(backend), backend is not None, ours), wanted, arrays, has_gradients=False)


def filling_cases() -> Iterator[Case]:
    sizes = ((5, 2, 1, 64, 16, 7), (64, 8, 1, 64, 16, 4), (3, 1, 1, 128, 4, 40))
    yield from (Case("page_filling", *one) for one in itertools.product(("bfloat16", "float32"), sizes))


def check_filling(case: Case) -> Check:
    B, K, _, H, Z, W = case.sizes
    (table, lengths), shape = pages_of(case), (B * W, K, Z, H)
    arrays = tuple(case.draw(i, *shape) for i in range(2)) + tuple(case.draw(2 + i, B, W * Z, K, H) for i in range(2))

    backend = serving(Pages(*arrays[:2], table, lengths), case.dtype, Placement.here())

    def ours(key: Any, value: Any, new_key: Any, new_value: Any) -> Any:
        pages = filled(Pages(key, value, table, lengths), new_key, new_value, Placement.here())
        assert pages is not None
        return pages.key_PKZH, pages.value_PKZH

    def wanted(key: Any, value: Any, new_key: Any, new_value: Any) -> Any:
        is_written = jnp.arange(W)[None] * Z < lengths[:, None]
        pages = jnp.where(is_written, table, B * W)
        return tuple(
            old.at[pages].set(new.reshape(B, W, Z, K, H).swapaxes(2, 3), mode="drop")
            for old, new in ((key, new_key), (value, new_value))
        )

    return Check(only(str(backend), backend is not None, ours), wanted, arrays, has_gradients=False)


KERNELS = {
    "one_row": Kernel(one_row_cases, check_one_row),
    "few_rows": Kernel(few_rows_cases, check_few_rows),
    "first_rows": Kernel(first_rows_cases, check_first_rows),
    "largest": Kernel(largest_cases, check_largest),
    "many_rows": Kernel(many_rows_cases, check_many_rows),
    "int8": Kernel(int8_cases, check_int8),
    "paged_attention": Kernel(pages_cases, check_pages),
    "page_filling": Kernel(filling_cases, check_filling),
}
