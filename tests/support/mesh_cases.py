"""A few training steps on a mesh of simulated devices, compared with the same steps on one device.

The devices may belong to several processes, all of which call `train` with the same case.
"""

import dataclasses
import sys
from importlib import import_module
from pkgutil import walk_packages
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

import maxhydra
from maxhydra import model, optim
from maxhydra.config.compose.composer import compose
from maxhydra.kernels.dispatch import Capability
from maxhydra.layers.params import Dtypes
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.train import next_token_loss
from maxhydra.train.batches import plan_batches
from maxhydra.train.state import StateFactory, TrainState
from maxhydra.train.step import make_step

Arrays = dict[str, np.ndarray]
# Norm of a gradient, relative to the largest, below which it is rounding error.
NEGLIGIBLE = 1e-4


@dataclasses.dataclass(frozen=True)
class Case:
    """Config overrides, number of devices, and the size of the global batch."""

    overrides: list[str]
    devices: int
    rows: int
    length: int
    steps: int


class Trained(NamedTuple):
    """Losses of the steps, and the first gradient of each parameter by path."""

    losses: np.ndarray
    gradients: Arrays


class Errors(NamedTuple):
    loss_error: float
    """Largest relative error of a loss."""
    gradient_error: float
    """Largest error of a parameter's gradient, relative to the norm of that gradient."""
    worst_parameter: str


def packed_batch(rows: int, length: int, vocabulary: int) -> Arrays:
    """Random tokens in rows of one, two or three documents, the last of them followed by padding."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, vocabulary, (rows, length + 1)).astype(np.int32)
    segments, positions = np.zeros((2, rows, length), np.int32)
    for row in range(rows):
        cuts = sorted(random.choice(np.arange(4, length - 4), row % 3, replace=False))
        ends = [*cuts, length - (row % 4 == 3) * 5]
        for number, (start, stop) in enumerate(zip([0, *cuts], ends, strict=True), 1):
            segments[row, start:stop], positions[row, start:stop] = number, np.arange(stop - start)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": positions,
        "segments": segments,
        "weights": (segments > 0).astype(np.float32),
    }


class Setup:
    """Config, model, optimizer and states of a case on its mesh."""

    def __init__(self, case: Case):
        batch_size = f"train.per_device_batch_size={case.rows / case.devices}"
        self.config = compose([*case.overrides, batch_size]).config
        devices = jax.local_devices() if case.devices == 1 else jax.devices()
        mesh = build_mesh(self.config.mesh, devices[: case.devices])
        self.sharder = Sharder.from_config(self.config.mesh, mesh)
        self.decoder = model.build(self.config.model, self.config.adapter)
        self.sharder.check(self.decoder.axes, self.decoder.shapes)
        shapes, axes = (model.split_trainable(tree)[0] for tree in (self.decoder.shapes, self.decoder.axes))
        self.optimizer = optim.build(
            self.config.optimizer, steps=case.steps, shapes=shapes, axes=axes, sharder=self.sharder
        )
        self.states = StateFactory(self.decoder, self.optimizer, self.sharder)

    def step(self) -> Any:
        loss = next_token_loss(self.decoder, self.sharder, self.config.train)
        step = make_step(loss, self.optimizer, self.config.train, self.decoder.apply_aux_updates, self.decoder.cast)
        return jax.jit(step, donate_argnums=0, out_shardings=(self.states.shardings(), None))


def initial_state(case: Case) -> TrainState:
    """The initial state as NumPy arrays."""
    state: TrainState = jax.device_get(Setup(case).states.create(0))
    return state


def train(case: Case, initial: TrainState | None = None) -> Trained:
    """Train on one batch from the same initial weights, whatever the mesh; None initializes them on the mesh."""
    setup = Setup(case)
    compiled = setup.step()
    arrays = packed_batch(case.rows, case.length, setup.config.model.vocab_size)
    arrays["weights"] = arrays["weights"].astype(jax.dtypes.canonicalize_dtype(float))
    sharding = plan_batches(setup.config, setup.sharder).sharding
    batch = {name: jax.make_array_from_callback(x.shape, sharding, x.__getitem__) for name, x in arrays.items()}
    states, losses, gradients = setup.states, [], {}
    state = states.create(0) if initial is None else jax.device_put(initial, states.shardings())
    for number in range(case.steps):
        state, metrics = compiled(state, batch)
        losses.append(float(metrics["loss"]))
        gradients = gradients or (_gradients(state.opt_state) if number == 0 else {})
    return Trained(np.array(losses), gradients)


def use_float64() -> None:
    """Let the package compute in float64, in this process, wherever it computes in float32.

    Rounding errors are then so small that they change no choice of experts: programs that are equal agree to 1e-12.
    """
    jax.config.update("jax_enable_x64", True)
    for package in ("kernels", "layers", "model", "optim", "train"):
        for module in walk_packages([f"{maxhydra.__path__[0]}/{package}"], f"maxhydra.{package}."):
            import_module(module.name)
    wide = ModuleType("jax.numpy")
    wide.__dict__.update({**vars(jnp), "float32": jnp.float64})
    for name, loaded in list(sys.modules.items()):
        if name.startswith("maxhydra.") and vars(loaded).get("jnp") is jnp:
            vars(loaded)["jnp"] = wide
    names = [field.name for field in dataclasses.fields(Dtypes)]
    reasons = Capability.unsupported_reasons

    def reasons_in_float32(self: Any, call: Any) -> tuple[str, ...]:
        return reasons(self, dataclasses.replace(call, dtype="float32") if call.dtype == "float64" else call)

    in_float64 = classmethod(lambda cls, dtypes: cls(**dict.fromkeys(names, np.dtype("float64"))))
    setattr(Dtypes, "of", in_float64)  # noqa: B010
    setattr(Capability, "unsupported_reasons", reasons_in_float32)  # noqa: B010


def _gradients(opt_state: Any) -> Arrays:
    """First moments after one step without clipping, which are the gradients times a constant."""
    moments = optax.tree_utils.tree_get(opt_state, "mu")
    leaves = jax.tree_util.tree_leaves_with_path(jax.tree.map(_gathered, moments))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


def _gathered(array: jax.Array) -> Any:
    """The whole array, parts of which other processes may hold."""
    return array if array.is_fully_addressable else multihost_utils.process_allgather(array, tiled=True)


def compare(expected: Trained, actual: Trained) -> Errors:
    """The largest errors. A gradient far below the largest one, such as that of a key bias, which softmax cancels, is
    compared relative to the largest."""
    assert expected.gradients.keys() == actual.gradients.keys()
    scale = max(float(np.linalg.norm(x)) for x in expected.gradients.values())
    errors = {
        name: float(np.linalg.norm(actual.gradients[name] - x)) / max(float(np.linalg.norm(x)), NEGLIGIBLE * scale)
        for name, x in expected.gradients.items()
    }
    worst = max(errors, key=errors.__getitem__)
    loss_error = float(np.max(np.abs(actual.losses - expected.losses) / np.abs(expected.losses)))
    return Errors(loss_error, errors[worst], worst)
