"""Layouts of the state.

Initialization, offloaded optimizer state, and ZeRO-1: parameters and optimizer state sharded over the data axis,
against one device and by their bytes.
"""

import dataclasses

import jax
import numpy as np
import pytest

from maxhydra.config import Config, ConfigError
from maxhydra.data import RowSpec
from maxhydra.train import next_token_loss
from maxhydra.train.checkpoint import open_checkpointer, restore
from maxhydra.train.state import StateFactory, TrainState, _run_once_options
from maxhydra.train.step import make_step
from tests.support.states import ROWS, plan

LENGTH = 32
OVER_DATA = "mesh.shard_state_over_data=true"
LEVEL = "--xla_backend_optimization_level"


def batch(states: StateFactory, seed: int) -> dict[str, jax.Array]:
    tokens = np.random.default_rng(seed).integers(0, 300, (ROWS, LENGTH)).astype(np.int32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    arrays = {"tokens": tokens, "targets": np.roll(tokens, -1, axis=1), "positions": positions}
    arrays["weights"] = np.ones((ROWS, LENGTH), np.float32)
    sharding = states.sharder.sharding(("act_batch", None))
    return {name: jax.device_put(x, sharding) for name, x in arrays.items()}


def losses(states: StateFactory, config: Config, state: TrainState) -> np.ndarray:
    """Losses of three steps from this state, placed on the devices."""
    state, seen = jax.device_put(state, states.shardings()), []
    loss = next_token_loss(states.model, states.sharder, config.train)
    step = make_step(loss, states.optimizer, config.train, states.model.apply_aux_updates, states.cast, states.layout())
    step = jax.jit(step, donate_argnums=0, out_shardings=(states.shardings(), None))
    for seed in range(3):
        state, metrics = step(state, batch(states, seed))
        seen.append(float(metrics["loss"]))
    return np.array(seen)


def bytes_on_first_device(tree: object) -> int:
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.default_cases("adamw")
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
def test_state_over_data_changes_no_loss(optimizer):
    one = plan(f"optimizer={optimizer}")
    initial = jax.device_get(one[0].create(0))
    found = losses(*plan(OVER_DATA, f"optimizer={optimizer}", data=4, fsdp=2), initial)
    np.testing.assert_allclose(found, losses(*one, initial), rtol=3e-5 if optimizer == "muon" else 1e-5)


@pytest.mark.slow
def test_moments_and_weights_take_a_fraction_of_the_bytes():
    sharded, replicated = (plan(*change, data=4)[0].create(0) for change in ((OVER_DATA,), ()))
    for part in ("params", "opt_state"):
        found, whole = (bytes_on_first_device(getattr(state, part)) for state in (sharded, replicated))
        # Norms stay whole.
        assert whole / 4 <= found < whole / 3.9
    assert jax.tree.structure(sharded) == jax.tree.structure(replicated)
    for x, y in zip(jax.tree.leaves(sharded), jax.tree.leaves(replicated), strict=True):
        np.testing.assert_array_equal(x, y)


def test_gradients_are_summed_where_the_moments_are():
    states, _ = plan(OVER_DATA, data=4, fsdp=2)
    shardings = states.shardings()
    spec = shardings.params["pattern"]["0"]["mlp"]["up"]["kernel"].spec
    assert spec == jax.sharding.PartitionSpec(None, ("fsdp", "data"), None)
    off = dataclasses.replace(states, shards_over_data=False).shardings()
    assert off.params["pattern"]["0"]["mlp"]["up"]["kernel"].spec == jax.sharding.PartitionSpec(None, "fsdp", None)
    moments = shardings.opt_state.inner.inner_states["trained"].inner_state["scale"]
    assert moments.mu["pattern"]["0"]["mlp"]["up"]["kernel"].spec == spec


def moment_kinds(state: TrainState) -> set[str | None]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim}


@pytest.mark.exhaustive
def test_offloaded_state_changes_no_loss_and_stays_in_host_memory():
    states, config = plan("optimizer.offload=true", OVER_DATA, data=2, fsdp=2)
    state = states.create(0)
    initial = jax.device_get(state)
    assert moment_kinds(state) == {"pinned_host"}
    found = losses(states, config, initial)
    np.testing.assert_allclose(found, losses(*plan(OVER_DATA, data=2, fsdp=2), initial), rtol=1e-6)


@pytest.mark.exhaustive
def test_offloaded_weights_change_no_loss_and_stay_in_host_memory():
    states, config = plan("optimizer.offload_weights=true", "train.grad_accum=2", fsdp=2)
    state = states.create(0)
    initial = jax.device_get(state)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.params)}
    assert kinds == {"pinned_host"} and moment_kinds(state) == {"device"}
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.weights)} == {"device"}
    found = losses(states, config, initial)
    np.testing.assert_allclose(found, losses(*plan("train.grad_accum=2", fsdp=2), initial), rtol=1e-6)


@pytest.mark.slow
def test_offloaded_state_is_restored_to_host_memory(tmp_path):
    states, config = plan("optimizer.offload=true", fsdp=2)
    state = states.create(0)
    saving = open_checkpointer(tmp_path, config.checkpoint)
    saving.save(1, state, {}, {})
    saving.close()
    for change, kind in (("optimizer.offload=true", "pinned_host"), ("optimizer.offload=false", "device")):
        other, config = plan(change, fsdp=4)
        restored = restore(tmp_path, config.checkpoint, other.abstract(), lambda position: None)
        assert restored is not None and moment_kinds(restored.state) == {kind}
        jax.tree.map(np.testing.assert_array_equal, restored.state.params, state.params)


@pytest.mark.parametrize(("flags", "level"), [("", 1), (f"{LEVEL}=3", 1), (f"{LEVEL}=2 {LEVEL}=0 --xla_dump_to=x", 0)])
def test_initialization_is_compiled_at_level_1_or_the_lower_one_of_xla_flags(
    flags: str, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert _run_once_options() == {"xla_backend_optimization_level": level}


@pytest.mark.slow
def test_weights_and_data_have_seeds_of_their_own():
    (plain, _), (other, config) = plan(), plan("run.weights_seed=5", "run.data_seed=7")
    states = [plain.create(5), other.create(0), plain.create(0)]
    jax.tree.map(np.testing.assert_array_equal, states[1].params, states[0].params)
    np.testing.assert_array_equal(states[1].key, states[2].key)
    assert RowSpec.of(config).seed == 7


@pytest.mark.parametrize(
    ("overrides", "is_accepted"),
    [
        (["optimizer.grad_dtype=float32", "model.dtypes.compute=bfloat16"], False),
        (["optimizer.grad_dtype=float32", "model.dtypes.compute=bfloat16", "train.grad_accum=2"], True),
        (["optimizer.grad_dtype=bfloat16", "model.dtypes.compute=float32"], True),
    ],
)
def test_a_gradient_dtype_without_effect_is_rejected(overrides, is_accepted):
    try:
        plan(*overrides)
    except ConfigError as error:
        assert not is_accepted and [problem.path for problem in error.problems] == ["optimizer.grad_dtype"]
    else:
        assert is_accepted
