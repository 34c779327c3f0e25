"""The chunked gated delta rule for TPUs: the state of a head stays in vector memory from the first to the last chunk.

XLA computes everything that does not depend on the state, as in chunked.py, and also the gradient, which iterates over
the chunks again. Shape letters as there.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from maxhydra.kernels.gated_delta import chunked
from maxhydra.kernels.gated_delta.chunked import ChunkMatrices
from maxhydra.kernels.gated_delta.spec import Inputs


def gated_delta(inputs: Inputs, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Return the outputs [B, T, M, G, V] and the state after the last token."""

    @jax.custom_vjp
    def scan(state_BMGKV: jax.Array, matrices: ChunkMatrices) -> tuple[jax.Array, jax.Array]:
        return _scan(state_BMGKV, matrices, interpret=interpret)

    def forward(state_BMGKV: jax.Array, matrices: ChunkMatrices) -> tuple[Any, Any]:
        return scan(state_BMGKV, matrices), (state_BMGKV, matrices)

    def backward(residuals: tuple[jax.Array, ChunkMatrices], d_out: Any) -> Any:
        return jax.vjp(chunked.scan, *residuals)[1](d_out)

    scan.defvjp(forward, backward)
    return chunked.gated_delta(inputs, scan=scan)


def _scan(state_BMGKV: jax.Array, matrices: ChunkMatrices, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    B, M, G, K, V = state_BMGKV.shape
    C, I = matrices.value_CBMGJV.shape[0], matrices.value_CBMGJV.shape[4]
    matrices = matrices._replace(decay_CBMG=matrices.decay_CBMG[..., None, None])
    state = pl.BlockSpec((None, None, None, K, V), lambda b, m, g, c: (b, m, g, 0, 0))

    def chunk_spec(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, None, None, *shape[4:]), lambda b, m, g, c: (c, b, m, g, 0, 0))

    out = (C, B, M, G, I, V)
    state_BMGKV, out_CBMGIV = pl.pallas_call(
        _kernel,
        grid=(B, M, G, C),
        in_specs=[state, *(chunk_spec(part.shape) for part in matrices)],
        out_specs=[state, chunk_spec(out)],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (state_BMGKV.shape, out)],
        scratch_shapes=[pltpu.VMEM((K, V), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="gated_delta",
    )(state_BMGKV, *matrices)
    return state_BMGKV, out_CBMGIV


def _kernel(
    initial_ref: Any,
    inverse_ref: Any,
    value_ref: Any,
    key_ref: Any,
    attention_ref: Any,
    query_ref: Any,
    last_ref: Any,
    decay_ref: Any,
    final_ref: Any,
    out_ref: Any,
    state_ref: Any,
) -> None:
    chunk = pl.program_id(3)

    @pl.when(chunk == 0)
    def _begin() -> None:
        state_ref[...] = initial_ref[...]

    state_KV = state_ref[...]
    update_IV = _dot(inverse_ref[...], value_ref[...] - _dot(key_ref[...], state_KV))
    out_ref[...] = _dot(query_ref[...], state_KV) + _dot(attention_ref[...], update_IV)
    state_ref[...] = decay_ref[...] * state_KV + _dot(last_ref[...].T, update_IV)

    @pl.when(chunk == pl.num_programs(3) - 1)
    def _end() -> None:
        final_ref[...] = state_ref[...]


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, precision="highest", preferred_element_type=jnp.float32)
