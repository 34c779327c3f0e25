"""Grouped matrix product: consecutive rows of x by the matrix of their group, as experts need it.

`grouped_matmul` is the one way in. BACKENDS says what serves what, fastest first: `auto` takes the first that serves
the call, and a backend that was asked for by name and cannot is an error. M rows, E groups, D inputs, F outputs.
"""

import dataclasses
from collections.abc import Callable

import jax

from maxhydra.kernels.call_recorder import watched
from maxhydra.kernels.capability import CallSpec, Capability
from maxhydra.kernels.dispatch import UnsupportedError, chosen
from maxhydra.kernels.grouped_matmul import megablox, mosaic, reference, triton, xla
from maxhydra.kernels.placement import Placement, capability
from maxhydra.kernels.tiles import Sizes, sized

__all__ = ["BACKENDS", "Backend", "Call", "UnsupportedError", "choose", "grouped_matmul"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(CallSpec):
    """Rows of so many groups, by matrices of inputs and outputs."""

    rows: int
    groups: int
    inputs: int
    outputs: int

    @property
    def largest(self) -> int:
        """Numbers of the largest array."""
        sides = (self.rows * self.inputs, self.rows * self.outputs, self.groups * self.inputs * self.outputs)
        return max(sides)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend(Capability[Call]):
    """One row of the capability table."""

    run: Callable[..., jax.Array]
    multiple: int = 1
    """Of rows, inputs and outputs."""
    max_size: int | None = None
    """Numbers of the largest array; None: any."""

    def needs(self, call: Call) -> tuple[tuple[bool, str], ...]:
        return (
            (
                all(size % self.multiple == 0 for size in (call.rows, call.inputs, call.outputs)),
                f"takes rows, inputs and outputs in multiples of {self.multiple}, "
                f"not {call.rows}, {call.inputs}, {call.outputs}",
            ),
            (
                self.max_size is None or call.largest <= self.max_size,
                f"takes arrays of up to {self.max_size} numbers, not {call.largest}",
            ),
        )


# Fastest first.
BACKENDS: dict[str, Backend] = {
    "mosaic": Backend(
        run=mosaic.grouped_matmul,
        platforms=("gpu",),
        capabilities=("9.0",),
        devices=1,
        dtypes=("bfloat16",),
        multiple=mosaic.MULTIPLE,
        max_size=2**31 - 1,
    ),
    "triton": Backend(
        run=triton.grouped_matmul,
        platforms=("gpu",),
        dtypes=("bfloat16", "float16"),
        multiple=triton.MULTIPLE,
        max_size=2**31 - 1,
        cut=lambda call: triton.cut(call.rows, call.inputs, call.outputs),
    ),
    "megablox": Backend(
        run=megablox.grouped_matmul,
        platforms=("tpu",),
        dtypes=("float32", "bfloat16"),
        multiple=megablox.MULTIPLE,
    ),
    "xla": Backend(run=xla.grouped_matmul),
    "reference": Backend(run=reference.grouped_matmul),
}


def choose(backend: str, call: Call) -> str:
    """The backend that serves the call: the one asked for, or under `auto` the fastest that can."""
    return chosen("grouped_matmul", backend, {name: row.refusals(call) for name, row in BACKENDS.items()})


@watched
def grouped_matmul(
    x_MD: jax.Array,
    w_EDF: jax.Array,
    sizes_E: jax.Array,
    *,
    backend: str,
    sizes: Sizes = (),
    place: Placement | None = None,
) -> jax.Array:
    """[M, F]: the first sizes[0] rows of x times w[0], the next sizes[1] rows times w[1], and so on.

    Over a mesh, this is a call of each device with what lies there. sizes: asked of the kernel's tile. place: None is
    the platform that JAX runs on.
    Rows after the last group, and the gradient by them, are whatever the backend leaves there.
    """
    (M, D), (E, inputs, F) = x_MD.shape, w_EDF.shape
    if inputs != D or sizes_E.shape != (E,) or x_MD.dtype != w_EDF.dtype:
        shapes = f"{x_MD.dtype} {x_MD.shape}, {w_EDF.dtype} {w_EDF.shape}, {sizes_E.shape}"
        raise ValueError(f"rows, matrices and sizes do not fit together: {shapes}")
    place = place or Placement.here()
    call = Call(
        platform=place.platform,
        capability=capability(),
        devices=place.devices,
        dtype=x_MD.dtype.name,
        sizes=sizes,
        rows=M,
        groups=E,
        inputs=D,
        outputs=F,
    )
    return sized(BACKENDS[choose(backend, call)].run, sizes)(x_MD, w_EDF, sizes_E)
