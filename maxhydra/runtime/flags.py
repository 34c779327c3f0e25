"""Environment variables with XLA flags and the platform, which jax reads once, when the backend starts.

`slice_devices` are virtual devices of a TPU slice, for ahead-of-time compilation: needs libtpu but no TPU.
"""

import importlib.util
import os
from collections.abc import Mapping, Sequence

import jax
from jax.experimental import topologies

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.hardware import Hardware, Platform
from maxhydra.runtime.detect import JAX_NAMES

# The CPU backend stays available for host-side arrays; the first name is the default backend.
JAX_PLATFORMS = {Platform.cpu: "cpu", Platform.gpu: "cuda,cpu", Platform.tpu: "tpu,cpu"}


def merge_flags(flags: list[str], existing: str) -> str:
    """Add flags to those of an environment variable, which take precedence."""
    existing_names = {_name(flag) for flag in existing.split()}
    return " ".join([*(flag for flag in flags if _name(flag) not in existing_names), *existing.split()])


def override_flags(flags: list[str], others: list[str]) -> list[str]:
    """Add `others` to the flags, replacing flags of the same name."""
    return merge_flags(flags, " ".join(others)).split()


def backend_environment(hardware: Hardware, env: Mapping[str, str]) -> dict[str, str]:
    """Environment variables to set before the backend starts."""
    invalid = [flag for flag in hardware.xla_flags if not flag.startswith("--xla_") or " " in flag]
    if invalid:
        reason = f"{invalid[0]!r} is not an XLA flag"
        raise ConfigError(
            Problem("hardware.xla_flags", reason, value=hardware.xla_flags, accepted="--xla_name=value, ...")
        )
    variables = {"JAX_PLATFORMS": _platforms(hardware.platform, env.get("JAX_PLATFORMS", ""))}
    name = "LIBTPU_INIT_ARGS" if hardware.platform is Platform.tpu else "XLA_FLAGS"
    flags = list(hardware.xla_flags)
    if hardware.simulated_devices is not None:
        flags.append(f"--xla_force_host_platform_device_count={hardware.simulated_devices}")
    if merged := merge_flags(flags, env.get(name, "")):
        variables[name] = merged
    return variables


def flags_in_effect(env: Mapping[str, str]) -> tuple[str, ...]:
    """All XLA flags that the backend reads."""
    return tuple(f"{env.get('XLA_FLAGS', '')} {env.get('LIBTPU_INIT_ARGS', '')}".split())


def _platforms(platform: Platform, existing: str) -> str:
    """JAX_PLATFORMS for a platform; ConfigError if it is already set and starts with another platform."""
    if not existing:
        return JAX_PLATFORMS[platform]
    if JAX_NAMES.get(existing.split(",")[0]) is not platform:
        raise ConfigError(
            Problem(
                "hardware.platform",
                f"the environment sets JAX_PLATFORMS={existing}",
                value=platform.value,
                hint="unset JAX_PLATFORMS, or choose hardware=auto to follow it",
            )
        )
    return existing


def _name(flag: str) -> str:
    return flag.split("=")[0]


# Without these libtpu searches for a TPU on this host and for other workers.
LIBTPU_ENVIRONMENT = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def slice_devices(name: str, *, slices: int, hardware: Hardware) -> Sequence[jax.Device]:
    """Devices of a topology such as v5e:2x4; sets the XLA flags of the hardware option."""
    if importlib.util.find_spec("libtpu") is None:
        hint = "pip install 'jax[tpu]', which pins the matching libtpu; it requires Linux on x86-64"
        raise ConfigError(Problem("task.topology", "libtpu is not installed", value=name, hint=hint))
    flags = merge_flags(hardware.xla_flags, os.environ.get("LIBTPU_INIT_ARGS", ""))
    os.environ.update({**LIBTPU_ENVIRONMENT, **os.environ, "LIBTPU_INIT_ARGS": flags})
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, num_slices=slices).devices
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError, NotImplementedError) as error:
        reason = f"is not a topology that libtpu knows: {str(error).splitlines()[0]}"
        accepted = "TPU generation and slice shape, such as v5e:2x4, v5p:2x2x1 or v6e:4x4"
        raise ConfigError(Problem("task.topology", reason, value=name, accepted=accepted)) from None
