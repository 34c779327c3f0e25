"""Attention: the reference against a NumPy transcription in float64, every backend against the reference."""

import itertools
import logging
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.kernels import dispatch
from maxhydra.kernels.attention import (
    BACKENDS,
    OPERATION,
    Backend,
    Call,
    Request,
    UnsupportedError,
    attention,
    mosaic,
    triton,
    xla,
)
from maxhydra.kernels.attention.spec import TokenInfo
from maxhydra.kernels.placement import capability
from tests.support import skips

HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
MASKS = {
    "full": {"causal": False},
    "causal": {},
    "window": {"window": 5},
    "window_of_one": {"window": 1},
    "softcap": {"softcap": 1.5},
    "segments": {"segments": True},
    "chunk": {"chunk": 5},
    "sinks": {"sinks": True},
    "everything": {"window": 4, "softcap": 2.0, "segments": True, "sinks": True},
    "chunk_and_more": {"chunk": 4, "segments": True, "sinks": True},
}
BATCH, LENGTH, HEAD_DIM = 2, 18, 8


def make_request(**changes) -> Request:
    fields = {"scale": 0.3, "causal": True, "window": None, "chunk": None, "softcap": None}
    return Request(**{**fields, "softmax_dtype": "float32", **changes})


def make_inputs(heads: tuple[int, int], dtype=jnp.float32, length: int = LENGTH, head_dim: int = HEAD_DIM):
    shapes = [(BATCH, length, n, head_dim) for n in (heads[0], heads[1], heads[1])]
    return [
        jax.random.normal(key, shape).astype(dtype)
        for key, shape in zip(jax.random.split(jax.random.key(0), 3), shapes, strict=True)
    ]


def make_segments(length: int = LENGTH) -> np.ndarray:
    """One row of two packed sequences with padding after them, one row with padding in front."""
    a, b = length // 3, length - 2
    return np.stack([[1] * a + [2] * (b - a) + [0] * (length - b), [0] * 3 + [1] * (length - 3)]).astype(np.int32)


def transcription(
    q, k, v, request: Request, *, q_segments=None, kv_segments=None, q_positions=None, kv_positions=None, sinks=None
):
    """Attention one query at a time, by loops, in float64."""
    q, k, v = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v))
    (batch, length, heads, _), kv_heads = q.shape, k.shape[2]
    out = np.zeros_like(q)
    for b in range(batch):
        for t in range(length):
            position = t if q_positions is None else q_positions[b, t]
            keys = []
            for s in range(k.shape[1]):
                key_position = s if kv_positions is None else kv_positions[b, s]
                is_visible = min(position, key_position) >= 0 and (key_position <= position or not request.causal)
                is_visible &= request.window is None or position - key_position < request.window
                is_visible &= request.chunk is None or position // request.chunk == key_position // request.chunk
                is_visible &= q_segments is None or q_segments[b, t] == kv_segments[b, s] != 0
                keys += [s] if is_visible else []
            for n in range(heads if keys else 0):
                logits = k[b, keys, n * kv_heads // heads] @ q[b, t, n] * request.scale
                if request.softcap:
                    logits = request.softcap * np.tanh(logits / request.softcap)
                top = logits.max()
                weights = np.exp(logits - top)
                total = weights.sum() + (0 if sinks is None else np.exp(float(sinks[n]) - top))
                out[b, t, n] = weights / total @ v[b, keys, n * kv_heads // heads]
    return out


def tags(mask: dict, length: int = LENGTH, heads: int = 4) -> dict[str, jax.Array]:
    """Pop the keys of a MASKS case that stand for arrays and return the arrays; the rest are fields of its request."""
    segments = jnp.asarray(make_segments(length))
    arrays = {"q_segments_BT": segments, "kv_segments_BS": segments} if mask.pop("segments", False) else {}
    return arrays | ({"sinks_N": jnp.linspace(-1.0, 2.0, heads)} if mask.pop("sinks", False) else {})


def assert_near_in_bfloat16(got, want):
    """Compare by norm: elements that nearly cancel carry the rounding errors of terms a hundred times their size.

    The second term is for gradients that are zero, as with a window of one.
    """
    error, size = np.linalg.norm(np.float32(got - want)), np.linalg.norm(np.float32(want))
    assert error < 0.01 * (size + want.size**0.5)


def value_and_grads(backend: str, inputs, request: Request, sinks_N=None, **arrays):
    """Output, and the gradient of a fixed random projection of it, also with respect to the sinks if there are any."""
    probe = jax.random.normal(jax.random.key(1), (*inputs[0].shape[:3], inputs[2].shape[3]))

    def project(varied):
        q, k, v, *sinks = varied
        extra = {"sinks_N": sinks[0]} if sinks else {}
        out = attention(q, k, v, request, backend=backend, **arrays, **extra)
        return jnp.sum(out.astype(jnp.float32) * probe), out

    varied = [*inputs] if sinks_N is None else [*inputs, sinks_N]
    (_, out), grads = jax.jit(jax.value_and_grad(project, has_aux=True))(varied)
    return [np.asarray(x.astype(jnp.float32)) for x in (out, *grads)]


@cache
def of_case(backend: str, heads: str, mask: str):
    """`value_and_grads` in float32."""
    fields = dict(MASKS[mask])
    arrays = tags(fields)
    return value_and_grads(backend, make_inputs(HEADS[heads]), make_request(**fields), **arrays)


CASES = [
    pytest.param(heads, mask, id=f"{heads}-{mask}")
    for heads, mask in itertools.product(HEADS, MASKS)
    if heads == "gqa" or mask in ("causal", "sinks", "everything")
]


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "mask"), CASES)
def test_reference_equals_the_transcription(heads, mask):
    mask = dict(MASKS[mask])
    arrays = tags(mask)
    q, k, v = make_inputs(HEADS[heads])
    request = make_request(**mask)
    segments = make_segments() if "q_segments_BT" in arrays else None
    sinks = arrays.get("sinks_N")
    expected = transcription(q, k, v, request, q_segments=segments, kv_segments=segments, sinks=sinks)
    np.testing.assert_allclose(attention(q, k, v, request, backend="reference", **arrays), expected, atol=2e-6)


@pytest.mark.slow
@pytest.mark.default_cases(
    "mha-everything",
    "mqa-everything",
    "gqa-everything",
    "gqa-full",
    "gqa-causal",
    "gqa-chunk_and_more",
    "gqa-window_of_one",
)
@pytest.mark.parametrize(("heads", "mask"), CASES)
def test_xla_equals_the_reference_with_gradients(heads, mask):
    for got, want in zip(of_case("xla", heads, mask), of_case("reference", heads, mask), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.slow
@pytest.mark.default_cases("full-float32", "everything-bfloat16", "window_of_one-bfloat16")
@pytest.mark.parametrize("softmax_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mask", ["full", "window_of_one", "everything", "chunk_and_more"])
def test_xla_in_bfloat16_is_near_the_reference(mask, softmax_dtype):
    mask = dict(MASKS[mask])
    arrays = tags(mask)
    inputs, request = make_inputs((4, 2), jnp.bfloat16), make_request(softmax_dtype=softmax_dtype, **mask)
    expected = value_and_grads("reference", inputs, request, **arrays)
    for got, want in zip(value_and_grads("xla", inputs, request, **arrays), expected, strict=True):
        assert_near_in_bfloat16(got, want)


@pytest.mark.slow
@pytest.mark.default_cases("full", "everything", "chunk_and_more")
@pytest.mark.parametrize("mask", ["full", "causal", "window", "window_of_one", "chunk", "everything", "chunk_and_more"])
def test_blocks_of_queries_change_nothing(mask, monkeypatch):
    whole, mask = of_case("xla", "gqa", mask), dict(MASKS[mask])
    arrays = tags(mask)
    inputs, request = make_inputs((4, 2)), make_request(**mask)
    monkeypatch.setattr(xla, "MIN_BLOCK", 4)
    monkeypatch.setattr(xla, "LANES", 2)
    assert len(list(xla._blocks(LENGTH, LENGTH, request, by_position=False))) == 5
    for got, want in zip(value_and_grads("xla", inputs, request, **arrays), whole, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_blocks_cover_all_visible_keys_and_skip_hidden_ones():
    blocks = list(xla._blocks(512, 512, make_request(window=200), by_position=False))
    assert [(q.start, q.stop) for q, _ in blocks] == [(0, 128), (128, 256), (256, 384), (384, 512)]
    assert [(k.start, k.stop) for _, k in blocks] == [(0, 128), (0, 256), (0, 384), (128, 512)]
    chunks = list(xla._blocks(512, 512, make_request(chunk=192), by_position=False))
    assert [(k.start, k.stop) for _, k in chunks] == [(0, 128), (0, 256), (128, 384), (384, 512)]
    causal = make_request()
    assert [len(list(xla._blocks(n, n, causal, by_position=False))) for n in (1, 128, 1024, 8192, 32768)] == [
        1,
        1,
        8,
        8,
        32,
    ]
    window = list(xla._blocks(128, 256, make_request(window=10, offset=128), by_position=False))
    assert [(k.start, k.stop) for _, k in window] == [(0, 256)]


@pytest.mark.slow
@pytest.mark.default_cases("mask1-reference", "mask1-xla", "mask2-reference", "mask2-xla")
@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("mask", [{}, {"window": 4, "softcap": 2.0}, {"chunk": 4, "sinks": True}])
def test_positions_define_the_mask_for_keys_from_a_cache(backend, mask):
    """Two new tokens in row 0, one and an absent one in row 1; slots that were never written hold garbage."""
    q, k, v = make_inputs((4, 2))
    mask = dict(mask)
    sinks = tags(mask).get("sinks_N")
    q, request = q[:, :2], make_request(**mask)
    q_positions = np.array([[9, 10], [4, -1]], np.int32)
    slots = np.arange(LENGTH)
    kv_positions = np.where(slots[None] <= np.array([[10], [4]]), slots[None], -1).astype(np.int32)
    arrays = {"q_positions_BT": q_positions, "kv_positions_BS": kv_positions}
    out = attention(q, k, v, request, backend=backend, **arrays, sinks_N=sinks)
    expected = transcription(q, k, v, request, q_positions=q_positions, kv_positions=kv_positions, sinks=sinks)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    assert not np.any(out[1, 1])
    one = {"q_positions_BT": q_positions[:, :1], "kv_positions_BS": kv_positions}
    alone = attention(q[:, :1], k, v, request, backend=backend, **one, sinks_N=sinks)
    np.testing.assert_allclose(alone, expected[:, :1], atol=2e-6)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_a_query_without_keys_gives_zero_with_zero_gradient(backend):
    inputs = make_inputs((4, 2))
    segments = jnp.zeros((BATCH, LENGTH), jnp.int32)
    for x in value_and_grads(backend, inputs, make_request(), q_segments_BT=segments, kv_segments_BS=segments):
        assert not np.any(x)


def make_call(**changes) -> Call:
    fields = {"request": make_request(), "platform": "gpu", "dtype": "bfloat16", "head_dim": 128, "length": 64}
    fields |= {"capability": "9.0"}
    flags = dict.fromkeys(("has_segments", "has_positions", "has_selection", "has_sinks"), False)
    return Call(**{**fields, **flags, "value_dim": changes.get("head_dim", 128), **changes})


TO_TRITON = ("soft-capping", "chunks", "sinks", "up to 128, not 256")
PADDED = ("not 192", "multiples of 8", "not 64 and 128")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"platform": "cpu"}, "runs on gpu, not cpu"),
        ({"dtype": "float32"}, "takes bfloat16 or float16, not float32"),
        ({"head_dim": 256}, "up to 128, not 256"),
        ({"head_dim": 60}, "multiples of 8"),
        ({"head_dim": 192, "value_dim": 128}, "up to 128, not 192"),
        ({"request": make_request(softcap=30.0)}, "does not support soft-capping"),
        ({"value_dim": 64}, "takes values of the size of keys, not 64 and 128"),
        ({"has_selection": True}, "does not support a selection of keys"),
        ({"request": make_request(chunk=16)}, "does not support chunks"),
        ({"has_sinks": True}, "does not support sinks"),
        ({"has_positions": True}, "cache"),
        ({"has_segments": True, "length": 63}, "multiples of 2 tokens, not 63"),
    ],
)
def test_cudnn_rejects_unsupported_calls_and_auto_selects_the_next(changes, reason):
    with pytest.raises(UnsupportedError, match=reason) as error:
        OPERATION.choose("cudnn", make_call(**changes))
    supported, padded = ("xla", "reference"), ("triton",) if reason.endswith(PADDED) else ()
    supported = (("triton",) if reason.endswith(TO_TRITON) else ()) + supported + padded
    assert error.value.supported == supported
    assert OPERATION.choose("auto", make_call(**changes)) == supported[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"platform": "cpu"}, "runs on gpu, not cpu"),
        ({"head_dim": 320}, "up to 256, not 320"),
        ({"value_dim": 512}, "up to 256, not 512"),
        ({"length": 96}, "takes lengths in multiples of 64, not 96"),
        ({"has_selection": True}, "does not support a selection of keys"),
        ({"has_positions": True}, "cache"),
    ],
)
def test_triton_rejects_unsupported_calls(changes, reason):
    capped = {"request": make_request(softcap=30.0)}
    with pytest.raises(UnsupportedError, match=reason) as error:
        OPERATION.choose("triton", make_call(**{**capped, **changes}))
    assert error.value.supported == ("xla", "reference")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"platform": "cpu"}, "runs on gpu, not cpu"),
        ({"capability": "8.0"}, "needs a GPU of compute capability 9.0, not 8.0"),
        ({"head_dim": 96}, "takes heads of 64 or 128 or 256, not 96"),
        ({"dtype": "float32"}, "takes bfloat16 or float16, not float32"),
        ({"length": 64}, "takes lengths in multiples of 128, not 64"),
    ],
)
def test_mosaic_rejects_unsupported_calls(changes, reason):
    capped = {"request": make_request(softcap=30.0), "length": 128}
    assert OPERATION.choose("auto", make_call(**capped)) == "mosaic"
    assert OPERATION.choose("auto", make_call(**capped, splits=("batch", "heads"))) == "mosaic"
    for window, backend in ((128, "triton"), (1024, "mosaic")):
        assert (
            OPERATION.choose("auto", make_call(**capped | {"request": make_request(softcap=30.0, window=window)}))
            == backend
        )
    for plain, backend in (
        ({"head_dim": 64}, "mosaic"),
        ({}, "mosaic"),
        ({"request": make_request(causal=False)}, "cudnn"),
    ):
        assert OPERATION.choose("auto", make_call(length=128, **plain)) == backend
    with pytest.raises(UnsupportedError, match=reason):
        OPERATION.choose("mosaic", make_call(**{**capped, **changes}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"platform": "gpu"}, "runs on tpu, not gpu"),
        ({"length": 200}, "takes lengths in multiples of 128, not 200"),
        ({"has_positions": True}, "cache"),
        ({"is_block": True}, "blocks of keys"),
    ],
)
def test_splash_serves_tpus_and_rejects_unsupported_calls(changes, reason):
    supported = {
        "platform": "tpu",
        "length": 256,
        "splits": ("batch", "heads"),
        "value_dim": 64,
        "has_sinks": True,
        "has_segments": True,
    }
    assert OPERATION.choose("auto", make_call(**supported)) == "splash"
    with pytest.raises(UnsupportedError, match=reason):
        OPERATION.choose("splash", make_call(**supported | changes))


@pytest.mark.slow
def test_heads_padded_for_mosaic_give_the_same_output():
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 8, 2, size)) for i, size in enumerate((192, 192, 128)))
    padded = mosaic._pad_heads(q, k, v)
    assert {x.shape[3] for x in padded} == {256}
    expected = attention(q, k, v, make_request(), backend="reference")
    got = attention(*padded, make_request(), backend="reference")
    np.testing.assert_allclose(got[..., :128], expected, atol=1e-6)
    assert not np.any(got[..., 128:])


@pytest.mark.parametrize("changes", [{}, {"head_dim": 64}, {"request": make_request(window=16)}])
def test_auto_selects_cudnn_if_supported_except_for_short_rows(changes):
    assert OPERATION.choose("auto", make_call(length=192, **changes)) == "cudnn"
    assert OPERATION.choose("auto", make_call(length=64, **changes)) == "triton"


def test_cudnn_serves_segments_only_if_no_other_kernel_takes_them():
    """It would materialize a mask of all queries by all keys."""
    for changes, backend in (
        ({"length": 256}, "mosaic"),
        ({"length": 256, "request": make_request(window=200)}, "mosaic"),
        ({"length": 256, "capability": "8.0"}, "triton"),
        ({"length": 192}, "triton"),
        ({"length": 192, "head_dim": 96}, "triton"),
        ({"length": 190}, "cudnn"),
        ({"length": 256, "head_dim": 192, "value_dim": 128}, "mosaic"),
        ({"length": 256, "head_dim": 192, "value_dim": 128, "is_block": True}, "xla"),
        ({"length": 192, "head_dim": 192, "value_dim": 128}, "xla"),
        ({"length": 192, "head_dim": 192, "value_dim": 128, "is_long": True}, "triton"),
    ):
        assert OPERATION.choose("auto", make_call(has_segments=True, **changes)) == backend, changes


def test_blocks_of_keys_and_offsets_need_kernels_that_support_them():
    for backend in ("cudnn", "splash", "reference"):
        with pytest.raises(UnsupportedError, match="blocks of keys"):
            OPERATION.choose(backend, make_call(is_block=True))
    with pytest.raises(UnsupportedError, match="as many keys as queries"):
        OPERATION.choose("cudnn", make_call(request=make_request(offset=64)))
    assert OPERATION.choose("auto", make_call(length=256, is_block=True)) == "mosaic"


def test_the_choice_is_logged_once_with_its_reason(caplog):
    dispatch._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="maxhydra"):
        OPERATION.choose("auto", make_call(platform="cpu", length=128))
        OPERATION.choose("auto", make_call(platform="cpu", length=128, has_positions=True))
    assert [record.getMessage() for record in caplog.records] == [
        "attention runs on xla (mosaic runs on gpu, not cpu; cudnn runs on gpu, not cpu; triton runs on gpu, not cpu; "
        "splash runs on tpu, not cpu)"
    ]


def test_invalid_calls_are_rejected():
    q, k, v = make_inputs((4, 2))
    with pytest.raises(ValueError, match="needs positions"):
        attention(q[:, :3], k, v, make_request(), backend="xla")
    with pytest.raises(ValueError, match="incompatible shapes"):
        attention(q[:, :, :3], k, v, make_request(), backend="xla")
    with pytest.raises(ValueError, match="both queries and keys"):
        attention(q, k, v, make_request(), backend="xla", q_segments_BT=jnp.ones((BATCH, LENGTH), jnp.int32))
    with pytest.raises(ValueError, match="sinks"):
        attention(q, k, v, make_request(), backend="xla", sinks_N=jnp.zeros(2))
    for changes, reason in (
        ({"causal": False, "window": 3}, "causal"),
        ({"causal": False, "chunk": 3}, "causal"),
        ({"window": 3, "chunk": 3}, "mutually exclusive"),
    ):
        with pytest.raises(ValueError, match=reason):
            make_request(**changes)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [name for name in MASKS if not {"softcap", "chunk", "sinks"} & MASKS[name].keys()])
def test_cudnn_is_called_with_the_options_of_the_request(mask, monkeypatch):
    """The same call of jax.nn, served by its XLA implementation because there is no cuDNN."""
    original = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, implementation, **k: original(*a, **k))
    mask = dict(MASKS[mask])
    arrays = tags(mask)
    (q, k, v), request = make_inputs((4, 2)), make_request(**mask)
    tokens = TokenInfo(arrays.get("q_segments_BT"), arrays.get("kv_segments_BS"), None, None)
    expected = attention(q, k, v, request, backend="reference", **arrays)
    np.testing.assert_allclose(BACKENDS["cudnn"].run(q, k, v, request, tokens, None), expected, atol=2e-6)


INTERPRETED = [
    ("everything", jnp.float32),
    ("chunk_and_more", jnp.float32),
    ("softcap", jnp.bfloat16),
]


@pytest.mark.slow
@pytest.mark.default_cases("everything-float32", "chunk_and_more-float32")
@pytest.mark.parametrize(("mask", "dtype"), INTERPRETED)
def test_triton_interpreted_equals_the_reference_with_gradients(mask, dtype, monkeypatch):
    """With blocks so small that some are fully visible, some partly and some not at all."""
    small = triton.Blocks(triton.Block(8, 4, 4, 1), triton.Block(4, 8, 4, 1), triton.Block(8, 4, 4, 1))
    interpreted = Backend(run=partial(triton.attention, blocks=small, interpret=True))
    monkeypatch.setitem(BACKENDS, "triton", interpreted)
    mask = dict(MASKS[mask])
    arrays = tags(mask, 24)
    inputs, request = make_inputs((4, 2), dtype, length=24), make_request(**mask)
    expected = value_and_grads("reference", inputs, request, **arrays)
    for got, want in zip(value_and_grads("triton", inputs, request, **arrays), expected, strict=True):
        if dtype == jnp.float32:
            np.testing.assert_allclose(got, want, atol=1e-5)
        else:
            assert_near_in_bfloat16(got, want)


@pytest.mark.slow
def test_triton_interpreted_pads_heads_and_values_of_other_sizes(monkeypatch):
    monkeypatch.setitem(BACKENDS, "triton", Backend(run=partial(triton.attention, interpret=True)))
    (q, k, _), (_, _, v) = make_inputs((4, 2), length=64, head_dim=96), make_inputs((4, 2), length=64, head_dim=40)
    request = make_request(softcap=2.0)
    expected = value_and_grads("reference", (q, k, v), request)
    for got, want in zip(value_and_grads("triton", (q, k, v), request), expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.slow
@pytest.mark.default_cases("segments", "chunk", "everything")
@pytest.mark.parametrize("mask", ["window", "softcap", "segments", "chunk", "sinks", "everything"])
def test_the_loss_is_the_same_on_every_backend_that_serves_a_request(mask):
    """For all backends of the capability table that this machine can run; the others raise with the reason."""
    is_on_gpu = jax.default_backend() == "gpu"
    mask, dtype = dict(MASKS[mask]), jnp.bfloat16 if is_on_gpu else jnp.float32
    arrays = tags(mask, 128)
    inputs, request = make_inputs((4, 2), dtype, length=128, head_dim=64), make_request(**mask)
    call = make_call(
        request=request,
        platform=jax.default_backend(),
        capability=capability(),
        length=128,
        dtype=jnp.dtype(dtype).name,
        head_dim=64,
        has_segments="q_segments_BT" in arrays,
        has_sinks="sinks_N" in arrays,
    )
    losses = {}
    for name, row in BACKENDS.items():
        if row.unsupported_reasons(call):
            with pytest.raises(UnsupportedError, match=re.escape(row.unsupported_reasons(call)[0])):
                attention(*inputs, request, backend=name, **arrays)
        else:
            losses[name] = float(jnp.mean(jnp.square(attention(*inputs, request, backend=name, **arrays) * 1.0)))
    assert {"xla", "reference"} <= losses.keys()
    assert is_on_gpu <= ("triton" in losses)
    np.testing.assert_allclose(list(losses.values()), losses["reference"], rtol=1e-2 if is_on_gpu else 1e-5)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason=skips.GPU)
@pytest.mark.parametrize("backend", ["cudnn", "mosaic", "triton"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mask", MASKS)
def test_gpu_backends_equal_the_reference_with_gradients(mask, heads, head_dim, backend):
    mask = dict(MASKS[mask])
    arrays = tags(mask, 256)
    inputs = make_inputs(HEADS[heads], jnp.bfloat16, length=256, head_dim=head_dim)
    request = make_request(**mask)
    call = make_call(
        request=request,
        capability=capability(),
        length=256,
        head_dim=head_dim,
        has_segments="q_segments_BT" in arrays,
        has_sinks="sinks_N" in arrays,
    )
    if BACKENDS[backend].unsupported_reasons(call):
        with pytest.raises(UnsupportedError):
            attention(*inputs, request, backend=backend, **arrays)
        return
    expected = value_and_grads("reference", inputs, request, **arrays)
    for got, want in zip(value_and_grads(backend, inputs, request, **arrays), expected, strict=True):
        assert_near_in_bfloat16(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("queries", [LENGTH, 1])
def test_values_of_another_size_and_a_selection_of_keys(backend, queries):
    """NumPy reference: softmax over the keys that are both earlier and selected."""
    (q, k, v), rng = make_inputs((4, 1)), np.random.default_rng(0)
    q, v = q[:, -queries:], v[..., :5]
    positions = np.broadcast_to(np.arange(LENGTH), (BATCH, LENGTH)).astype(np.int32)
    selected = rng.random((BATCH, queries, LENGTH)) < 0.5
    selected[:, :, 0] = True
    logits = np.einsum("btnh,bsh->bnts", q, k[:, :, 0]) * 0.3
    visible = selected & (positions[:, None, :] <= positions[:, -queries:, None])
    weights = np.exp(np.where(visible[:, None], logits, -np.inf))
    expected = np.einsum("bnts,bsh->btnh", weights / weights.sum(-1, keepdims=True), v[:, :, 0])
    tags = {"q_positions_BT": jnp.asarray(positions[:, -queries:]), "kv_positions_BS": jnp.asarray(positions)}
    out = attention(q, k, v, make_request(), backend=backend, selected_BTS=jnp.asarray(selected), **tags)
    np.testing.assert_allclose(out, expected, atol=2e-6)
