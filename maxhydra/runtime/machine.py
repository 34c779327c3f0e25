"""Start jax on the configured hardware, and describe the resulting machine."""

import dataclasses
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.hardware import Hardware, Platform, Precision
from maxhydra.runtime import peers, signals
from maxhydra.runtime.detect import (
    JAX_NAMES,
    DetectedDevices,
    cpu_rejects_cache,
    detect,
    hardware_from,
    matches_device,
    resolve,
    with_tuned_flags,
)
from maxhydra.runtime.distributed import detect_cluster, initialize_distributed
from maxhydra.runtime.flags import backend_environment, flags_in_effect
from maxhydra.runtime.program_cache import write_programs_atomically

INSTALL = {Platform.gpu: "pip install 'maxhydra[gpu]'", Platform.tpu: "pip install 'maxhydra[tpu]'"}


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices of a run and the settings that they were started with."""

    hardware: Hardware
    name: str
    """Option of the hardware group, or the platform if no option matches the device."""
    device_kind: str
    devices: int
    """Number of devices of all processes."""
    local_devices: int
    process_index: int
    process_count: int
    memory_gib: float | None
    """Memory per device as reported by its allocator, else from the hardware option."""
    xla_flags: tuple[str, ...]
    notes: tuple[str, ...]
    """Messages about what was detected and chosen."""


def start(hardware: Hardware) -> Machine:
    """Detect the hardware, set flags, platform and cache, connect the processes, start the backend, in that order.

    The only function that changes the environment. A process starts jax once; a second call must need the same
    environment.
    """
    return _start(hardware, original_environment())


def start_on_host(compile_for: Hardware | None = None) -> Machine:
    """Start only the CPU, ignoring JAX_PLATFORMS: for commands that plan jobs but leave the devices to them.

    `compile_for`: hardware that programs are compiled for, whose numerical settings apply; of simulated devices also
    their number and flags.
    """
    environment = {name: value for name, value in original_environment().items() if name != "JAX_PLATFORMS"}
    host = hardware_from({"platform": Platform.cpu})
    if compile_for is not None:
        settings = ["matmul_precision", "debug_nans"]
        settings += ["simulated_devices", "xla_flags"] if compile_for.platform is Platform.cpu else []
        tuned = with_tuned_flags(compile_for)
        host = dataclasses.replace(host, **{name: getattr(tuned, name) for name in settings})
    return _start(host, environment)


def predict_hardware(hardware: Hardware) -> Hardware:
    """The hardware that a new process with this one's original environment would detect; starts nothing."""
    return resolve(hardware, detect(hardware.platform, original_environment(), Path("/")))[1]


def _start(hardware: Hardware, environment: Mapping[str, str]) -> Machine:
    detected = detect(hardware.platform, os.environ, Path("/"))
    name, resolved = resolve(hardware, detected)
    notes = [f"{detected.seen}: hardware={name}"]
    _set_environment(resolved, environment)
    notes += _configure(resolved, os.environ)
    cluster = detect_cluster(resolved.distributed.cluster, os.environ, detected)
    notes.append(str(cluster) if cluster else "one process")
    if cluster is not None and not jax.distributed.is_initialized():
        with signals.ending_at_once():
            initialize_distributed(cluster, resolved.distributed, resolved.platform)
            peers.start(resolved.distributed)
    device = _start_backend(resolved, detected)
    if resolved.device_kinds and not matches_device(resolved, device.device_kind):
        notes.append(f"device kind is {device.device_kind}; its peak figures are those of hardware={name}")
    stats = device.memory_stats() or {}
    return Machine(
        hardware=resolved,
        name=name,
        device_kind=device.device_kind,
        devices=jax.device_count(),
        local_devices=jax.local_device_count(),
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        memory_gib=stats["bytes_limit"] / 2**30 if "bytes_limit" in stats else resolved.memory_gib,
        xla_flags=flags_in_effect(os.environ),
        notes=tuple(notes),
    )


@cache
def original_environment() -> dict[str, str]:
    """The environment before the first start in this process, which subprocesses should get."""
    return dict(os.environ)


_variables_at_start: dict[str, str] = {}


def _set_environment(hardware: Hardware, environment: Mapping[str, str]) -> None:
    variables = backend_environment(hardware, environment)
    for name in sorted(variables.keys() | _variables_at_start.keys()) if _variables_at_start else ():
        old, new = _variables_at_start.get(name, ""), variables.get(name, "")
        if old != new:
            reason = f"needs {name}={new}, but this process has already started jax with {name}={old}"
            raise ConfigError(Problem("hardware", reason, hint="use a separate process for each hardware option"))
    _variables_at_start.update(variables)
    os.environ.update(variables)


def _configure(hardware: Hardware, env: Mapping[str, str]) -> list[str]:
    """Set jax.config. jax may have been imported already, so the platform must be set here, not only in `env`."""
    precision = hardware.matmul_precision
    folder, note = _cache_folder(hardware, env)
    settings = {
        "jax_platforms": env["JAX_PLATFORMS"],
        "jax_default_matmul_precision": None if precision is Precision.default else precision.value,
        "jax_debug_nans": hardware.debug_nans,
        # Random numbers do not depend on the mesh.
        "jax_threefry_partitionable": True,
        "jax_compilation_cache_dir": folder,
        # Below this, compiling again is usually faster than a cache lookup.
        "jax_persistent_cache_min_compile_time_secs": float(env.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", 1)),
    }
    for key, value in settings.items():
        jax.config.update(key, value)
    write_programs_atomically()
    compilation_cache.reset_cache()
    return [note]


def _cache_folder(hardware: Hardware, env: Mapping[str, str]) -> tuple[str | None, str]:
    """Compilation cache folder and a note about it; JAX_COMPILATION_CACHE_DIR overrides the schema's default."""
    folder = hardware.compilation_cache
    if folder == hardware_from({}).compilation_cache:
        folder = env.get("JAX_COMPILATION_CACHE_DIR", folder)
    if folder is None:
        return None, "compilation cache is off"
    if hardware.platform is Platform.cpu and cpu_rejects_cache(Path("/")):
        return None, "compilation cache is off: XLA rejects cached programs on this CPU (openxla/xla#44565)"
    path = Path(folder).expanduser()
    return str(path), f"compilation cache is {path}"


def _start_backend(hardware: Hardware, detected: DetectedDevices) -> jax.Device:
    """Start the backend; ConfigError unless it has the requested platform and number of devices."""
    platform = hardware.platform
    try:
        device = jax.local_devices()[0]
    except RuntimeError as error:
        reason = f"jax cannot start this platform: {str(error).splitlines()[0]}"
        hint = f"{INSTALL.get(platform, 'pip install jax')}, or choose hardware=cpu"
        raise ConfigError(Problem("hardware.platform", reason, value=platform.value, hint=hint)) from error
    actual = JAX_NAMES[device.platform]
    if actual is not platform:
        reason = f"jax started {jax.local_device_count()} x {device.device_kind} ({actual.value}); {detected.seen}"
        hint = f"{INSTALL.get(platform, 'start a separate process')}, or choose hardware={actual.value}"
        raise ConfigError(Problem("hardware.platform", reason, value=platform.value, hint=hint))
    if hardware.simulated_devices not in (None, jax.local_device_count()):
        reason = f"jax started with {jax.local_device_count()}, set by XLA_FLAGS or by an earlier start in this process"
        value, hint = hardware.simulated_devices, "unset XLA_FLAGS, or start a separate process"
        raise ConfigError(Problem("hardware.simulated_devices", reason, value=value, hint=hint))
    return device
