"""The next-token loss over simulated devices: its collectives, and equality with one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra import model
from maxhydra.config.compose.composer import compose
from maxhydra.measure import hlo
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.train import next_token_loss

V, D, T, B = 512, 64, 32, 8
SIZES = [
    "model=micro",
    "model.num_layers=1",
    f"model.vocab_size={V}",
    f"model.emb_dim={D}",
    "model.num_heads=4",
    "model.num_kv_heads=4",
]


def gradients(*overrides: str, devices: int = 8, length: int = T) -> tuple[Any, Any]:
    """The jitted loss with its gradients, and its arguments."""
    config = compose([*SIZES, f"train.seq_len={length}", "model.dtypes.compute=float32", *overrides]).config
    sharder = Sharder(build_mesh(config.mesh, jax.devices()[:devices]), config.mesh.rules)
    decoder = model.build(config.model)
    params = jax.jit(decoder.init, out_shardings=sharder.tree(decoder.axes))(jax.random.key(0))
    rng = np.random.default_rng(0)
    batch = {name: jnp.asarray(rng.integers(0, V, (B, length)), jnp.int32) for name in ("tokens", "targets")}
    batch |= {"weights": jnp.ones((B, length)), "positions": jnp.broadcast_to(jnp.arange(length), (B, length))}
    loss = next_token_loss(decoder, sharder, config.train)
    step = jax.jit(jax.value_and_grad(lambda params, batch: loss(params, batch, None)["loss"]))
    return step, (params, batch)


def collectives(*overrides: str) -> list[hlo.Collective]:
    step, arguments = gradients(*overrides)
    return list(hlo.collectives(hlo.parse_program(step.lower(*arguments).compile().as_text())))


def traffic(chunk: int, *overrides: str) -> float:
    """Bytes that a device sends in a step."""
    found = collectives(f"train.loss_chunk={chunk}", *overrides)
    return sum(each.count * each.wire_bytes for each in found if "loss" in each.source or each.bytes >= V * D)


@pytest.mark.parametrize("mesh", [["mesh.fsdp=8"], ["mesh.fsdp=2", "mesh.sequence=2", "mesh.tensor=2"]], ids=str)
def test_traffic_does_not_depend_on_the_number_of_chunks(mesh: list[str]) -> None:
    assert traffic(4, *mesh) == pytest.approx(traffic(0, *mesh), rel=0.02)


def test_logits_are_not_gathered() -> None:
    """With the vocabulary split, only numbers per token move, and hidden states."""
    largest = max(each.bytes for each in collectives("mesh.fsdp=2", "mesh.tensor=4"))
    assert largest < 4 * (B // 2) * T * (V // 4)


@pytest.mark.parametrize(
    "mesh", [["mesh.fsdp=4", "mesh.tensor=2"], ["mesh.data=2", "mesh.sequence=2", "mesh.tensor=2"]], ids=str
)
def test_loss_and_gradients_equal_one_device(mesh: list[str]) -> None:
    options = ["train.loss_chunk=8", "train.z_loss=0.01", "model.logit_softcap=10"]
    one, arguments = gradients(*options, "mesh.fsdp=1", devices=1)
    many, sharded = gradients(*options, *mesh)
    expected, got = one(*arguments), many(*sharded)
    for actual, desired in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(np.asarray(actual) - desired) < 2e-5 * np.linalg.norm(desired)
