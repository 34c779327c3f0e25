"""DiLoCo against replicas that are trained one after the other, with the outer step in NumPy."""

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxhydra import model, optim
from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.train import next_token_loss
from maxhydra.train.checkpoint import open_checkpointer, read_state
from maxhydra.train.compile import trace_step
from maxhydra.train.state import StateFactory, TrainState
from maxhydra.train.step import make_step
from tests.support.cli import losses, parameter_hash, rewind, run_ok
from tests.support.mesh_cases import packed_batch

ROWS, LENGTH, STEPS, PERIOD = 4, 16, 5, 2
RATE, MOMENTUM = 0.7, 0.9
MODEL = ["model=micro", "model.dropout=0", "model.num_layers=2", f"train.seq_len={LENGTH}", f"train.steps={STEPS}"]
# With a large eps, rounding errors of tiny gradients do not become whole updates.
MODEL += ["optimizer.schedule.warmup_steps=0", "optimizer.learning_rate=0.01", "optimizer.eps=0.001"]
DILOCO = ["mesh.replica=2", f"train.diloco.period={PERIOD}", f"train.diloco.learning_rate={RATE}"]
DILOCO += [f"train.diloco.momentum={MOMENTUM}"]


class Setup:
    """States, step and batches on a mesh."""

    def __init__(self, *overrides: str, devices: int):
        self.config = compose([*MODEL, f"train.per_device_batch_size={ROWS / devices}", *overrides]).config
        self.sharder = Sharder.from_config(self.config.mesh, build_mesh(self.config.mesh, jax.devices()[:devices]))
        self.decoder = model.build(self.config.model)
        shapes, axes = self.decoder.shapes, self.decoder.axes
        optimizer = optim.build(self.config.optimizer, steps=STEPS, shapes=shapes, axes=axes)
        self.states = StateFactory(self.decoder, optimizer, self.sharder)

    def loss(self) -> Any:
        return next_token_loss(self.decoder, self.sharder.inside_replica(), self.config.train)

    def batches(self) -> list[dict[str, np.ndarray]]:
        vocabulary = self.config.model.vocab_size
        rows = packed_batch(ROWS * STEPS, LENGTH, vocabulary)
        return [{name: x[i * ROWS : (i + 1) * ROWS] for name, x in rows.items()} for i in range(STEPS)]


def train_diloco(*overrides: str, devices: int) -> tuple[TrainState, list[dict[str, float]]]:
    setup = Setup(*DILOCO, *overrides, devices=devices)
    sharding = setup.sharder.sharding(("act_batch", "act_length"))
    batches = [{name: jax.device_put(x, sharding) for name, x in batch.items()} for batch in setup.batches()]
    step = trace_step(setup.states, setup.loss(), setup.config.train, batches[0]).lower().compile()
    state, metrics = setup.states.create(0), []
    for batch in batches:
        state, values = step(state, batch)
        metrics.append({name: float(value) for name, value in values.items()})
    return state, metrics


def flat(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x) for path, x in leaves}


@cache
def one_device() -> tuple[Setup, Any, TrainState]:
    """A setup with its step and its initial state as NumPy arrays."""
    setup = Setup(devices=1)
    optimizer, update = setup.states.optimizer, setup.decoder.apply_aux_updates
    step = jax.jit(make_step(setup.loss(), optimizer, setup.config.train, update))
    return setup, step, jax.device_get(setup.states.create(0))


def expected(fragments: int) -> tuple[dict[str, np.ndarray], list[float]]:
    """The shared parameters after the last step, and the mean losses of the replicas."""
    setup, step, initial = one_device()
    states = [initial, initial]
    shared = flat(states[0].params)
    momentum, mean_losses = {name: np.zeros_like(x) for name, x in shared.items()}, []
    for number, batch in enumerate(setup.batches(), 1):
        halves = [{name: x[: ROWS // 2] for name, x in batch.items()}, {n: x[ROWS // 2 :] for n, x in batch.items()}]
        outputs = [step(state, half) for state, half in zip(states, halves, strict=True)]
        states = [state for state, _ in outputs]
        mean_losses.append(float(np.mean([metrics["loss"] for _, metrics in outputs])))
        params = [flat(state.params) for state in states]
        for order, name in enumerate(shared):
            rows = np.zeros(len(shared[name]), bool)
            for fragment in range(fragments):
                is_due = number % PERIOD == fragment * PERIOD // fragments
                if number == STEPS or (is_due and not name.startswith("pattern") and order % fragments == fragment):
                    rows[:] = True
                elif is_due and name.startswith("pattern"):
                    rows[fragment::fragments] = True
            gradient = shared[name] - np.mean([own[name] for own in params], axis=0)
            new_momentum = MOMENTUM * momentum[name] + gradient
            stepped = shared[name] - RATE * (gradient + MOMENTUM * new_momentum)
            shape = (-1, *[1] * (shared[name].ndim - 1))
            momentum[name] = np.where(rows.reshape(shape), new_momentum, momentum[name])
            shared[name] = np.where(rows.reshape(shape), stepped, shared[name])
            for own in params:
                own[name] = np.where(rows.reshape(shape), stepped, own[name])
        trees = [jax.tree.unflatten(jax.tree.structure(states[0].params), own.values()) for own in params]
        states = [dataclasses.replace(state, params=tree) for state, tree in zip(states, trees, strict=True)]
    return shared, mean_losses


@pytest.mark.slow
@pytest.mark.default_cases("2-mesh0-2")
@pytest.mark.parametrize(("fragments", "mesh", "devices"), [(2, (), 2), (1, ("mesh.fsdp=2", "mesh.tensor=2"), 8)])
def test_replicas_and_outer_step(fragments: int, mesh: tuple[str, ...], devices: int) -> None:
    state, metrics = train_diloco(*mesh, f"train.diloco.fragments={fragments}", devices=devices)
    params, mean_losses = expected(fragments)
    np.testing.assert_allclose([values["loss"] for values in metrics], mean_losses, rtol=1e-5)
    for name, value in flat(state.params).items():
        np.testing.assert_allclose(value, params[name], rtol=1e-4, atol=1e-5, err_msg=name)
    # The last step synchronizes all replicas.
    for name, value in flat(state.opt_state.replicas.params).items():
        np.testing.assert_array_equal(value[0], value[1], err_msg=name)
    assert int(state.step) == STEPS
    assert metrics[0]["tokens"] == one_device()[0].batches()[0]["weights"].sum()


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["mesh.replica=2"], "mesh.replica=2"),
        (["train.diloco.period=4"], "train.diloco.period=4"),
        (["mesh.replica=2", "train.diloco.period=4", "task=dpo"], "mesh.replica=2"),
        (["mesh.replica=2", "train.diloco.period=2", "train.diloco.fragments=3"], "train.diloco.fragments=3"),
    ],
)
def test_incomplete_settings_are_rejected(overrides: list[str], path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        compose([*MODEL, *overrides])


@pytest.mark.slow
def test_another_number_of_replicas_is_rejected_by_name(tmp_path: Path) -> None:
    two = Setup(*DILOCO, "checkpoint.mode=synchronous", devices=2)
    checkpointer = open_checkpointer(tmp_path, two.config.checkpoint)
    checkpointer.save(1, two.states.create(0), {}, {})
    checkpointer.close()
    for overrides, devices in (([*DILOCO, "mesh.replica=4"], 4), ([], 1)):
        with pytest.raises(ConfigError) as raised:
            read_state(tmp_path / "1", Setup(*overrides, devices=devices).states.abstract())
        message = str(raised.value)
        assert f"mesh.replica={devices}: the checkpoint has 2 DiLoCo replicas, this run has {devices}" in message
        assert "mesh.replica x mesh.dcn.replica = 2" in message and "checkpoint.load_parameters=" in message


@pytest.mark.exhaustive
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    options = [*MODEL, *DILOCO, "mesh.fsdp=1", "data=arithmetic", "train.log_every=1", "checkpoint.every=3"]
    options += ["train.eval_batches=1", "train.per_device_batch_size=2", "run.name=it"]
    run_ok(*options, cwd=tmp_path, devices=2)
    whole = tmp_path / "outputs/it"
    # Between two synchronizations.
    killed = rewind(whole, 3, "killed")
    assert "resuming from step 3" in run_ok(*options, "run.name=killed", cwd=tmp_path, devices=2).stderr
    assert losses(killed) == losses(whole) and parameter_hash(killed, STEPS) == parameter_hash(whole, STEPS)
