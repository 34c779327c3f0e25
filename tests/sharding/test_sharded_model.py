"""The same numbers on any mesh: devices are simulated, processes are real."""

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from maxhydra import data, model, optim
from maxhydra.config import Config
from maxhydra.config.compose.composer import compose
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.train import next_token_loss
from maxhydra.train.batches import plan_batches
from maxhydra.train.checkpoint import open_checkpointer, restore
from maxhydra.train.state import StateFactory, TrainState
from maxhydra.train.step import make_step
from tests.support.cli import SMALL, run_processes

GLOBAL_BATCH = 8
# float32 differences between reductions in another order; the loss is around 5.
TOLERANCE = 1e-5
STEPS, SAVED = 10, 5


class Run:
    """A training run put together by hand, on as many of the simulated devices as its mesh has."""

    def __init__(self, *overrides: str, slices: int = 1, **axes: int):
        devices = slices * math.prod(axes.values())
        mesh = [f"mesh.{axis}={size}" for axis, size in {"fsdp": 1, **axes}.items()]
        mesh += [f"mesh.slices={slices}", f"mesh.dcn.data={slices}"]
        batch = f"train.per_device_batch_size={GLOBAL_BATCH / devices}"
        sizes = [*SMALL, "model.num_heads=4", "model.num_kv_heads=4"]
        self.config: Config = compose([*sizes, batch, *mesh, *overrides]).config
        self.sharder = Sharder(build_mesh(self.config.mesh, jax.devices()[:devices]), self.config.mesh.rules)
        decoder = model.build(self.config.model)
        decoder.check_mesh(self.sharder)
        optimizer = optim.build(self.config.optimizer, steps=40, shapes=decoder.shapes, axes=decoder.axes)
        self.states = StateFactory(decoder, optimizer, self.sharder)
        self.loader = data.train_loader(self.config.data, plan_batches(self.config, self.sharder))
        loss = next_token_loss(decoder, self.sharder, self.config.train)
        step = make_step(loss, optimizer, self.config.train, decoder.apply_aux_updates, decoder.cast)
        self.step = jax.jit(step, donate_argnums=0)

    def place(self, state: TrainState) -> TrainState:
        """The initial state of another run, on the devices of this one: takes a fraction of compiling `create`."""
        placed: TrainState = jax.device_put(jax.device_get(state), self.states.shardings())
        return placed

    def train(self, state: TrainState, steps: int) -> tuple[TrainState, np.ndarray]:
        seen = []
        for _ in range(steps):
            state, metrics = self.step(state, next(self.loader))
            seen.append(float(metrics["loss"]))
        return state, np.array(seen)


def train_and_save(run: Run, state: TrainState, folder: Path) -> np.ndarray:
    """Losses of all steps, with a checkpoint after the first SAVED."""
    state, before = run.train(state, SAVED)
    saving = open_checkpointer(folder, run.config.checkpoint)
    saving.save(SAVED, state, run.loader.state(), {})
    saving.close()
    return np.concatenate([before, run.train(state, STEPS - SAVED)[1]])


def resume(run: Run, folder: Path) -> np.ndarray:
    """Losses of the steps after the checkpoint."""
    restored = restore(folder, run.config.checkpoint, run.states.abstract(), run.loader.restore)
    assert restored is not None and int(restored.state.step) == SAVED
    return run.train(restored.state, STEPS - SAVED)[1]


@pytest.fixture(scope="module")
def one_device_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one_device")


@pytest.fixture(scope="module")
def initial() -> TrainState:
    """The initial state on one device, as NumPy arrays."""
    state: TrainState = jax.device_get(Run().states.create(0))
    return state


@pytest.fixture(scope="module")
def one_device(initial: TrainState, one_device_folder: Path) -> np.ndarray:
    run = Run()
    return train_and_save(run, run.place(initial), one_device_folder)


@pytest.fixture(scope="module")
def eight_devices_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, run = tmp_path_factory.mktemp("eight_devices"), Run(fsdp=8)
    train_and_save(run, run.states.create(0), folder)
    return folder


MESHES = [
    {"fsdp": 8},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"tensor": 4},
    {"fsdp": 2, "sequence": 4},
    {"fsdp": 2, "expert": 2, "tensor": 2},
    {"data": 2, "sequence": 2, "tensor": 2},
]


@pytest.mark.slow
@pytest.mark.default_cases("data2-fsdp2-tensor2")
@pytest.mark.parametrize("axes", MESHES, ids=lambda axes: "-".join(f"{axis}{size}" for axis, size in axes.items()))
def test_a_mesh_changes_no_loss(axes: dict[str, int], initial: TrainState, one_device: np.ndarray) -> None:
    run = Run(**axes)
    # Meshes of three axes, which cover all axes, also initialize their weights.
    state, seen = run.train(run.states.create(0) if len(axes) == 3 else run.place(initial), STEPS)
    assert seen[-1] < seen[0] - 0.3
    np.testing.assert_allclose(seen, one_device, rtol=TOLERANCE)
    if "fsdp" in axes:
        parts = {leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(state.params) if leaf.ndim > 2}
        whole = {leaf.size for leaf in jax.tree.leaves(state.params) if leaf.ndim > 2}
        assert max(parts) <= max(whole) / axes["fsdp"]


@pytest.mark.exhaustive
def test_two_slices_change_no_loss(initial: TrainState, one_device: np.ndarray) -> None:
    run = Run(slices=2, fsdp=4)
    assert run.sharder.mesh.shape["data"] == 2
    _, seen = run.train(run.place(initial), STEPS)
    np.testing.assert_allclose(seen, one_device, rtol=TOLERANCE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_a_mesh_changes_no_loss_of_optimizers_that_factor_or_multiply_matrices(optimizer: str) -> None:
    alone, spread = Run(f"optimizer={optimizer}"), Run(f"optimizer={optimizer}", data=2, fsdp=2, tensor=2)
    state = spread.states.create(0)
    expected = alone.train(alone.place(state), 4)[1]
    seen = spread.train(state, 4)[1]
    np.testing.assert_allclose(seen, expected, rtol=3e-5)


@pytest.mark.slow
@pytest.mark.default_cases("fsdp2-tensor2")
@pytest.mark.parametrize("axes", [{"fsdp": 2, "tensor": 2}, {}], ids=["fsdp2-tensor2", "one"])
def test_a_checkpoint_of_eight_devices_goes_on_on_fewer(
    axes: dict[str, int], one_device: np.ndarray, eight_devices_folder: Path
) -> None:
    np.testing.assert_allclose(resume(Run(**axes), eight_devices_folder), one_device[SAVED:], rtol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.default_cases("model.scan_unroll=2", "model.remat.policy=minimal")
@pytest.mark.parametrize("change", ["model.scan_unroll=2", "model.remat.policy=full", "model.remat.policy=minimal"])
def test_layer_stacking_and_remat_are_not_in_the_checkpoint(
    change: str, one_device: np.ndarray, one_device_folder: Path
) -> None:
    np.testing.assert_allclose(resume(Run(change), one_device_folder), one_device[SAVED:], rtol=TOLERANCE)


@pytest.mark.exhaustive
def test_losses_and_gradients_of_two_processes_equal_one_device(tmp_path: Path) -> None:
    """One case of scripts/mesh_matrix.py: FSDP over the processes, tensor parallelism over the devices of each."""
    case = ["--worker", "llama3-tiny", "--mesh", "processes_tensor"]
    for done in run_processes(2, *case, cwd=tmp_path, devices=4, timeout=600, module="scripts.mesh_matrix"):
        result = json.loads(done.stdout.splitlines()[-1])
        assert result["loss_error"] < TOLERANCE and result["gradient_error"] < 1e-4, result
