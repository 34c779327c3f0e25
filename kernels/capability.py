"""What the tables of all operations have in common: platforms, GPUs, devices and number formats."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from maxhydra.kernels.dispatch import either
from maxhydra.kernels.tiles import Sizes, misfits


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallSpec:
    """What a backend must cope with, known before anything runs."""

    platform: str
    devices: int
    dtype: str
    capability: str | None = None
    """Compute capability of an NVIDIA GPU."""
    sizes: Sizes = ()
    """Asked of the kernel's tile."""


Call = TypeVar("Call", bound=CallSpec)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capability(Generic[Call]):
    """What a backend can cope with: a row of a capability table, to which an operation adds its own fields."""

    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")
    capabilities: tuple[str, ...] | None = None
    """Compute capabilities of the GPUs; None: any."""
    devices: int | None = None
    """As many as it can be spread over; None: any number."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    cut: Callable[[Call], Mapping[str, int]] | None = None
    """What the sizes of its tile must divide, by name; None: it has none to choose."""

    def refusals(self, call: Call) -> tuple[str, ...]:
        """Why this backend cannot serve the call; empty if it can."""
        needs = (
            (call.platform in self.platforms, f"runs on {either(self.platforms)}, not {call.platform}"),
            (
                self.capabilities is None or call.capability in self.capabilities,
                f"needs a GPU of compute capability {either(self.capabilities or ())}, "
                f"not {call.capability or call.platform}",
            ),
            (self.devices in (None, call.devices), f"runs on {self.devices} device, not {call.devices}"),
            (call.dtype in self.dtypes, f"takes {either(self.dtypes)}, not {call.dtype}"),
            *self.needs(call),
        )
        return (*(reason for is_met, reason in needs if not is_met), *misfits(call, self.cut))

    def needs(self, call: Call) -> tuple[tuple[bool, str], ...]:
        """What else must be met, and what to say where it is not."""
        return ()
