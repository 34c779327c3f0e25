"""Times kernels on this GPU against XLA and cuDNN. Prints one JSON line per case.

    python bench/kernels.py [attention] [delta] [grouped_matmul] [int8] [norm] [heads] [loss] [--backends cudnn,mosaic]

`--backends` selects the backends of attention and grouped matmul to time; default: all.

Milliseconds are medians of wall-clock times of programs with `REPEATS` calls each on different inputs, so that neither
host overhead nor the cache is measured. `error` is relative to the reference, by norm. Compiler flags are those of this
hardware, as in training.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from target import open_target

from maxhydra.kernels import attention, gated_delta, grouped_matmul, linear_cross_entropy, qkv_rope, rms_norm
from maxhydra.kernels.attention import Request
from maxhydra.kernels.int8_weight_matmul import triton as int8
from maxhydra.measure.kernels import milliseconds, relative_error

REPEATS = 6
CAPPED = Request(scale=0.1, causal=True, window=None, chunk=None, softcap=50.0, softmax_dtype="float32")
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
# Backends selected by --backends; empty: all.
SELECTED: list[str] = []


def selected(backends: Iterable[str]) -> list[str]:
    """The backends to time."""
    return [name for name in backends if name != "reference" and (not SELECTED or name in SELECTED)]


def sample(number: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(number), shape, jnp.bfloat16)


def report(kernel: str, **facts: Any) -> None:
    head = {"bench": "kernels", "device": jax.devices()[0].device_kind, "jax": jax.__version__, "kernel": kernel}
    print(json.dumps({**head, **facts}), flush=True)


def bench_attention() -> None:
    for name, request, B, T, N, K, H, has_sinks in ATTENTION:
        sinks = jnp.linspace(-1.0, 2.0, N) if has_sinks else None
        shapes = [(B, T, heads, H) for heads in (N, K, K, N)]
        sets = [tuple(sample(4 * n + i, *shape) for i, shape in enumerate(shapes)) for n in range(2)]

        def forward(backend: str, q: Any, k: Any, v: Any, d: Any, request: Any = request, sinks: Any = sinks) -> Any:
            return attention.attention(q, k, v, request, backend=backend, sinks_N=sinks)

        def gradients(backend: str, q: Any, k: Any, v: Any, d: Any) -> Any:
            return jax.vjp(lambda q, k, v: forward(backend, q, k, v, d), q, k, v)[1](d)

        small = tuple(x[:1, :512] for x in sets[0])
        facts = {"case": name, "shape": [B, T, N, K, H]}
        expected = jax.jit(partial(gradients, "reference"))(*small)
        for backend in selected(attention.BACKENDS):
            try:
                ms, both_ms = (
                    milliseconds(partial(forward, backend), sets),
                    milliseconds(partial(gradients, backend), sets),
                )
            except attention.UnsupportedError as unsupported:
                facts[backend] = {"refused": unsupported.reasons[0]}
                continue
            error = relative_error(jax.jit(partial(gradients, backend))(*small), expected)
            facts[backend] = {"forward_ms": round(ms, 3), "both_ms": round(both_ms, 3), "error": round(error, 4)}
        report("attention", **facts)


def bench_delta() -> None:
    """Qwen3-Next: 16 key heads, 32 value heads of 128; the error is measured on 512 tokens."""
    T, M, N, H = 4096, 16, 32, 128

    def inputs(n: int, B: int) -> tuple[jax.Array, ...]:
        q, k, v, d_out = (sample(4 * n + i, B, T, heads, H) for i, heads in enumerate((M, M, N, N)))
        k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
        decay, rate = -jax.nn.softplus(sample(n, B, T, N)), jax.nn.sigmoid(sample(n + 1, B, T, N))
        return q * H**-0.5, k, v, decay, rate, d_out.astype(jnp.float32)

    def forward(backend: str, q: Any, k: Any, v: Any, decay: Any, rate: Any, d_out: Any) -> Any:
        arguments = {"log_decay_BTN": decay, "rate_BTN": rate, "state_BNKV": None, "segments_BT": None}
        return gated_delta.gated_delta(q, k, v, **arguments, backend=backend)

    def gradients(backend: str, *arrays: Any) -> Any:
        (*rest, d_out) = arrays
        (_, state), pull_back = jax.vjp(lambda *rest: forward(backend, *rest, d_out), *rest)
        return pull_back((d_out, state))

    for B in (1, 4):
        sets = [inputs(n, B) for n in range(2)]
        small = tuple(x[:1, :512] for x in sets[0])
        expected = jax.jit(partial(gradients, "reference"))(*small)
        facts: dict[str, Any] = {"shape": [B, T, M, N, H]}
        for backend in ("triton", "chunked"):
            ms, both_ms = milliseconds(partial(forward, backend), sets), milliseconds(partial(gradients, backend), sets)
            error = relative_error(jax.jit(partial(gradients, backend))(*small), expected)
            facts[backend] = {"forward_ms": round(ms, 3), "both_ms": round(both_ms, 3), "error": float(f"{error:.2g}")}
        report("gated_delta", **facts)


def bench_grouped_matmul() -> None:
    """Mixtral 8x7B: 16,384 rows, from 8,192 tokens with two experts each."""
    E, D, F, M = 8, 4096, 14336, 16384
    x, w, d = sample(0, M, D), sample(1, E, D, F), sample(2, M, F)
    sizes = jnp.asarray([2048, 1500, 2596, 1800, 2200, 2300, 1748, 2192], jnp.int32)
    tflop = 2 * M * D * F / 1e12
    facts = {"shape": [M, E, D, F], "dense": {"tflops": round(tflop / milliseconds(jnp.dot, [(x, w[0])] * 3) * 1e3, 1)}}
    for backend in selected(("mosaic", "triton", "xla")):
        matmul = partial(grouped_matmul.grouped_matmul, backend=backend)
        passes = {
            "forward": lambda x, w, d, matmul=matmul: matmul(x, w, sizes),
            "inputs": lambda x, w, d, matmul=matmul: jax.vjp(lambda x: matmul(x, w, sizes), x)[1](d),
            "weights": lambda x, w, d, matmul=matmul: jax.vjp(lambda w: matmul(x, w, sizes), w)[1](d),
        }
        try:
            ms = {name: milliseconds(function, [(x, w, d)] * 2) for name, function in passes.items()}
        except grouped_matmul.UnsupportedError as unsupported:
            facts[backend] = {"refused": unsupported.reasons[0]}
            continue
        facts[backend] = {name: {"ms": round(t, 3), "tflops": round(tflop / t * 1e3, 1)} for name, t in ms.items()}
    small = (x[:512, :256], w[:4, :256, :512], d[:512, :512], jnp.asarray([100, 0, 300, 112]))

    def gradients(backend: str, x: Any, w: Any, d: Any, sizes: Any) -> Any:
        return jax.vjp(lambda x, w: grouped_matmul.grouped_matmul(x, w, sizes, backend=backend), x, w)[1](d)

    timed = [backend for backend in selected(("mosaic", "triton")) if "refused" not in facts[backend]]
    *results, expected = (jax.jit(partial(gradients, backend))(*small) for backend in (*timed, "reference"))
    errors = [relative_error(result, expected) for result in results]
    report("grouped_matmul", **facts, **({"error": round(max(errors), 4)} if errors else {}))


def bench_int8() -> None:
    """The matmuls of Llama 3.2 1B in decoding."""
    for M in (1, 8, 64):
        for name, N, K in (("query, key, value", 3072, 2048), ("gate, up", 16384, 2048), ("down", 2048, 8192)):
            scales = jnp.full((N,), 0.01, jnp.float32)
            # More repeats: with fewer, host overhead would dominate such short calls.
            count = 4 * REPEATS
            codes = [jax.random.randint(jax.random.key(n), (N, K), -127, 128, jnp.int8) for n in range(count)]
            x = sample(0, M, K)
            matmul = partial(int8.small_batch_matmul, dtype=jnp.dtype(jnp.bfloat16), interpret=False)
            ms = milliseconds(lambda c, x=x, scales=scales, matmul=matmul: matmul(x, c, scales), [(c,) for c in codes])
            wide = [(c.astype(jnp.bfloat16),) for c in codes]
            bfloat16_ms = milliseconds(lambda w, x=x: (x @ w.T) * jnp.bfloat16(0.01), wide)
            error = relative_error(
                matmul(x, codes[0], scales), (x.astype(jnp.float32) @ codes[0].T.astype(jnp.float32)) * 0.01
            )
            facts = {"us": round(ms * 1e3, 1), "bfloat16_us": round(bfloat16_ms * 1e3, 1), "error": round(error, 4)}
            report("int8", case=name, shape=[M, N, K], tb_per_second=round(N * K / ms / 1e9, 2), **facts)


def compare_backends(
    kernel: str, calls: dict[str, Callable], sets: list[tuple], overhead_ms: float = 0.0, **facts: Any
) -> None:
    """Time the gradient of two backends, less `overhead_ms` of other work in the calls, and their difference.

    Results of the forward pass that the gradient does not use are dead code.
    """
    times = {backend: round(milliseconds(call, sets) - overhead_ms, 4) for backend, call in calls.items()}
    first, second = (jax.jit(call)(*sets[0]) for call in calls.values())
    report(
        kernel,
        **facts,
        **{f"{backend}_ms": ms for backend, ms in times.items()},
        error=round(relative_error(first, second), 4),
    )


def bench_norm() -> None:
    """Llama 3.2 3B and 1B."""
    for B, T, D in ((4, 4096, 3072), (8, 4096, 2048)):
        scale = jnp.linspace(0.5, 2, D)

        def gradients(backend: str, x: Any, stream: Any, normed: Any, scale: Any = scale) -> Any:
            call = partial(rms_norm.rms_norm, eps=1e-5, dtype=jnp.bfloat16, backend=backend)
            return jax.vjp(call, x, scale)[1]((stream, normed))

        sets = [tuple(sample(3 * n + i, B, T, D) for i in range(3)) for n in range(REPEATS)]
        compare_backends(
            "rms_norm", {name: partial(gradients, name) for name in ("triton", "xla")}, sets, shape=[B, T, D]
        )


def bench_heads() -> None:
    """Llama 3.2 3B and 1B."""
    for B, T, N, K, H in ((4, 4096, 24, 8, 128), (8, 4096, 32, 8, 64)):
        angles = jnp.arange(T)[None, :, None] * jnp.linspace(0.01, 1, H // 2) * jnp.ones((B, 1, 1))

        def gradients(backend: str, x: Any, *d: Any, angles: Any = angles, sizes: Any = (N, K)) -> Any:
            call = partial(qkv_rope.qkv_rope, num_heads=sizes[0], num_kv_heads=sizes[1], backend=backend)
            return jax.vjp(lambda x: call(x, jnp.cos(angles), jnp.sin(angles)), x)[1](d)

        counts = (N + 2 * K, N, K, K)
        sets = [tuple(sample(4 * n + i, B, T, count, H) for i, count in enumerate(counts)) for n in range(REPEATS)]
        calls = {name: partial(gradients, name) for name in ("triton", "xla")}
        compare_backends("qkv_rope", calls, sets, shape=[B, T, N, K, H])


def bench_loss() -> None:
    """Softmax, loss and gradient of the logits, without the matmuls of the head."""
    M, V = 8192, 128256
    targets, weights = jax.random.randint(jax.random.key(9), (M,), 0, V), jnp.ones((M,))

    def logits(x: Any, shift: Any) -> Any:
        # Stands for the matmul that computes the logits: not fused with the kernel, which may overwrite them.
        return jax.lax.optimization_barrier(x + shift)

    def loss_and_gradient(per_token: Callable, x: Any, shift: Any) -> Any:
        return per_token(logits(x, shift), targets, weights, z_loss=0.0, dtype=jnp.dtype(jnp.bfloat16))

    sets = [(sample(n, M, V), jnp.bfloat16(n)) for n in range(2)]
    calls = {name: partial(loss_and_gradient, linear_cross_entropy.BACKENDS[name].run) for name in ("triton", "xla")}
    compare_backends("linear_cross_entropy", calls, sets, shape=[M, V], overhead_ms=milliseconds(logits, sets))


CASES = {
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
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(CASES))
    parser.add_argument("--backends", type=lambda text: text.split(","), default=[])
    arguments = parser.parse_args()
    if unknown := sorted({*arguments.parts} - {*CASES}):
        parser.error(f"unknown part {unknown[0]!r}; expected {', '.join(CASES)}")
    if unknown := sorted({*arguments.backends} - {*(known := selected(attention.BACKENDS))}):
        parser.error(f"unknown backend {unknown[0]!r}; expected {', '.join(known)}")
    SELECTED.extend(arguments.backends)
    open_target([])
    for part in arguments.parts or CASES:
        CASES[part]()
