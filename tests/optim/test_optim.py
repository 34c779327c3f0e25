"""Optimizers against references that update one layer's matrix at a time: NumPy, or optax on single matrices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.schema.model import Dtype
from maxhydra.config.schema.optimizer import MomentFormat, OptimizerKind, Schedule, ScheduleKind
from maxhydra.config.schema.optimizer import Optimizer as Config
from maxhydra.optim import build, state_axes
from maxhydra.sharding import is_axes

LAYERS, EMBED, HEADS, HEAD_DIM, MLP, VOCAB = 3, 8, 2, 4, 12, 16
# Rows and columns of equal length (embed = heads x head_dim), and a layer axis that is neither longest nor shortest.
AXES = {
    "embed": {"table": ("vocab", "embed")},
    "layers": {
        "0": {
            "attention": {
                "query": ("layers", "embed", "heads", "head_dim"),
                "output": ("layers", "heads", "head_dim", "embed"),
                "bias": ("layers", "heads", "head_dim"),
            },
            "mlp": {"up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed")},
            "norm": {"scale": ("layers", "norm")},
        }
    },
    "norm": {"scale": ("norm",)},
    "head": {"kernel": ("embed", "vocab")},
}
SIZES = {
    "layers": LAYERS,
    "embed": EMBED,
    "heads": HEADS,
    "head_dim": HEAD_DIM,
    "mlp": MLP,
    "vocab": VOCAB,
    "norm": EMBED,
}
SHAPES = jax.tree.map(
    lambda axes: jax.ShapeDtypeStruct(tuple(SIZES[a] for a in axes), jnp.float32), AXES, is_leaf=is_axes
)
STEPS = 5
FIELDS = {
    OptimizerKind.adamw: {"b1": 0.9, "b2": 0.95, "eps": 1e-8},
    OptimizerKind.adafactor: {"b2_decay": 0.8, "eps": 1e-30, "min_dim_factored": 4},
    OptimizerKind.sgd: {"momentum": 0.9},
    OptimizerKind.muon: {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "momentum": 0.95, "newton_schulz_steps": 5},
    OptimizerKind.lion: {"b1": 0.9, "b2": 0.99},
    OptimizerKind.soap: {
        "b1": 0.9,
        "b2": 0.95,
        "eps": 1e-8,
        "precondition_every": 2,
        # Sides of length MLP are not rotated.
        "precondition_max_dim": 10,
    },
}
# schedule_free is in test_averages.py.
KINDS = pytest.mark.parametrize("kind", [kind for kind in OptimizerKind if kind in FIELDS], ids=lambda kind: kind.value)


def config(kind=OptimizerKind.adamw, **fields):
    schedule = Schedule(kind=ScheduleKind.linear, warmup_steps=2, final_fraction=0.1)
    return Config(kind=kind, **{"learning_rate": 0.01, "schedule": schedule, **FIELDS[kind], **fields})


def learning_rate(step):
    """The schedule above, computed manually: 1/3, 2/3, 1, then linear to 0.1 at the last of STEPS steps."""
    return 0.01 * [1 / 3, 2 / 3, 1, 0.55, 0.1][step]


def random_tree(seed, scale=1.0):
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda s: jnp.asarray(scale * random.standard_normal(s.shape), jnp.float32), SHAPES)


def flat(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


def run(optimizer, params, steps=STEPS):
    """Parameters after `steps` jitted updates on fixed random gradients."""
    update = jax.jit(optimizer.transform.update)
    state = optimizer.transform.init(params)
    for step in range(steps):
        updates, state = update(random_tree(100 + step, scale=0.1 * (step + 1)), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def as_layers(path, array):
    """The matrices (or vectors) of a parameter, one per layer."""
    axes = AXES
    for key in path.split("/"):
        axes = axes[key]
    layers = list(array) if axes[0] == "layers" else [array]
    unstacked = [a for a in axes if a != "layers"]
    if unstacked == ["embed", "heads", "head_dim"]:
        return [layer.reshape(EMBED, -1) for layer in layers]
    if unstacked == ["heads", "head_dim", "embed"]:
        return [layer.reshape(-1, EMBED) for layer in layers]
    if unstacked == ["heads", "head_dim"]:
        return [layer.reshape(-1) for layer in layers]
    return layers


def reference(kind, params, *, decay, clip, frozen=(), steps=STEPS):
    """Plain loops over parameters and layers: NumPy, or optax on single matrices."""
    params = {path: [np.asarray(p, np.float32) for p in as_layers(path, p)] for path, p in flat(params).items()}
    memory = {}
    for step in range(steps):
        grads = flat(random_tree(100 + step, scale=0.1 * (step + 1)))
        grads = {path: g for path, g in grads.items() if path not in frozen}
        norm = np.sqrt(sum(np.sum(np.square(g.astype(np.float64))) for g in grads.values()))
        for path, grad in grads.items():
            for layer, g in enumerate(as_layers(path, grad * min(1, clip / norm))):
                p = params[path][layer]
                u, memory[path, layer] = RULES[kind](path, g, p, memory.get((path, layer)), step)
                wd = 0 if re.search("norm|bias", path) else decay
                params[path][layer] = p - learning_rate(step) * (u + wd * p)
    return params


def adam(path, g, p, memory, step):
    m, v = memory or (0, 0)
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
    return m / (1 - 0.9 ** (step + 1)) / (np.sqrt(v / (1 - 0.95 ** (step + 1))) + 1e-8), (m, v)


def lion(path, g, p, memory, step):
    m = 0 if memory is None else memory
    return np.sign(0.9 * m + 0.1 * g), 0.99 * m + 0.01 * g


def sgd(path, g, p, memory, step):
    m = g + 0.9 * (0 if memory is None else memory)
    return m, m


def by_optax(transform):
    update = jax.jit(transform.update)

    def rule(path, g, p, memory, step):
        descent, memory = update(jnp.asarray(g), memory or transform.init(jnp.asarray(p)), jnp.asarray(p))
        return -np.asarray(descent), memory

    return rule


adafactor = by_optax(optax.adafactor(learning_rate=None, min_dim_size_to_factor=4, decay_rate=0.8, eps=1e-30))
orthogonalize = by_optax(optax.chain(optax.contrib.scale_by_muon(beta=0.95, ns_steps=5, eps=1e-8), optax.scale(-1)))


def is_for_adamw(path):
    return path.startswith(("embed", "head")) or "norm" in path or "bias" in path


def muon(path, g, p, memory, step):
    if is_for_adamw(path):
        return adam(path, g, p, memory, step)
    u, memory = orthogonalize(path, g, p, memory, step)
    return 0.2 * np.sqrt(max(p.shape)) * u, memory


def soap(path, g, p, memory, step):
    """The algorithm of the paper, and the first step of the authors' implementation, which has no update."""
    if is_for_adamw(path):
        return adam(path, g, p, memory, step)
    g = g.astype(np.float64)
    moments, bases, m, v = memory or ([0.0, 0.0], [np.eye(size) for size in g.shape], 0.0, np.zeros(g.shape))
    rows, columns = bases
    u = np.zeros(g.shape)
    if step:
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * (rows.T @ g @ columns) ** 2
        rotated = rows.T @ m @ columns / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)
        u = rows @ rotated @ columns.T
    moments = [0.95 * old + 0.05 * new for old, new in zip(moments, (g @ g.T, g.T @ g), strict=True)]
    for axis in (0, 1):
        moment, basis = moments[axis], bases[axis]
        if len(basis) > 10:
            continue
        if step == 0:
            bases[axis] = np.linalg.eigh(moment)[1][:, ::-1]
        elif step % 2 == 0:
            order = np.argsort(-np.diag(basis.T @ moment @ basis))
            bases[axis] = np.linalg.qr(moment @ basis[:, order])[0]
            v = np.take(v, order, axis=axis)
    return u, (moments, list(bases), m, v)


RULES = {
    OptimizerKind.adamw: adam,
    OptimizerKind.adafactor: adafactor,
    OptimizerKind.sgd: sgd,
    OptimizerKind.muon: muon,
    OptimizerKind.lion: lion,
    OptimizerKind.soap: soap,
}


def assert_equal_layers(params, expected):
    for path, array in flat(params).items():
        for layer, (layer_params, want) in enumerate(zip(as_layers(path, array), expected[path], strict=True)):
            np.testing.assert_allclose(layer_params, want, rtol=2e-5, atol=2e-6, err_msg=f"{path} of layer {layer}")


@pytest.mark.slow
@KINDS
def test_five_updates_equal_the_reference(kind):
    params = random_tree(0)
    updated, _ = run(build(config(kind, weight_decay=0.1), steps=STEPS, shapes=SHAPES, axes=AXES), params)
    assert_equal_layers(updated, reference(kind, params, decay=0.1, clip=1.0))


@pytest.mark.slow
@pytest.mark.default_cases("adamw", "adafactor")
@KINDS
def test_no_clipping_and_no_decay(kind):
    params = random_tree(1)
    optimizer = build(config(kind, weight_decay=0.0, clip_norm=None), steps=STEPS, shapes=SHAPES, axes=AXES)
    assert_equal_layers(run(optimizer, params)[0], reference(kind, params, decay=0.0, clip=np.inf))


@pytest.mark.slow
@KINDS
def test_frozen_parameters_are_unchanged_and_have_no_state(kind):
    params = random_tree(2)
    trainable = ["attention/(query|output)", "^head"]
    optimizer = build(config(kind, trainable=trainable), steps=STEPS, shapes=SHAPES, axes=AXES)
    frozen = [path for path in flat(params) if not any(re.search(p, path) for p in trainable)]
    updated, state = run(optimizer, params)
    assert_equal_layers(updated, reference(kind, params, decay=0.1, clip=1.0, frozen=frozen))
    for path in frozen:
        np.testing.assert_array_equal(flat(updated)[path], flat(params)[path])
        assert not [leaf for leaf in flat(state) if leaf.endswith(path)]


@KINDS
def test_state_axes_have_the_structure_and_rank_of_the_state(kind):
    optimizer = build(config(kind, trainable=["layers", "embed"]), steps=STEPS, shapes=SHAPES, axes=AXES)
    state = jax.eval_shape(optimizer.transform.init, SHAPES)
    axes = state_axes(optimizer, SHAPES, AXES)
    assert jax.tree.structure(state) == jax.tree.structure(axes, is_leaf=is_axes)
    seen = 0
    leaves = jax.tree_util.tree_leaves_with_path(state)
    for (keys, leaf), names in zip(leaves, jax.tree.leaves(axes, is_leaf=is_axes), strict=True):
        assert len(names) == leaf.ndim
        seen += any(names)
        # The bases of SOAP have the length of one side of a matrix, and the axes of both.
        if "bases" not in jax.tree_util.keystr(keys):
            sizes = tuple(SIZES[name] if name else size for name, size in zip(names, leaf.shape, strict=True))
            assert sizes == leaf.shape
    assert seen >= 7


def test_state_axes_by_name():
    optimizer = build(config(OptimizerKind.adafactor), steps=STEPS, shapes=SHAPES, axes=AXES)
    second = state_axes(optimizer, SHAPES, AXES).inner.inner_states["trained"].inner_state["scale"].second
    query = second["layers"]["0"]["attention"]["query"]
    assert query.rows == ("layers", "embed") and query.columns == ("layers", "heads", "head_dim")
    assert second["layers"]["0"]["mlp"]["down"] == (("layers", "mlp"), ("layers", "embed"))
    assert second["layers"]["0"]["norm"]["scale"] == ("layers", "norm")

    adamw = build(config(), steps=STEPS, shapes=SHAPES, axes=AXES)
    moments = state_axes(adamw, SHAPES, AXES).inner.inner_states["trained"].inner_state["scale"]
    assert moments.mu == AXES and moments.nu == AXES and moments.count == ()


@KINDS
def test_state_dtypes_do_not_change_with_bfloat16_weights(kind):
    mu = {} if kind in (OptimizerKind.adafactor, OptimizerKind.soap) else {"mu_dtype": Dtype.float32}
    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.bfloat16), SHAPES)
    optimizer = build(config(kind, **mu), steps=STEPS, shapes=shapes, axes=AXES)
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), random_tree(3))
    before = jax.eval_shape(optimizer.transform.init, params)
    updates, after = jax.eval_shape(optimizer.transform.update, params, before, params)
    assert jax.tree.map(lambda x: x.dtype, before) == jax.tree.map(lambda x: x.dtype, after)
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype("float32")}
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(before) if leaf.ndim > 1}
    assert "float32" in kinds
    assert ("bfloat16" in kinds) == (kind in (OptimizerKind.adamw, OptimizerKind.muon, OptimizerKind.soap))


def test_adafactor_follows_the_gradients_of_bfloat16_weights_in_a_long_run():
    """Same as with float32 weights: late in a run the second moment changes by less than a bfloat16 ulp."""
    adafactor = config(OptimizerKind.adafactor, clip_norm=None)
    shapes, axes = {"kernel": jax.ShapeDtypeStruct((4, 6), jnp.bfloat16)}, {"kernel": ("embed", "mlp")}
    transform = build(adafactor, steps=STEPS, shapes=shapes, axes=axes).transform

    def smaller_gradients(dtype):
        params = {"kernel": jnp.ones((4, 6), dtype)}
        second = jax.tree.map(jnp.ones_like, transform.init(params))
        state = jax.tree.map(lambda x: jnp.full_like(x, 5000) if x.dtype == jnp.int32 else x, second)
        step = lambda state, _: (transform.update({"kernel": 0.1 * params["kernel"]}, state, params)[1], None)  # noqa: E731
        return jax.lax.scan(step, state, length=500)[0].inner

    actual, expected = (jax.tree.leaves(smaller_gradients(dtype)) for dtype in ("bfloat16", "float32"))
    assert min(float(leaf.min()) for leaf in actual if leaf.ndim) < 0.7
    for leaf, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(leaf, want, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("is_unrolled", [False, True])
def test_norm_covers_the_trained_parameters(is_unrolled):
    """With scanned and unrolled layers; passing the norm to `update` gives the same result as computing it there."""
    optimizer = build(
        config(trainable=["layers", "embed"]), steps=STEPS, shapes=SHAPES, axes=AXES, is_unrolled=is_unrolled
    )
    grads = random_tree(0)
    trained = [leaf.ravel() for path, leaf in flat(grads).items() if path.startswith(("layers", "embed"))]
    np.testing.assert_allclose(optimizer.norm(grads), np.linalg.norm(np.concatenate(trained)), rtol=1e-6)
    before = optimizer.transform.init(grads)
    computed, _ = optimizer.transform.update(grads, before, grads)
    passed, _ = optimizer.transform.update(grads, before, grads, norm=optimizer.norm(grads))
    jax.tree.map(np.testing.assert_array_equal, computed, passed)


def test_clipping_is_float32_for_bfloat16_gradients():
    """A sum of 2^16 squares of 1 stalls at 256 in bfloat16; the norm is 256 and each update 1/256."""
    shapes = {"w": jax.ShapeDtypeStruct((1 << 16,), jnp.bfloat16)}
    constant = config(
        OptimizerKind.sgd, weight_decay=0.0, learning_rate=1.0, schedule=Schedule(kind=ScheduleKind.constant)
    )
    optimizer = build(constant, steps=STEPS, shapes=shapes, axes={"w": ("embed",)})
    ones = {"w": jnp.ones(1 << 16, jnp.bfloat16)}
    updates, _ = optimizer.transform.update(ones, optimizer.transform.init(ones), ones)
    np.testing.assert_allclose(updates["w"], -1 / 256, rtol=1e-6)


def test_discarded_update_does_not_advance_the_schedule():
    optimizer = build(config(), steps=STEPS, shapes=SHAPES, axes=AXES)
    params = random_tree(4)
    _, one = run(optimizer, params, steps=1)
    update = jax.jit(optimizer.transform.update)
    update(random_tree(5), one, params)  # A discarded step.
    _, two = update(random_tree(6), one, params)
    assert [float(optimizer.schedule(s.applied)) for s in (one, two)] == pytest.approx(
        [learning_rate(1), learning_rate(2)]
    )


def test_trainable_pattern_without_a_match_lists_near_paths():
    with pytest.raises(ConfigError) as caught:
        build(config(trainable=["atention/query", "head"]), steps=STEPS, shapes=SHAPES, axes=AXES)
    (problem,) = caught.value.problems
    assert problem.path == "optimizer.trainable" and "'atention/query'" in problem.reason
    assert "layers/0/attention/query" in problem.hint


@pytest.mark.parametrize("fields", [{"trainable": ["("]}, {"no_decay": ["*"]}, {"trainable": []}], ids=str)
def test_invalid_patterns_are_rejected(fields):
    with pytest.raises(ConfigError) as caught:
        build(config(**fields), steps=STEPS, shapes=SHAPES, axes=AXES)
    assert caught.value.problems[0].path == f"optimizer.{next(iter(fields))}"


def test_no_decay_pattern_may_match_nothing():
    optimizer = build(config(no_decay=["nothing_of_this_name"]), steps=STEPS, shapes=SHAPES, axes=AXES)
    assert jax.tree.leaves(jax.eval_shape(optimizer.transform.init, SHAPES))


@pytest.mark.parametrize("moments", [None, MomentFormat.dynamic8])
def test_eps_under_the_root(moments):
    """Moments of small vectors stay in float32, so that both formats equal optax."""
    params, gradient = {"norm": {"scale": jnp.ones(8)}}, {"norm": {"scale": jnp.linspace(-1e-4, 1e-4, 8)}}
    axes = {"norm": {"scale": ("norm",)}}
    settings = config(eps_root=1e-8, moments=moments, clip_norm=None, weight_decay=0.0)
    optimizer = build(settings, steps=STEPS, shapes=jax.eval_shape(lambda: params), axes=axes)
    updates, _ = optimizer.transform.update(gradient, optimizer.transform.init(params), params)
    expected = optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-8, eps_root=1e-8)
    scaled, _ = expected.update(gradient, expected.init(params))
    np.testing.assert_allclose(updates["norm"]["scale"], -learning_rate(0) * scaled["norm"]["scale"], rtol=1e-5)


@pytest.mark.slow
def test_cautious_decay_is_masked_by_the_update():
    params = random_tree(3)
    plain, cautious = (
        build(config(weight_decay=0.1, cautious_decay=is_cautious), steps=STEPS, shapes=SHAPES, axes=AXES)
        for is_cautious in (False, True)
    )
    undecayed = build(config(weight_decay=0.0), steps=STEPS, shapes=SHAPES, axes=AXES)
    grads = random_tree(100)
    found, full, none = (
        flat(optimizer.transform.update(grads, optimizer.transform.init(params), params)[0])
        for optimizer in (cautious, plain, undecayed)
    )
    for path, param in flat(params).items():
        towards_zero = -none[path] * param > 0
        np.testing.assert_allclose(found[path], np.where(towards_zero, full[path], none[path]), rtol=1e-6, err_msg=path)
    assert not np.array_equal(found["head/kernel"], full["head/kernel"])


def first_update(**fields):
    params = random_tree(4)
    optimizer = build(config(clip_norm=None, **fields), steps=STEPS, shapes=SHAPES, axes=AXES)
    updates, state = optimizer.transform.update(random_tree(100), optimizer.transform.init(params), params)
    return flat(updates), flat(params), state


@pytest.mark.slow
def test_muon_has_its_own_decay_and_scale():
    muon = OptimizerKind.muon
    base, params, _ = first_update(kind=muon, weight_decay=0.1)
    own, _, _ = first_update(kind=muon, weight_decay=0.1, matrix_weight_decay=0.0)
    up = "layers/0/mlp/up"
    np.testing.assert_allclose(own[up] - base[up], learning_rate(0) * 0.1 * params[up], rtol=1e-3, atol=1e-8)
    np.testing.assert_array_equal(own["head/kernel"], base["head/kernel"])
    # An orthogonal 8 x 12 matrix has an RMS of 12 ** -0.5; Jordan's scale is sqrt(12 / 8).
    jordan, _, _ = first_update(kind=muon, weight_decay=0.0, update_rms=0.0)
    np.testing.assert_allclose(jordan[up] / own[up], np.sqrt(12 / 8) / (0.2 * np.sqrt(12)), rtol=1e-4)


@pytest.mark.slow
def test_normuon_equals_the_transcription():
    """Two updates of one layer; the paper's rows are our columns, the outputs."""
    optimizer = build(
        config(OptimizerKind.muon, neuron_b2=0.9, clip_norm=None, weight_decay=0.0),
        steps=STEPS,
        shapes=SHAPES,
        axes=AXES,
    )
    params, state = random_tree(5), None
    state = optimizer.transform.init(params)
    memory, second = None, np.zeros(MLP)
    for step in range(2):
        grads = random_tree(100 + step)
        updates, state = optimizer.transform.update(grads, state, params)
        g, p = (flat(tree)["layers/0/mlp/up"][1] for tree in (grads, params))
        orthogonal, memory = orthogonalize("", g, p, memory, step)
        second = 0.9 * second + 0.1 * np.mean(orthogonal**2, axis=0)
        normalized = orthogonal / (np.sqrt(second) + 1e-8)
        expected = 0.2 * np.sqrt(normalized.size) / np.linalg.norm(normalized) * normalized
        found = flat(updates)["layers/0/mlp/up"][1]
        np.testing.assert_allclose(found, -learning_rate(step) * expected, rtol=1e-4, atol=1e-8)
    axes = flat_axes(state_axes(optimizer, SHAPES, AXES))
    neurons = [names for path, names in axes.items() if "second" in path and path.endswith("mlp/up")]
    assert neurons == [("layers", None, "mlp")]


def flat_axes(axes):
    leaves = jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_axes)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): names for path, names in leaves}


def test_rate_ratios_multiply():
    base, _, _ = first_update()
    found, _, _ = first_update(rate_ratios={"mlp": 0.5, "mlp/up": 0.1, "head": 0.0})
    for path, update in base.items():
        ratio = {"layers/0/mlp/up": 0.05, "layers/0/mlp/down": 0.5, "head/kernel": 0.0}.get(path, 1.0)
        np.testing.assert_allclose(found[path], ratio * update, rtol=1e-6, err_msg=path)
    with pytest.raises(ConfigError, match="no parameter's path matches 'absent'"):
        first_update(rate_ratios={"absent": 0.5})
