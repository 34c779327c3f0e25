"""Kernels on this GPU beside what XLA and cuDNN make of the same call. One line of JSON per case.

    python bench/kernels.py [attention] [delta] [grouped_matmul] [int8] [norm] [heads] [loss] [--backends cudnn,mosaic]

`--backends` are those of attention and of grouped products that are timed, all of them if nothing is said.

Milliseconds are medians over calls of the host's clock, in programs of `REPEATS` calls each on other numbers, so that
neither the host nor the cache is measured. `error` is against the reference, relative, by the norm. The compiler has
the flags of this hardware, as in training.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from subject import opened

from maxhydra.kernels import attention, gated_delta, grouped_matmul, linear_cross_entropy, qkv_rope, rms_norm
from maxhydra.kernels.attention import Request
from maxhydra.kernels.int8_weight_matmul import triton as int8
from maxhydra.measure.kernels import distance as error
from maxhydra.measure.kernels import milliseconds as timed

REPEATS = 6
CAPPED = Request(
    scale=0.1, causal=True, window=None, chunk=None, softcap=50.0, softmax_dtype="float32", is_length_split=False
)
PLAIN = dataclasses.replace(CAPPED, softcap=None)
WINDOW = dataclasses.replace(PLAIN, window=128)
# Name, request, batch, tokens, query heads, key heads, head size, sinks.
ATTENTION = (
    ("soft-cap", CAPPED, 4, 4096, 32, 8, 64, False),
    ("soft-cap", CAPPED, 4, 4096, 32, 8, 128, False),
    ("soft-cap", CAPPED, 2, 4096, 16, 8, 256, False),
    ("window and sinks", WINDOW, 2, 4096, 64, 8, 64, True),
    ("plain", PLAIN, 8, 4096, 32, 8, 64, False),
    ("plain", PLAIN, 8, 4096, 24, 8, 128, False),
)
# Backends that were asked for; empty: all.
ASKED: list[str] = []


def among(backends: Iterable[str]) -> list[str]:
    """Those to be timed."""
    return [name for name in backends if name != "reference" and (not ASKED or name in ASKED)]


def draw(number: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(number), shape, jnp.bfloat16)


def say(kernel: str, **facts: Any) -> None:
    head = {"bench": "kernels", "device": jax.devices()[0].device_kind, "jax": jax.__version__, "kernel": kernel}
    print(json.dumps({**head, **facts}), flush=True)


def bench_attention() -> None:
    for name, request, B, T, N, K, H, has_sinks in ATTENTION:
        sinks = jnp.linspace(-1.0, 2.0, N) if has_sinks else None
        shapes = [(B, T, heads, H) for heads in (N, K, K, N)]
        sets = [tuple(draw(4 * n + i, *shape) for i, shape in enumerate(shapes)) for n in range(2)]

        def forward(backend: str, q: Any, k: Any, v: Any, d: Any, request: Any = request, sinks: Any = sinks) -> Any:
            return attention.attention(q, k, v, request, backend=backend, sinks_N=sinks)

        def both(backend: str, q: Any, k: Any, v: Any, d: Any) -> Any:
            return jax.vjp(lambda q, k, v: forward(backend, q, k, v, d), q, k, v)[1](d)

        small = tuple(x[:1, :512] for x in sets[0])
        facts = {"case": name, "shape": [B, T, N, K, H]}
        wanted = jax.jit(partial(both, "reference"))(*small)
        for backend in among(attention.BACKENDS):
            try:
                ms, all_ms = timed(partial(forward, backend), sets), timed(partial(both, backend), sets)
            except attention.UnsupportedError as refusal:
                facts[backend] = {"refused": refusal.reasons[0]}
                continue
            off = error(jax.jit(partial(both, backend))(*small), wanted)
            facts[backend] = {"forward_ms": round(ms, 3), "both_ms": round(all_ms, 3), "error": round(off, 4)}
        say("attention", **facts)


def bench_delta() -> None:
    """Of Qwen3-Next: 16 key heads, 32 value heads, all of 128; the error is that of 512 tokens."""
    T, M, N, H = 4096, 16, 32, 128

    def drawn(n: int, B: int) -> tuple[jax.Array, ...]:
        q, k, v, d_out = (draw(4 * n + i, B, T, heads, H) for i, heads in enumerate((M, M, N, N)))
        k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
        decay, rate = -jax.nn.softplus(draw(n, B, T, N)), jax.nn.sigmoid(draw(n + 1, B, T, N))
        return q * H**-0.5, k, v, decay, rate, d_out.astype(jnp.float32)

    def forward(backend: str, q: Any, k: Any, v: Any, decay: Any, rate: Any, d_out: Any) -> Any:
        given = {"log_decay_BTN": decay, "rate_BTN": rate, "state_BNKV": None, "segments_BT": None}
        return gated_delta.gated_delta(q, k, v, **given, backend=backend)

    def both(backend: str, *given: Any) -> Any:
        (*rest, d_out) = given
        (_, state), pull = jax.vjp(lambda *rest: forward(backend, *rest, d_out), *rest)
        return pull((d_out, state))

    for B in (1, 4):
        sets = [drawn(n, B) for n in range(2)]
        small = tuple(x[:1, :512] for x in sets[0])
        wanted = jax.jit(partial(both, "reference"))(*small)
        facts: dict[str, Any] = {"shape": [B, T, M, N, H]}
        for backend in ("triton", "chunked"):
            ms, all_ms = timed(partial(forward, backend), sets), timed(partial(both, backend), sets)
            off = error(jax.jit(partial(both, backend))(*small), wanted)
            facts[backend] = {"forward_ms": round(ms, 3), "both_ms": round(all_ms, 3), "error": float(f"{off:.2g}")}
        say("gated_delta", **facts)


def bench_grouped_matmul() -> None:
    """Mixtral 8x7B: 16,384 rows, as 8,192 tokens with two experts each make them."""
    E, D, F, M = 8, 4096, 14336, 16384
    x, w, d = draw(0, M, D), draw(1, E, D, F), draw(2, M, F)
    sizes = jnp.asarray([2048, 1500, 2596, 1800, 2200, 2300, 1748, 2192], jnp.int32)
    tflop = 2 * M * D * F / 1e12
    facts = {"shape": [M, E, D, F], "dense": {"tflops": round(tflop / timed(jnp.dot, [(x, w[0])] * 3) * 1e3, 1)}}
    for backend in among(("mosaic", "triton", "xla")):
        product = partial(grouped_matmul.grouped_matmul, backend=backend)
        parts = {
            "forward": lambda x, w, d, product=product: product(x, w, sizes),
            "inputs": lambda x, w, d, product=product: jax.vjp(lambda x: product(x, w, sizes), x)[1](d),
            "weights": lambda x, w, d, product=product: jax.vjp(lambda w: product(x, w, sizes), w)[1](d),
        }
        try:
            ms = {name: timed(part, [(x, w, d)] * 2) for name, part in parts.items()}
        except grouped_matmul.UnsupportedError as refusal:
            facts[backend] = {"refused": refusal.reasons[0]}
            continue
        facts[backend] = {name: {"ms": round(t, 3), "tflops": round(tflop / t * 1e3, 1)} for name, t in ms.items()}
    few = (x[:512, :256], w[:4, :256, :512], d[:512, :512], jnp.asarray([100, 0, 300, 112]))

    def gradients(backend: str, x: Any, w: Any, d: Any, sizes: Any) -> Any:
        return jax.vjp(lambda x, w: grouped_matmul.grouped_matmul(x, w, sizes, backend=backend), x, w)[1](d)

    ours = [backend for backend in among(("mosaic", "triton")) if "refused" not in facts[backend]]
    *found, wanted = (jax.jit(partial(gradients, backend))(*few) for backend in (*ours, "reference"))
    off = [error(one, wanted) for one in found]
    say("grouped_matmul", **facts, **({"error": round(max(off), 4)} if off else {}))


def bench_int8() -> None:
    """The products of Llama 3.2 1B when it decodes."""
    for M in (1, 8, 64):
        for name, N, K in (("query, key, value", 3072, 2048), ("gate, up", 16384, 2048), ("down", 2048, 8192)):
            scales = jnp.full((N,), 0.01, jnp.float32)
            # So short that the host would be measured with fewer.
            count = 4 * REPEATS
            codes = [jax.random.randint(jax.random.key(n), (N, K), -127, 128, jnp.int8) for n in range(count)]
            x = draw(0, M, K)
            product = partial(int8.product, dtype=jnp.dtype(jnp.bfloat16), interpret=False)
            ms = timed(lambda c, x=x, scales=scales, product=product: product(x, c, scales), [(c,) for c in codes])
            wide = [(c.astype(jnp.bfloat16),) for c in codes]
            theirs = timed(lambda w, x=x: (x @ w.T) * jnp.bfloat16(0.01), wide)
            off = error(product(x, codes[0], scales), (x.astype(jnp.float32) @ codes[0].T.astype(jnp.float32)) * 0.01)
            facts = {"us": round(ms * 1e3, 1), "bfloat16_us": round(theirs * 1e3, 1), "error": round(off, 4)}
            say("int8", case=name, shape=[M, N, K], tb_per_second=round(N * K / ms / 1e9, 2), **facts)


def backends_timed(
    kernel: str, calls: dict[str, Callable], sets: list[tuple], besides: float = 0.0, **facts: Any
) -> None:
    """The gradient alone (what it keeps of the forward pass is dead code), by each backend, less the milliseconds of
    what the calls do besides; and how they differ."""
    found = {backend: round(timed(call, sets) - besides, 4) for backend, call in calls.items()}
    ours, theirs = (jax.jit(call)(*sets[0]) for call in calls.values())
    say(kernel, **facts, **{f"{backend}_ms": ms for backend, ms in found.items()}, error=round(error(ours, theirs), 4))


def bench_norm() -> None:
    """Of Llama 3.2 3B and 1B."""
    for B, T, D in ((4, 4096, 3072), (8, 4096, 2048)):
        scale = jnp.linspace(0.5, 2, D)

        def both(backend: str, x: Any, stream: Any, normed: Any, scale: Any = scale) -> Any:
            call = partial(rms_norm.rms_norm, eps=1e-5, dtype=jnp.bfloat16, backend=backend)
            return jax.vjp(call, x, scale)[1]((stream, normed))

        sets = [tuple(draw(3 * n + i, B, T, D) for i in range(3)) for n in range(REPEATS)]
        backends_timed("rms_norm", {name: partial(both, name) for name in ("triton", "xla")}, sets, shape=[B, T, D])


def bench_heads() -> None:
    """Of the same."""
    for B, T, N, K, H in ((4, 4096, 24, 8, 128), (8, 4096, 32, 8, 64)):
        angles = jnp.arange(T)[None, :, None] * jnp.linspace(0.01, 1, H // 2) * jnp.ones((B, 1, 1))

        def both(backend: str, x: Any, *d: Any, angles: Any = angles, sizes: Any = (N, K)) -> Any:
            call = partial(qkv_rope.qkv_rope, num_heads=sizes[0], num_kv_heads=sizes[1], backend=backend)
            return jax.vjp(lambda x: call(x, jnp.cos(angles), jnp.sin(angles)), x)[1](d)

        counts = (N + 2 * K, N, K, K)
        sets = [tuple(draw(4 * n + i, B, T, count, H) for i, count in enumerate(counts)) for n in range(REPEATS)]
        calls = {name: partial(both, name) for name in ("triton", "xla")}
        backends_timed("rotated_heads", calls, sets, shape=[B, T, N, K, H])


def bench_loss() -> None:
    """Softmax, loss and gradient of the logits; what the head's products take is not measured."""
    M, V = 8192, 128256
    targets, weights = jax.random.randint(jax.random.key(9), (M,), 0, V), jnp.ones((M,))

    def logits(x: Any, shift: Any) -> Any:
        # Stands for the product that makes them: no part of what comes after, which may take their place.
        return jax.lax.optimization_barrier(x + shift)

    def both(per_token: Callable, x: Any, shift: Any) -> Any:
        return per_token(logits(x, shift), targets, weights, z_loss=0.0, dtype=jnp.dtype(jnp.bfloat16))

    sets = [(draw(n, M, V), jnp.bfloat16(n)) for n in range(2)]
    calls = {name: partial(both, linear_cross_entropy.BACKENDS[name].run) for name in ("triton", "xla")}
    backends_timed("linear_cross_entropy", calls, sets, shape=[M, V], besides=timed(logits, sets))


PARTS = {
    "attention": bench_attention,
    "delta": bench_delta,
    "grouped_matmul": bench_grouped_matmul,
    "int8": bench_int8,
    "norm": bench_norm,
    "heads": bench_heads,
    "loss": bench_loss,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--backends", type=lambda text: text.split(","), default=[])
    arguments = parser.parse_args()
    if unknown := sorted({*arguments.parts} - {*PARTS}):
        parser.error(f"no part {unknown[0]!r}: {', '.join(PARTS)}")
    if unknown := sorted({*arguments.backends} - {*(known := among(attention.BACKENDS))}):
        parser.error(f"no backend {unknown[0]!r}: {', '.join(known)}")
    ASKED.extend(arguments.backends)
    opened([])
    for part in arguments.parts or PARTS:
        PARTS[part]()
