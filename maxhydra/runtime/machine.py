"""Starts jax on the hardware of the config, and says what it stands on."""

import dataclasses
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.hardware import Hardware, Platform, Precision
from maxhydra.runtime.detect import JAX_NAMES, DetectedDevices, cpu_rejects_cache, detect
from maxhydra.runtime.distributed import detect_cluster, initialize_distributed
from maxhydra.runtime.flags import backend_environment, flags_in_effect
from maxhydra.runtime.hardware_options import hardware_from, matches, resolve

INSTALL = {Platform.gpu: "pip install 'maxhydra[gpu]'", Platform.tpu: "pip install 'maxhydra[tpu]'"}


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices of a run as they were found, and the settings they were started with."""

    hardware: Hardware
    name: str
    """Option of the hardware group, or the platform where no option knows the device."""
    device_kind: str
    devices: int
    """In all processes together."""
    local_devices: int
    process_index: int
    process_count: int
    memory_gib: float | None
    """Of a device, as its allocator says, else as the option says."""
    xla_flags: tuple[str, ...]
    notes: tuple[str, ...]
    """Sentences on what was seen."""

    def peak_tflops(self, dtype: str) -> float | None:
        """Dense matrix TFLOP/s of one device in a number format, where they are known."""
        return self.hardware.peak_tflops.get(dtype)


def start(hardware: Hardware) -> Machine:
    """Find the hardware, set flags, platform and cache, join the other processes, start the backend, in that order.

    The only place that touches the environment. A process starts jax once: another start must ask for the same.
    """
    return _start(hardware, original_environment())


def start_on_host() -> Machine:
    """The CPU alone, whatever JAX_PLATFORMS says: for what only plans for devices, and leaves them to others."""
    named = {name: value for name, value in original_environment().items() if name != "JAX_PLATFORMS"}
    return _start(hardware_from({"platform": Platform.cpu}), named)


def predict_hardware(hardware: Hardware) -> Hardware:
    """The hardware that a process of its own, started as this one was, would find. Nothing is started."""
    return resolve(hardware, detect(hardware.platform, original_environment(), Path("/")))[1]


def _start(hardware: Hardware, before: Mapping[str, str]) -> Machine:
    found = detect(hardware.platform, os.environ, Path("/"))
    name, resolved = resolve(hardware, found)
    notes = [f"{found.seen}: hardware={name}"]
    _set_environment(resolved, before)
    notes += _configure(resolved, os.environ)
    meeting = detect_cluster(resolved.distributed.cluster, os.environ, found)
    notes.append(str(meeting) if meeting else "one process")
    if meeting is not None and not jax.distributed.is_initialized():
        initialize_distributed(meeting, resolved.distributed, resolved.platform)
    device = _started(resolved, found)
    if resolved.device_kinds and not matches(resolved, device.device_kind):
        notes.append(f"the device calls itself {device.device_kind}; its ceilings are taken from {name}")
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
    """The environment as it was before the first start in this process: what a process of its own is given."""
    return dict(os.environ)


_started_with: dict[str, str] = {}


def _set_environment(hardware: Hardware, before: Mapping[str, str]) -> None:
    variables = backend_environment(hardware, before)
    for name in sorted(variables.keys() | _started_with.keys()) if _started_with else ():
        then, now = _started_with.get(name, ""), variables.get(name, "")
        if then != now:
            reason = f"this process has started jax with {name}={then}, and now needs {name}={now}"
            raise ConfigError(Problem("hardware", reason, hint="run each kind of hardware in a process of its own"))
    _started_with.update(variables)
    os.environ.update(variables)


def _configure(hardware: Hardware, env: Mapping[str, str]) -> list[str]:
    """jax's own settings. jax may have been imported already, so its platform is set here and not only in `env`."""
    precision = hardware.matmul_precision
    folder, note = _cache_folder(hardware, env)
    settings = {
        "jax_platforms": env["JAX_PLATFORMS"],
        "jax_default_matmul_precision": None if precision is Precision.default else precision.value,
        "jax_debug_nans": hardware.debug_nans,
        # The same random numbers whatever the mesh.
        "jax_threefry_partitionable": True,
        "jax_compilation_cache_dir": folder,
        # A program that compiles faster than this is cheaper to compile again than to find, as a rule.
        "jax_persistent_cache_min_compile_time_secs": float(env.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", 1)),
    }
    for key, value in settings.items():
        jax.config.update(key, value)
    compilation_cache.reset_cache()
    return [note]


def _cache_folder(hardware: Hardware, env: Mapping[str, str]) -> tuple[str | None, str]:
    """Folder of compiled programs and a sentence on it; JAX_COMPILATION_CACHE_DIR goes before the schema's default."""
    folder = hardware.compilation_cache
    if folder == hardware_from({}).compilation_cache:
        folder = env.get("JAX_COMPILATION_CACHE_DIR", folder)
    if folder is None:
        return None, "compiled programs are not kept"
    if hardware.platform is Platform.cpu and cpu_rejects_cache(Path("/")):
        return None, "compiled programs are not kept: XLA refuses them on this CPU"
    path = Path(folder).expanduser()
    return str(path), f"compiled programs are kept in {path}"


def _started(hardware: Hardware, found: DetectedDevices) -> jax.Device:
    """Start the backend, and see that it is the one asked for."""
    wanted = hardware.platform
    try:
        device = jax.local_devices()[0]
    except RuntimeError as error:
        reason = f"jax cannot start it: {str(error).splitlines()[0]}"
        hint = f"{INSTALL.get(wanted, 'pip install jax')}, or choose hardware=cpu"
        raise ConfigError(Problem("hardware.platform", reason, value=wanted.value, hint=hint)) from error
    there = JAX_NAMES[device.platform]
    if there is not wanted:
        reason = f"jax has {jax.local_device_count()} x {device.device_kind} ({there.value}); {found.seen}"
        hint = f"{INSTALL.get(wanted, 'start it in a process of its own')}, or choose hardware={there.value}"
        raise ConfigError(Problem("hardware.platform", reason, value=wanted.value, hint=hint))
    if hardware.simulated_devices not in (None, jax.local_device_count()):
        reason = f"jax started with {jax.local_device_count()}, by XLA_FLAGS of the environment or an earlier run here"
        value = hardware.simulated_devices
        raise ConfigError(Problem("hardware.simulated_devices", reason, value=value, hint="start a process of its own"))
    return device
