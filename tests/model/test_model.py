"""The decoder: scan, remat, cache and packing do not change its results; dtypes, caps and dropout do as configured."""

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config.schema import model as config
from maxhydra.config.schema.hardware import RULES, Mesh
from maxhydra.layers import Context, DenseCacheSpec
from maxhydra.model import ModelDef, build, parameter_count
from maxhydra.model.block import Remat
from maxhydra.sharding import Sharder, build_mesh, is_axes

VOCAB, BATCH, LENGTH = 48, 2, 12
SINGLE = Sharder.single()
TWO_KINDS = {"local": config.Kind(attention=config.Attention(window=3)), "global": config.Kind()}
# A layer of prefix, two repetitions of (local, global), one layer left over.
MIXED = {"num_layers": 6, "kinds": TWO_KINDS, "prefix": ["global"], "pattern": ["local", "global"]}


def make(dtypes: dict | None = None, **changes) -> ModelDef:
    sizes = {"num_layers": 3, "emb_dim": 16, "mlp_dim": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
    sizes |= {"vocab_size": VOCAB, "context_length": 64, "kinds": {"layer": config.Kind()}}
    dtypes = {"compute": config.Dtype.float32} if dtypes is None else dtypes
    return build(config.Model(**{**sizes, "dtypes": config.Dtypes(**dtypes), **changes}))


def make_context(batch: int = BATCH, length: int = LENGTH, **changes) -> Context:
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    fields = {"positions": positions, "segments": None, "sharder": SINGLE, "cache": None, "dropout_key": None}
    return Context(**{**fields, **changes})


def tokens(batch: int = BATCH, length: int = LENGTH, seed: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, VOCAB)


def weights(model: ModelDef):
    """Weights of about the scale of `init`, drawn by NumPy, which needs no compilation."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), model.shapes)


def hidden_of(model: ModelDef, params, ids: jax.Array, ctx: Context) -> jax.Array:
    return jax.jit(model.hidden)(params, ids, ctx)[0]


def logits_of(model: ModelDef, params, ids: jax.Array, ctx: Context) -> jax.Array:
    return jax.jit(lambda p, i, c: model.logits(p, model.hidden(p, i, c)[0], c.sharder))(params, ids, ctx)


def loss_and_gradients(model: ModelDef, params, ctx: Context | None = None):
    ids = tokens()

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        scores = jax.nn.log_softmax(logits_of(model, params, ids, ctx or make_context()).astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(scores[:, :-1], ids[:, 1:, None], axis=-1))

    return loss(params)


def assert_trees_close(a, b, **tolerance):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def test_params_are_plain_dicts_and_match_shapes_and_axes():
    model = make(**MIXED)
    params = jax.eval_shape(model.init, jax.random.key(0))

    def is_plain(node) -> bool:
        return all(type(key) is str and is_plain(child) for key, child in node.items()) if type(node) is dict else True

    assert is_plain(params)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), params)
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), model.shapes)
    ranks = jax.tree.map(len, model.axes, is_leaf=is_axes)
    assert ranks == jax.tree.map(lambda x: len(x.shape), model.shapes)
    assert sorted(params) == ["embedding", "final_norm", "head", "pattern", "prefix", "remainder"]
    assert [sorted(params[part]) for part in ("prefix", "pattern", "remainder")] == [["0"], ["0", "1"], ["0"]]
    assert params["pattern"]["0"]["mlp"]["down"]["kernel"].shape == (2, 24, 16)
    assert model.axes["pattern"]["1"]["attention"]["query"]["kernel"] == ("layers", "embed", "heads", "head_dim")
    assert model.axes["remainder"]["0"]["attention"]["query"]["kernel"] == ("embed", "heads", "head_dim")


def test_every_axis_has_a_rule():
    used = {name for axes in jax.tree.leaves(make().axes, is_leaf=is_axes) for name in axes}
    assert used <= set(RULES)


@functools.cache
def initial_weights(head: config.Head = config.Head.separate) -> tuple[ModelDef, dict]:
    model = make(num_layers=8, emb_dim=64, mlp_dim=128, vocab_size=512, head=head)
    return model, jax.jit(model.init)(jax.random.key(0))


@pytest.mark.slow
def test_initial_weights_have_the_documented_variance():
    """1 / fan-in; the output projection of a branch is divided by the number of branches, 2 x 8."""
    _, params = initial_weights()
    layer = params["pattern"]["0"]
    fan_in = {("attention", "query"): 64, ("attention", "key"): 64, ("attention", "value"): 64, ("mlp", "gate"): 64}
    fan_in |= {("mlp", "up"): 64, ("attention", "out"): 16 * 16, ("mlp", "down"): 128 * 16}
    for (part, name), variance in fan_in.items():
        kernel = layer[part][name]["kernel"]
        assert np.std(kernel) == pytest.approx(variance**-0.5, rel=0.03), name
        assert len(np.unique(kernel)) > 0.99 * kernel.size
    assert np.std(params["head"]["kernel"]) == pytest.approx(64**-0.5, rel=0.03)
    assert np.std(params["embedding"]["table"]) == pytest.approx(64**-0.5, rel=0.03)
    assert np.all(np.asarray(layer["mlp_norm"]["scale"]) == 1)


@pytest.mark.slow
@pytest.mark.default_cases("Head.tied")
@pytest.mark.parametrize("head", config.Head)
def test_initial_loss_is_that_of_unit_logits(head):
    """Logits of unit variance over V tokens: the mean of log(sum(exp)) is ln V + 1/2, that of the target's logit 0."""
    model, params = initial_weights(head)
    ids = jax.random.randint(jax.random.key(1), (4, 64), 0, 512)
    scores = jax.nn.log_softmax(logits_of(model, params, ids, make_context(4, 64)))
    loss = -jnp.mean(jnp.take_along_axis(scores[:, :-1], ids[:, 1:, None], axis=-1))
    np.testing.assert_allclose(loss, math.log(512) + 0.5, atol=0.12)


@pytest.mark.slow
def test_model_can_be_built_inside_a_trace():
    model = make()
    hidden_of(model, weights(make()), tokens(), make_context())
    assert jax.tree.structure(model.shapes) == jax.tree.structure(jax.eval_shape(model.init, jax.random.key(0)))


@pytest.mark.slow
def test_stacked_layers_equal_layers_applied_one_by_one():
    """A scanned pattern against the same layers as an unrolled prefix, with the same weights."""
    model = make(**MIXED)
    kinds = [*MIXED["prefix"], *MIXED["pattern"] * 2, "local"]
    flat = make(num_layers=6, kinds=TWO_KINDS, prefix=kinds, pattern=["local"])
    params = weights(model)
    layers = [params["prefix"]["0"]]
    for repetition in range(2):
        layers += [jax.tree.map(lambda x, i=repetition: x[i], params["pattern"][place]) for place in "01"]
    layers.append(params["remainder"]["0"])
    ends = {name: params[name] for name in ("embedding", "final_norm", "head")}
    spelled = {**ends, "prefix": {str(index): layer for index, layer in enumerate(layers)}}
    assert jax.tree.structure(spelled) == jax.tree.structure(flat.shapes)
    expected = logits_of(flat, spelled, tokens(), make_context())
    np.testing.assert_allclose(logits_of(model, params, tokens(), make_context()), expected, atol=1e-5)


REMATS = {
    "full": {"policy": config.RematPolicy.full},
    "minimal": {"policy": config.RematPolicy.minimal},
    "save": {"policy": config.RematPolicy.custom, "save": ["query", "context", "mlp_out"]},
    "offload": {"policy": config.RematPolicy.custom, "save": ["context"], "offload": ["mlp_gate", "query"]},
}
VARIANTS = {
    **{name: {"remat": config.Remat(**remat)} for name, remat in REMATS.items()},
    "unroll_all_full": {"scan_unroll": 9, "remat": config.Remat(**REMATS["full"])},
}


@functools.cache
def plain_loss_and_gradients():
    model = make(num_layers=2)
    return loss_and_gradients(model, weights(model))


@pytest.mark.slow
@pytest.mark.default_cases("offload", "unroll_all_full")
@pytest.mark.parametrize("variant", VARIANTS)
def test_remat_and_unrolling_change_neither_loss_nor_gradients(variant):
    model = make(num_layers=2, **VARIANTS[variant])
    loss, gradients = loss_and_gradients(model, weights(model))
    expected, expected_gradients = plain_loss_and_gradients()
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert_trees_close(gradients, expected_gradients, atol=1e-6)


@pytest.mark.parametrize(
    ("remat", "saved"),
    [
        ("full", []),
        ("minimal", ["projections", "mlp_up"]),
        ("save", ["query", "context", "mlp_out"]),
        (None, ["mlp_up"]),
    ],
)
def test_remat_saves_the_residuals_of_its_policy(remat, saved, capsys):
    """By the residuals of a model whose activations differ in their last dimensions."""
    changes = {"num_layers": 1, "prefix": ["layer"], "pattern": []}
    model = make(**changes, remat=config.Remat(**REMATS[remat]) if remat else config.Remat())
    params, shapes = weights(model), {}
    shapes |= {
        "query": f"[{BATCH},{LENGTH},4,4]",
        "projections": f"[{BATCH},{LENGTH},{4 + 2 + 2},4]",
        "context": f"[{BATCH},{LENGTH},4,4]",
        "mlp_up": f"[{BATCH},{LENGTH},24]",
    }
    shapes |= {"mlp_out": f"[{BATCH},{LENGTH},16]"}
    jax.ad_checkpoint.print_saved_residuals(
        lambda params: logits_of(model, params, tokens(), make_context()).sum(), params
    )
    residuals = [line for line in capsys.readouterr().out.splitlines() if "argument" not in line]
    for name, shape in shapes.items():
        if name in saved:
            assert any(shape in line for line in residuals), (name, residuals)
    if remat == "full":
        assert not any(f",{LENGTH},4,4]" in line or f",{LENGTH},24]" in line for line in residuals)


@pytest.mark.slow
def test_minimal_recomputes_neither_the_matmuls_of_experts_nor_their_choice():
    """By the operations of a training step: custom names recompute gate and up, full the order of the rows too."""
    policies = {**REMATS, "routing": {"policy": config.RematPolicy.custom, "save": ["routing"]}}
    kind = config.Kind(feed_forward=config.FeedForward.moe, moe=config.Moe(experts=4, top_k=2))
    found = {}
    for name in ("minimal", "routing", "full"):
        model = make(num_layers=1, kinds={"layer": kind}, remat=config.Remat(**policies[name]))
        program = jax.make_jaxpr(jax.grad(lambda p, model=model: logits_of(model, p, tokens(), make_context()).sum()))
        primitives = [equation.primitive.name for equation in equations(program(model.shapes).jaxpr)]
        found[name] = [primitives.count("ragged_dot_general"), primitives.count("sort")]
    assert np.subtract(found["routing"], found["minimal"]).tolist() == [2, 0]
    assert np.subtract(found["full"], found["minimal"]).tolist() == [2, 1]
    assert found["minimal"][1] == 1


@pytest.mark.slow
@pytest.mark.default_cases("expert")
@pytest.mark.parametrize(("axes", "again"), [({"fsdp": 8}, 0), ({"fsdp": 4, "expert": 2}, 2)], ids=["fsdp", "expert"])
def test_minimal_saves_the_matmuls_of_experts_only_where_their_rows_are_local(axes, again):
    """The buffers of expert parallelism have room for more rows than there are on average."""
    kind = config.Kind(feed_forward=config.FeedForward.moe, moe=config.Moe(experts=4, top_k=2))
    sharder, counts = Sharder(build_mesh(Mesh(**axes), jax.devices()), RULES), []
    for policy in ({"policy": config.RematPolicy.custom, "save": ["mlp_gate", "mlp_up"]}, REMATS["minimal"]):
        model = make(num_layers=1, kinds={"layer": kind}, remat=config.Remat(**policy))
        context = make_context(8, sharder=sharder)
        loss = jax.grad(lambda p, model=model, context=context: logits_of(model, p, tokens(8), context).sum())
        names = [equation.primitive.name for equation in equations(jax.make_jaxpr(loss)(model.shapes).jaxpr)]
        counts.append(names.count("ragged_dot_general"))
    assert counts[1] - counts[0] == again


def equations(jaxpr: jax.extend.core.Jaxpr) -> Iterator[jax.extend.core.JaxprEqn]:
    """All equations of a program and of those that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            if isinstance(value, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr):
                yield from equations(getattr(value, "jaxpr", value))


def test_matrices_are_cast_to_the_compute_dtype_and_norms_are_not():
    """The gradients of stacked matrices leave the scan in bfloat16, half the bytes, and are widened once outside."""
    model = make(dtypes={"compute": config.Dtype.bfloat16})
    program = jax.make_jaxpr(jax.grad(lambda p: logits_of(model, p, tokens(), make_context()).sum()))(model.shapes)
    (backward,) = [e for e in equations(program.jaxpr) if e.primitive.name == "scan" and e.params["reverse"]]
    stacked = {v.aval.shape: str(v.aval.dtype) for v in backward.outvars if v.aval.shape[:1] == (3,)}
    assert stacked[3, 16, 24] == stacked[3, 24, 16] == "bfloat16"
    assert stacked[3, 16] == "float32"


def test_policies_that_save_attention_match_the_kernel_name_in_jax():
    """Its backward pass also needs its residuals; saving only the output would run the forward kernel twice."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    policies = {name: Remat.of(config.Remat(**remat))._saveable() for name, remat in REMATS.items()}
    for primitive in (cudnn._dot_product_attention_fwd_p, cudnn._dot_product_attention_fwd_p_wrapper):
        saved = {name: policy(primitive) is True for name, policy in policies.items()}
        assert saved == {"full": False, "minimal": True, "save": True, "offload": True}


def test_offloaded_activations_are_stored_in_host_memory():
    model = make(num_layers=2, **VARIANTS["offload"])
    program = str(jax.make_jaxpr(lambda p: loss_and_gradients(model, p))(model.shapes))
    for shape in ("4,4", "24"):
        assert f"f32<host>[{BATCH},{LENGTH},{shape}]" in program


@pytest.mark.slow
@pytest.mark.default_cases("mixed")
@pytest.mark.parametrize("shape", [{}, MIXED], ids=["plain", "mixed"])
def test_prefill_and_decode_equal_the_full_forward_pass(shape):
    model = make(**shape)
    params, ids = weights(model), tokens()
    whole = logits_of(model, params, ids, make_context())
    advance = jax.jit(model.hidden)
    cache, parts = model.empty_cache(DenseCacheSpec(BATCH, LENGTH + 3)), []
    for start, stop in [(0, 7), *((i, i + 1) for i in range(7, LENGTH))]:
        positions = jnp.broadcast_to(jnp.arange(start, stop), (BATCH, stop - start))
        hidden, cache = advance(params, ids[:, start:stop], make_context(positions=positions, cache=cache))
        parts.append(model.logits(params, hidden, SINGLE))
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=1e-4)


@pytest.mark.slow
def test_rows_of_different_length_decode_as_if_alone():
    """Prompts of 7 and 4 tokens, padded to 7, then two steps; each row against its own forward pass."""
    model, lengths = make(), np.array([7, 4])
    params, ids = weights(model), tokens()
    cache = model.empty_cache(DenseCacheSpec(BATCH, LENGTH))
    segments = (jnp.arange(7)[None] < lengths[:, None]).astype(jnp.int32)
    advance = jax.jit(model.hidden)
    _, cache = advance(params, ids[:, :7], make_context(length=7, segments=segments, cache=cache))
    for step in range(2):
        places = jnp.asarray(lengths[:, None] + step)
        new = jnp.take_along_axis(ids, places, axis=1)
        hidden, cache = advance(params, new, make_context(positions=places, cache=cache))
    for row, length in enumerate(lengths + 2):
        alone = hidden_of(model, params, ids[row : row + 1, :length], make_context(1, int(length)))
        np.testing.assert_allclose(hidden[row, 0], alone[0, -1], atol=1e-5)


@pytest.mark.slow
def test_packed_sequences_equal_separate_ones():
    model = make(**MIXED)
    params, lengths = weights(model), [5, 4]
    parts = [tokens(1, n, seed=n) for n in lengths]
    packed = jnp.concatenate([*parts, jnp.zeros((1, 3), jnp.int32)], axis=1)
    positions = jnp.concatenate([jnp.arange(n) for n in (*lengths, 3)])[None]
    segments = jnp.array([[1] * 5 + [2] * 4 + [0] * 3])
    hidden = hidden_of(model, params, packed, make_context(positions=positions, segments=segments))
    for part, start in zip(parts, (0, 5), strict=True):
        n = part.shape[1]
        alone = hidden_of(model, params, part, make_context(1, n))
        np.testing.assert_allclose(hidden[0, start : start + n], alone[0], atol=1e-5)


def test_tied_head_reads_the_embedding():
    model = make(head=config.Head.tied)
    params = weights(model)
    assert "head" not in params
    hidden = jax.random.normal(jax.random.key(1), (1, 2, 16))
    expected = np.asarray(hidden) @ np.asarray(params["embedding"]["table"]).T
    np.testing.assert_allclose(model.logits(params, hidden, SINGLE), expected, atol=1e-5)


def test_logits_are_soft_capped():
    plain, capped = make(), make(logit_softcap=0.5)
    params, hidden = weights(plain), 3 * jax.random.normal(jax.random.key(1), (1, 2, 16))
    expected = 0.5 * np.tanh(np.asarray(plain.logits(params, hidden, SINGLE)) / 0.5)
    np.testing.assert_allclose(capped.logits(params, hidden, SINGLE), expected, atol=1e-6)


@pytest.mark.slow
def test_attention_soft_cap_and_scale_reach_the_kernel():
    params = weights(make())
    outputs = []
    for changes in ({}, {"softcap": 0.1}, {"scale": 3.0}, {"window": 2}):
        model = make(kinds={"layer": config.Kind(attention=config.Attention(**changes))})
        outputs.append(np.asarray(hidden_of(model, params, tokens(), make_context())))
    for other in outputs[1:]:
        assert np.abs(other - outputs[0]).max() > 1e-3


def test_a_token_outside_the_vocabulary_is_not_hidden():
    model = make()
    hidden = hidden_of(model, weights(model), jnp.full((1, 2), VOCAB), make_context(1, 2))
    assert np.isnan(hidden).all()


@pytest.mark.slow
def test_dropout_needs_a_key_and_a_rate():
    params = weights(make())
    key = jax.random.key(5)
    plain = hidden_of(make(), params, tokens(), make_context())
    no_rate = hidden_of(make(), params, tokens(), make_context(dropout_key=key))
    no_key = hidden_of(make(dropout=0.2), params, tokens(), make_context())
    np.testing.assert_array_equal(no_rate, plain)
    np.testing.assert_array_equal(no_key, plain)
    dropped = [hidden_of(make(dropout=0.2), params, tokens(), make_context(dropout_key=key)) for _ in range(2)]
    np.testing.assert_array_equal(*dropped)
    assert np.abs(dropped[0] - plain).max() > 0.1


@pytest.mark.slow
def test_dropout_differs_between_layers_and_is_the_same_unrolled():
    params = weights(make())
    ctx = make_context(dropout_key=jax.random.key(5))
    scanned = hidden_of(make(dropout=0.5), params, tokens(), ctx)
    unrolled = hidden_of(make(dropout=0.5, scan_unroll=3), params, tokens(), ctx)
    np.testing.assert_allclose(scanned, unrolled, atol=1e-5)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ({}, ("float32", "bfloat16", "float32")),
        ({"weights": "bfloat16", "compute": "float16", "logits": "bfloat16"}, ("bfloat16", "float16", "bfloat16")),
        ({"compute": "float32", "logits": "float16"}, ("float32", "float32", "float16")),
    ],
)
def test_dtypes_follow_their_settings(dtypes, expected):
    model = make(dtypes={role: config.Dtype(name) for role, name in dtypes.items()})
    weights_dtype, compute_dtype, logits_dtype = expected
    ctx = make_context()
    params = jax.eval_shape(model.init, jax.random.key(0))
    hidden, _ = jax.eval_shape(model.hidden, params, tokens(), ctx)
    scores, gradients = jax.eval_shape(
        lambda p, h: (model.logits(p, h, SINGLE), jax.grad(lambda p: model.hidden(p, tokens(), ctx)[0].sum())(p)),
        params,
        hidden,
    )
    assert {leaf.dtype.name for leaf in jax.tree.leaves((params, gradients))} == {weights_dtype}
    assert (hidden.dtype.name, scores.dtype.name) == (compute_dtype, logits_dtype)
    assert model.empty_cache(DenseCacheSpec(1, 2))["pattern"][0].key_LBSKH.dtype.name == compute_dtype


def test_softmax_dtype_reaches_the_kernel():
    def products(softmax: config.Dtype) -> str:
        model = make(dtypes={"softmax": softmax})
        return str(jax.make_jaxpr(lambda p: model.hidden(p, tokens(), make_context())[0])(model.shapes))

    attention_logits = f"[{BATCH},2,2,{LENGTH},{LENGTH}] = exp"
    assert f"f32{attention_logits}" in products(config.Dtype.float32)
    assert f"bf16{attention_logits}" in products(config.Dtype.bfloat16)


@pytest.mark.slow
def test_bfloat16_is_close_to_float32():
    params = weights(make())
    exact = logits_of(make(), params, tokens(), make_context())
    near = logits_of(make(dtypes={}), params, tokens(), make_context())
    np.testing.assert_allclose(near, exact, atol=0.15)
    assert np.abs(near - exact).max() > 1e-4


@pytest.mark.slow
def test_program_size_is_independent_of_depth():
    def program(depth: int) -> int:
        model = make(num_layers=depth)
        lowered = jax.jit(lambda p: loss_and_gradients(model, p)).lower(model.shapes)
        return lowered.as_text().count("\n")

    assert program(64) == program(4)


def test_shapes_of_a_large_model_allocate_nothing():
    giant = {"num_layers": 126, "emb_dim": 16384, "mlp_dim": 53248, "num_heads": 128, "num_kv_heads": 8}
    model = make(**giant, head_dim=128, vocab_size=128256)
    assert parameter_count(model.shapes) == 405_853_388_800
    assert jax.tree.structure(model.axes, is_leaf=is_axes) == jax.tree.structure(model.shapes)


@pytest.mark.slow
def test_sharded_output_equals_one_device():
    """Eight devices: the batch over two, the sequence over two, heads, feed-forward and vocabulary over two."""
    model = make(num_layers=2)
    mesh = Mesh(fsdp=2, sequence=2, tensor=2)
    sharder = Sharder(build_mesh(mesh, jax.devices()[:8]), mesh.rules)
    placed = jax.device_put(weights(model), sharder.tree(model.axes))
    loss, gradients = loss_and_gradients(model, placed, make_context(sharder=sharder))
    expected, expected_gradients = plain_loss_and_gradients()
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert_trees_close(gradients, expected_gradients, atol=1e-6)


@pytest.mark.slow
def test_gradients_of_cast_weights_equal_those_of_the_weights():
    """In the compute dtype for the layers' matrices, unchanged otherwise; a subset of the weights is cast alike."""
    model = make(dtypes={"compute": config.Dtype.bfloat16}, scan_unroll=3)
    params = weights(model)
    cast = model.cast(params)
    narrow = jax.tree.map(lambda leaf: leaf.dtype == jnp.bfloat16, cast)
    block, others = narrow.pop("pattern")["0"], jax.tree.leaves(narrow)
    assert not any(others) and not block["attention_norm"]["scale"] and not block["mlp_norm"]["scale"]
    assert all(jax.tree.leaves([block["attention"], block["mlp"]]))
    _, expected = loss_and_gradients(model, params)
    _, found = loss_and_gradients(model, cast)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.astype(b.dtype), b), found, expected)
    part = {"pattern": {"0": {"mlp": params["pattern"]["0"]["mlp"]}}}
    jax.tree.map(np.testing.assert_array_equal, model.cast(part)["pattern"]["0"]["mlp"], cast["pattern"]["0"]["mlp"])
