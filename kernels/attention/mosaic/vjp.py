"""The two kernels as one operation with a gradient."""

from functools import partial

import jax
from jax.ad_checkpoint import checkpoint_name

from maxhydra.kernels.attention.blocks import Inputs, Rows
from maxhydra.kernels.attention.mosaic.backward import backward
from maxhydra.kernels.attention.mosaic.forward import forward
from maxhydra.kernels.attention.mosaic.params import How
from maxhydra.kernels.attention.spec import KEPT


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(how: How, inputs: Inputs) -> jax.Array:
    return forward(how, inputs)[0]


def _forward(how: How, inputs: Inputs) -> tuple[jax.Array, tuple[Inputs, jax.Array, jax.Array]]:
    out_BTNH, total_BNT = checkpoint_name(forward(how, inputs), KEPT)
    return out_BTNH, (inputs, out_BTNH, total_BNT)


def _backward(how: How, kept: tuple[Inputs, jax.Array, jax.Array], d_out_BTNH: jax.Array) -> tuple[Inputs]:
    inputs, out_BTNH, total_BNT = kept
    rows = Rows.of(out_BTNH, total_BNT, d_out_BTNH)
    d_q_BTNH, d_k_BSKH, d_v_BSKH = backward(how, inputs, rows)
    return (Inputs(d_q_BTNH, d_k_BSKH, d_v_BSKH, rows.d_sinks(inputs), None, None),)


attend.defvjp(_forward, _backward)
