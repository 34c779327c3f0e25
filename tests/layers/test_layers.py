"""Each layer against its formula in NumPy."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxhydra.config import ConfigError
from maxhydra.config.schema import model as config
from maxhydra.kernels.matmul import Layout, project, widening_einsum
from maxhydra.layers import (
    Attention,
    AttentionSpec,
    Context,
    DenseCacheSpec,
    Dtypes,
    MatmulSpec,
    Mlp,
    MlpSpec,
    ParamBuilder,
    RMSNorm,
    dropout,
)
from maxhydra.layers.attention_heads import QueryTemperature, scale_queries
from maxhydra.layers.mlp import ACTIVATIONS, gated
from maxhydra.layers.norm import LayerNorm
from maxhydra.layers.rope import Rotation, frequencies, rotate
from maxhydra.sharding import Sharder

FLOAT32 = {"compute": config.Dtype.float32}


def make_model(kind: config.Kind | None = None, dtypes: dict | None = None, **changes) -> config.Model:
    sizes = {"num_layers": 3, "emb_dim": 24, "mlp_dim": 40, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6}
    sizes |= {"vocab_size": 50, "context_length": 64, "kinds": {"layer": kind or config.Kind()}}
    return config.Model(**{**sizes, "dtypes": config.Dtypes(**(FLOAT32 if dtypes is None else dtypes)), **changes})


def maker(dtype: str = "float32", layers: int | None = None, compute: str = "float32") -> ParamBuilder:
    matmul_spec = MatmulSpec(compute=jnp.dtype(compute), layout=Layout.plain)
    return ParamBuilder(jax.random.key(0), dtype=jnp.dtype(dtype), layers=layers, matmul_spec=matmul_spec)


def make_context(batch: int, length: int, **changes) -> Context:
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    fields = {"positions": positions, "segments": None, "sharder": Sharder.single(), "cache": None, "dropout_key": None}
    return Context(**{**fields, **changes})


def test_rms_norm_divides_by_the_root_mean_square():
    x = np.random.default_rng(0).normal(size=(2, 3, 24)).astype(np.float32)
    norm = RMSNorm(24, eps=1e-2, dtypes=Dtypes.of(config.Dtypes(**FLOAT32)), make=maker())
    norm.scale[...] = jnp.arange(24.0)
    expected = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True) + 1e-2) * np.arange(24)
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, rtol=1e-5)


def test_rms_norm_in_half_precision_does_not_overflow():
    dtypes = Dtypes.of(config.Dtypes(compute=config.Dtype.float16))
    out = RMSNorm(8, eps=1e-5, dtypes=dtypes, make=maker())(jnp.full((1, 8), 1000, jnp.float16))
    assert out.dtype == jnp.float16
    np.testing.assert_allclose(out, 1, rtol=1e-3)


def test_rope_rotates_pairs_of_the_two_halves_as_complex_numbers():
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 8))
    positions = np.array([[0, 1, 2, 3, 4], [7, 100, 3000, 0, 1]])
    rates = frequencies(config.Rope(theta=100.0), 8)
    np.testing.assert_allclose(rates, 100.0 ** (-np.arange(4) / 4))
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * positions[..., None, None] * np.array(rates))
    rotation = Rotation.of(config.Rope(theta=100.0), 8)
    out = rotate(jnp.asarray(x, jnp.float32), jnp.asarray(positions), rotation)
    np.testing.assert_allclose(out, np.concatenate([turned.real, turned.imag], axis=-1), atol=2e-3)
    np.testing.assert_allclose(out[0], np.concatenate([turned.real, turned.imag], axis=-1)[0], atol=1e-5)


def test_rope_none_has_no_frequencies():
    assert frequencies(config.Rope(kind=config.RopeKind.none), 8) is None


def test_partial_interleaved_rope_rotates_neighbouring_pairs():
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 12))
    positions = np.array([[0, 1, 2, 3, 4], [7, 9, 3, 0, 1]])
    rope = config.Rope(theta=100.0, share=0.67, pairs=config.Pairs.neighbours)
    rates = 100.0 ** (-np.arange(4) / 4)
    turned = (x[..., :8:2] + 1j * x[..., 1:8:2]) * np.exp(1j * positions[..., None, None] * rates)
    out = rotate(jnp.asarray(x, jnp.float32), jnp.asarray(positions), Rotation.of(rope, 12))
    np.testing.assert_allclose(out[..., :8], np.concatenate([turned.real, turned.imag], axis=-1), atol=1e-5)
    np.testing.assert_array_equal(out[..., 8:], x[..., 8:].astype(np.float32))


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_interpolates_by_wavelength(truncate):
    """The ramp of Peng et al. (2023), between pairs that rotate 32 times and once over the original context."""
    size, theta, context, factor = 64, 10000.0, 2048, 4.0
    rope = config.Rope(kind=config.RopeKind.yarn, factor=factor, original_context=context, truncate=truncate)
    rotation = Rotation.of(rope, size)
    plain = theta ** (-np.arange(0, size, 2) / size)
    low, high = (size * math.log(context / (beta * 2 * math.pi)) / (2 * math.log(theta)) for beta in (32, 1))
    low, high = (math.floor(low), math.ceil(high)) if truncate else (low, high)
    ramp = np.clip((np.arange(size // 2) - low) / (high - low), 0, 1)
    np.testing.assert_allclose(rotation.frequencies, plain / factor * ramp + plain * (1 - ramp), rtol=1e-12)
    assert rotation.amplitude == pytest.approx(0.1 * math.log(factor) + 1)


def test_layer_norm_subtracts_the_mean_and_adds_a_bias():
    x = np.random.default_rng(0).normal(3.0, size=(2, 3, 24)).astype(np.float32)
    norm = LayerNorm(24, eps=1e-2, dtypes=Dtypes.of(config.Dtypes(**FLOAT32)), make=maker())
    norm.scale[...], norm.bias[...] = jnp.arange(24.0), jnp.arange(24.0) ** 2
    spread = np.sqrt(x.var(axis=-1, keepdims=True, dtype=np.float64) + 1e-2)
    expected = (x - x.mean(axis=-1, keepdims=True)) / spread * np.arange(24) + np.arange(24) ** 2
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("offset", [0, 1])
def test_query_temperature_grows_with_log_position(offset):
    positions = np.array([[0, 6, 7, 8, 100]])
    factors = 1 + 0.1 * np.log(np.floor((positions + offset) / 8) + 1)
    out = scale_queries(jnp.ones((1, 5, 2, 4)), jnp.asarray(positions), QueryTemperature(8, 0.1, offset))
    np.testing.assert_allclose(out, np.broadcast_to(factors[..., None, None], out.shape), rtol=1e-6)
    assert out[0, 0, 0, 0] == 1 and (out[0, 2, 0, 0] > 1) == (offset == 1) and out[0, 3, 0, 0] > 1


def test_llama3_rope_keeps_short_wavelengths_scales_long_ones_and_blends():
    rope = {"theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 8192}
    plain = np.array(frequencies(config.Rope(theta=500000.0), 128))
    scaled = np.array(frequencies(config.Rope(kind=config.RopeKind.llama3, **rope), 128))
    wavelength = 2 * np.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192 / 1
    smooth = (8192 / wavelength - 1) / (4 - 1)
    expected = np.where(short, plain, np.where(long, plain / 8, (1 - smooth) * plain / 8 + smooth * plain))
    assert short.any() and long.any() and (~short & ~long).any()
    np.testing.assert_allclose(scaled, expected, rtol=1e-12)


@pytest.mark.parametrize("activation", config.Activation)
def test_mlp_gates(activation):
    model = make_model(config.Kind(mlp=config.Mlp(dim=16, activation=activation)))
    mlp = Mlp(MlpSpec.of(model, model.kinds["layer"]), maker())
    x = np.random.default_rng(0).normal(size=(2, 3, 24))
    erf = np.vectorize(math.erf)
    functions = {
        "silu": lambda a: a / (1 + np.exp(-a)),
        "gelu": lambda a: a * (1 + erf(a / np.sqrt(2))) / 2,
        "gelu_tanh": lambda a: a * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3))) / 2,
        "relu": lambda a: np.maximum(a, 0),
        "relu_squared": lambda a: np.maximum(a, 0) ** 2,
        "sigmoid": lambda a: 1 / (1 + np.exp(-a)),
        "tanh": np.tanh,
        "linear": lambda a: a,
    }
    gate, up, down = (np.asarray(projection.kernel[...], np.float64) for projection in (mlp.gate, mlp.up, mlp.down))
    assert gate.shape == (24, 16)
    expected = functions[activation.value](x @ gate) * (x @ up) @ down
    np.testing.assert_allclose(mlp(jnp.asarray(x, jnp.float32), make_context(2, 3)).out_BTD, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("activation", list(config.Activation))
def test_gate_has_the_gradients_of_its_formula(activation):
    gate, up, d_out = np.random.default_rng(0).normal(size=(3, 5, 7)).astype(np.float32)
    expected = jax.vjp(lambda g, u: ACTIVATIONS[activation](g) * u, gate, up)[1](d_out)
    got = jax.vjp(partial(gated, activation), gate, up)[1](d_out)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in (gate, up, d_out)]
    got = jax.vjp(partial(gated, activation), *narrow[:2])[1](narrow[2])
    assert {g.dtype for g in got} == {jnp.dtype("bfloat16")}
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_of_float32_matmuls_have_the_dtype_of_their_inputs(dtype):
    """The gradient is rounded once, so that no matmul of the backward pass runs in float32."""
    a, b = np.random.default_rng(0).normal(size=(2, 6, 6)).astype(np.float32)
    cotangent = np.random.default_rng(1).normal(size=(6, 6)).astype(np.float32)

    def matmul(a, b):
        return widening_einsum("ij,jk->ik", a, b, dtype="float32")

    def gradients(a, b):
        return jax.vjp(matmul, a, b)[1](cotangent)

    narrow = [jnp.asarray(x, dtype) for x in (a, b)]
    assert matmul(*narrow).dtype == jnp.float32
    matmuls = [e for e in jax.make_jaxpr(gradients)(*narrow).eqns if e.primitive.name == "dot_general"]
    assert {str(v.aval.dtype) for e in matmuls[1:] for v in e.invars} <= {dtype}
    for got, expected in zip(gradients(*narrow), (cotangent @ b.T, a.T @ cotangent), strict=True):
        assert np.linalg.norm(got.astype(np.float32) - expected) < 1e-2 * np.linalg.norm(expected)


def test_attention_resolves_overrides_of_a_layer_kind():
    own = config.Attention(num_heads=6, num_kv_heads=3, head_dim=8, window=5, softcap=9.0, scale=0.5)
    spec = AttentionSpec.of(make_model(), config.Kind(attention=own))
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (6, 3, 8)
    assert (spec.window, spec.softcap, spec.scale) == (5, 9.0, 0.5)
    plain = AttentionSpec.of(make_model(), config.Kind())
    assert (plain.num_heads, plain.num_kv_heads, plain.head_dim) == (4, 2, 6)
    assert (plain.window, plain.softcap, plain.scale) == (None, None, 6**-0.5)


@pytest.mark.slow
def test_unsupported_backend_is_a_config_error():
    model = make_model(kernels=config.ModelKernels(attention=config.AttentionBackend.cudnn))
    layer = Attention(AttentionSpec.of(model, model.kinds["layer"]), maker())
    with pytest.raises(ConfigError) as error:
        layer(jnp.zeros((1, 4, 24)), make_context(1, 4))
    problem = error.value.problems[0]
    assert (problem.path, problem.value, problem.accepted) == (
        "model.kernels.attention",
        "cudnn",
        "auto, xla, reference",
    )
    assert "float32" in problem.reason


def test_init_variance_keeps_activations_at_unit_scale():
    make = maker()
    wide = make.projection("out", (20, 30), (400,), ("heads", "head_dim", "embed"), scale=0.5).kernel
    assert wide.shape == (20, 30, 400)
    np.testing.assert_allclose(np.std(wide[...]), 0.5 / np.sqrt(600), rtol=0.01)
    again = make.projection("out", (20, 30), (400,), ("heads", "head_dim", "embed"), scale=0.5).kernel
    assert not np.any(np.asarray(wide[...]) == np.asarray(again[...]))


def test_stacked_weights_differ_between_layers():
    weight = maker(layers=3).projection("query", (8,), (4, 4), ("embed", "heads", "head_dim"), scale=1.0).kernel
    assert weight.shape == (3, 8, 4, 4)
    assert weight.get_metadata("axes") == ("layers", "embed", "heads", "head_dim")
    assert len(np.unique(weight[...])) == weight[...].size


@pytest.mark.slow
def test_cache_writes_at_positions_and_skips_padding():
    rng = np.random.default_rng(0)
    key, value = (jnp.asarray(rng.normal(size=(2, 3, 2, 4)), jnp.float32) for _ in range(2))
    whole = DenseCacheSpec(2, 6).keys_and_values(layers=3, kv_heads=2, head_dim=4, dtype=jnp.dtype("float32"))
    cache = whole.at(1).insert(key, value, jnp.array([[0, 1, 2], [0, -1, -1]]), None)
    cache = cache.insert(key[:, :1], value[:, :1], jnp.array([[3], [1]]), None)
    whole = whole.with_layer(cache)
    assert [bool(np.any(whole.at(layer).key_BSKH)) for layer in range(3)] == [False, True, False]
    cache = whole.at(1)
    np.testing.assert_array_equal(cache.length_B, [4, 2])
    positions_BS = cache.read(None, jnp.dtype("float32")).positions_BS
    np.testing.assert_array_equal(positions_BS, [[0, 1, 2, 3, -1, -1], [0, 1, -1, -1, -1, -1]])
    np.testing.assert_array_equal(cache.key_BSKH[0, :4], key[0, [0, 1, 2, 0]])
    np.testing.assert_array_equal(cache.value_BSKH[1, :2], value[1, [0, 0]])
    assert not np.any(cache.key_BSKH[1, 2:])


def test_dropout_is_unbiased_and_drops_the_given_fraction():
    x = jnp.ones((200, 500))
    out = np.asarray(dropout(x, jax.random.key(0), rate=0.3))
    np.testing.assert_allclose((out == 0).mean(), 0.3, atol=0.01)
    np.testing.assert_allclose(out.mean(), 1.0, atol=0.01)
    np.testing.assert_allclose(out[out != 0], 1 / 0.7, rtol=1e-6)


def test_dropout_without_key_or_rate_is_the_identity():
    x = jnp.arange(6.0)
    assert dropout(x, None, rate=0.5) is x
    assert dropout(x, jax.random.key(0), rate=0.0) is x


def test_context_is_a_tree_with_a_static_sharder():
    ctx = make_context(1, 3, dropout_key=jax.random.key(0))
    leaves, structure = jax.tree.flatten(ctx)
    assert len(leaves) == 2
    assert jax.tree.unflatten(structure, leaves).sharder == Sharder.single()
    one, other = ctx.at_layer(1, None, None), ctx.at_layer(2, None, None)
    assert not np.array_equal(jax.random.key_data(one.key(0)), jax.random.key_data(other.key(0)))
    assert not np.array_equal(jax.random.key_data(one.key(0)), jax.random.key_data(one.key(1)))


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_weight_and_compute_dtypes_are_independent(weights):
    model = make_model(dtypes={"weights": config.Dtype(weights), "compute": config.Dtype.float16})
    layer = Attention(AttentionSpec.of(model, model.kinds["layer"]), maker(weights, compute="float16"))
    out, *_ = layer(jnp.zeros((1, 4, 24), jnp.float16), make_context(1, 4))
    assert out.dtype == jnp.float16
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(layer))} == {weights}
    assert layer.empty_cache(DenseCacheSpec(1, 4), 1).key_LBSKH.dtype == jnp.float16


@pytest.mark.slow
@pytest.mark.parametrize(
    "equation", ["BTD,DF->BTF", "BTD,DNH->BTNH", "BTNH,NHD->BTD", "...D,VD->...V", "...D,DV->...V"]
)
@pytest.mark.parametrize("layout", [Layout.outputs_first, Layout.joined])
@pytest.mark.parametrize("rows", [(1, 1), (2, 3)])
def test_weight_layout_does_not_change_a_matmul(equation, layout, rows):
    sizes = {"B": rows[0], "T": rows[1], "D": 8, "F": 5, "N": 4, "H": 6, "V": 7}
    of_x, of_weight = equation.split("->")[0].split(",")
    rng = np.random.default_rng(0)
    x = rng.normal(size=[sizes[name] for name in of_x.replace("...", "BT")]).astype(np.float32)
    weight = rng.normal(size=[sizes[name] for name in of_weight]).astype(np.float32)
    for dtype in (None, jnp.float32):
        found = project(equation, jnp.asarray(x), jnp.asarray(weight), layout=layout, dtype=dtype)
        np.testing.assert_allclose(found, np.einsum(equation, x, weight), atol=1e-5)
