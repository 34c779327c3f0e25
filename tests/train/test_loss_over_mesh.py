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
SIZES = ["model=micro", f"model.vocab_size={V}", f"model.emb_dim={D}", "model.num_heads=4", "model.num_kv_heads=4"]


def gradients(*overrides: str, devices: int = 8, dtype: str = "float32") -> tuple[Any, Any]:
    """The jitted loss with gradients of the head alone, and its arguments."""
    config = compose([*SIZES, f"train.seq_len={T}", f"model.dtypes.compute={dtype}", *overrides]).config
    sharder = Sharder(build_mesh(config.mesh, jax.devices()[:devices]), config.mesh.rules)
    decoder = model.build(config.model)
    params = jax.jit(decoder.init, out_shardings=sharder.tree(decoder.axes))(jax.random.key(0))
    rng = np.random.default_rng(0)
    batch = {name: jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32) for name in ("tokens", "targets")}
    batch |= {"weights": jnp.ones((B, T)), "positions": jnp.broadcast_to(jnp.arange(T), (B, T))}
    loss = next_token_loss(decoder, sharder, config.train)
    step = jax.jit(jax.value_and_grad(lambda params, batch: loss(params, batch, None)["loss"]))
    return step, (params, batch)


def collectives(*overrides: str) -> list[hlo.Collective]:
    step, arguments = gradients(*overrides)
    return list(hlo.collectives(hlo.parse_program(step.lower(*arguments).compile().as_text())))


@pytest.mark.parametrize("head", ["tied", "separate"])
def test_traffic_does_not_depend_on_the_number_of_chunks(head: str) -> None:
    def traffic(chunk: int) -> float:
        return sum(each.wire_bytes for each in collectives("mesh.fsdp=8", f"model.head={head}", f"train.loss_chunk={chunk}"))

    assert traffic(8) == pytest.approx(traffic(0), rel=0.01)
