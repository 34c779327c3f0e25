"""The next-token loss and token log-probs over simulated devices: their collectives, and equality with one device."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra import model
from maxhydra.config.compose.composer import compose
from maxhydra.measure import hlo
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.train import Scorer, next_token_loss

V, D, T, B = 512, 64, 32, 8
SIZES = [
    "model=micro",
    "model.num_layers=1",
    f"model.vocab_size={V}",
    f"model.emb_dim={D}",
    "model.num_heads=4",
    "model.num_kv_heads=4",
]


def token_loss(decoder: model.ModelDef, sharder: Sharder, train: Any) -> Callable[..., Any]:
    loss = next_token_loss(decoder, sharder, train)
    return lambda params, batch: loss(params, batch, None)["loss"]


def squared_logprobs(decoder: model.ModelDef, sharder: Sharder, train: Any) -> Callable[..., Any]:
    """A nonlinear function of the log-probs, which weights every token differently."""
    scorer = Scorer(decoder, sharder, train.loss_chunk)
    return lambda params, batch: jnp.sum(jnp.square(scorer(params, batch, None, is_adapted=True)))


def gradients(
    *overrides: str, devices: int = 8, length: int = T, loss_of: Callable[..., Any] = token_loss
) -> tuple[Any, Any]:
    """The jitted loss with its gradients, and its arguments."""
    config = compose([*SIZES, f"train.seq_len={length}", "model.dtypes.compute=float32", *overrides]).config
    sharder = Sharder(build_mesh(config.mesh, jax.devices()[:devices]), config.mesh.rules)
    decoder = model.build(config.model)
    rng = np.random.default_rng(0)

    def weight(shape: jax.ShapeDtypeStruct) -> np.ndarray:
        """Normal values; vectors, which are norms, around 1."""
        values = D**-0.5 * rng.normal(size=shape.shape)
        return (values + (math.prod(shape.shape) == D)).astype(shape.dtype)

    params = jax.device_put(jax.tree.map(weight, decoder.shapes), sharder.tree(decoder.axes))
    batch = {name: rng.integers(0, V, (B, length)).astype(np.int32) for name in ("tokens", "targets")}
    batch["weights"] = np.ones((B, length), np.float32)
    batch["positions"] = np.tile(np.arange(length, dtype=np.int32), (B, 1))
    step = jax.jit(jax.value_and_grad(loss_of(decoder, sharder, config.train)))
    return step, (params, batch)


def collectives(*overrides: str, loss_of: Callable[..., Any] = token_loss) -> list[hlo.Collective]:
    step, arguments = gradients(*overrides, loss_of=loss_of)
    return list(hlo.collectives(hlo.parse_program(step.lower(*arguments).compile().as_text())))


def traffic(chunk: int, *overrides: str) -> float:
    """Bytes that a device sends in a step."""
    found = collectives(f"train.loss_chunk={chunk}", *overrides)
    return sum(each.count * each.wire_bytes for each in found if "loss" in each.source or each.bytes >= V * D)


@pytest.mark.slow
@pytest.mark.default_cases("fsdp-sequence-tensor")
@pytest.mark.parametrize(
    "mesh",
    [["mesh.fsdp=8"], ["mesh.fsdp=2", "mesh.sequence=2", "mesh.tensor=2"]],
    ids=["fsdp", "fsdp-sequence-tensor"],
)
def test_traffic_does_not_depend_on_the_number_of_chunks(mesh: list[str]) -> None:
    assert traffic(4, *mesh) == pytest.approx(traffic(0, *mesh), rel=0.02)


@pytest.mark.slow
def test_logits_are_not_gathered() -> None:
    """With the vocabulary split, only numbers per token move, and hidden states."""
    largest = max(each.bytes for each in collectives("mesh.fsdp=2", "mesh.tensor=4"))
    assert largest < 4 * (B // 2) * T * (V // 4)


@pytest.mark.slow
def test_logprobs_gather_the_head_once_per_pass() -> None:
    """Once forward and once backward for 8 chunks, and one reduction of its gradient."""
    found = collectives("train.loss_chunk=4", "mesh.fsdp=8", "model.head=separate", loss_of=squared_logprobs)
    of_head = [each for each in found if each.bytes == 4 * V * D and "logprobs" in each.source]
    runs = {kind: sum(each.count for each in of_head if each.kind == kind) for kind in ("all-gather", "reduce-scatter")}
    assert runs["all-gather"] <= 2 and runs["reduce-scatter"] == 1, runs


@pytest.mark.slow
@pytest.mark.default_cases("data-sequence-tensor", "logprobs")
@pytest.mark.parametrize(
    ("mesh", "loss_of"),
    [
        (["mesh.fsdp=4", "mesh.tensor=2"], token_loss),
        (["mesh.data=2", "mesh.sequence=2", "mesh.tensor=2"], token_loss),
        (["mesh.fsdp=2", "mesh.sequence=2", "mesh.tensor=2"], squared_logprobs),
    ],
    ids=["fsdp-tensor", "data-sequence-tensor", "logprobs"],
)
def test_loss_and_gradients_equal_one_device(mesh: list[str], loss_of: Callable[..., Any]) -> None:
    options = ["train.loss_chunk=8", "train.z_loss=0.01", "model.logit_softcap=10"]
    one, arguments = gradients(*options, "mesh.fsdp=1", devices=1, loss_of=loss_of)
    many, sharded = gradients(*options, *mesh, loss_of=loss_of)
    expected, got = one(*arguments), many(*sharded)
    for actual, desired in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(np.asarray(actual) - desired) < 2e-5 * np.linalg.norm(desired)
