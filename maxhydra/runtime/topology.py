"""Devices that are not attached, for ahead-of-time compilation.

A TPU slice, such as v5e:2x4, needs libtpu and no TPU. GPUs, such as h200:8 or h200:4x8 (4 hosts of 8), need the CUDA
plugin of jax and no GPU: the plugin takes a description of the GPU instead. cpu:8 are the simulated devices of this
process (hardware.simulated_devices).
"""

import dataclasses
import importlib.util
import os
import re
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.hardware import Hardware
from maxhydra.runtime.detect import with_tuned_flags
from maxhydra.runtime.flags import merge_flags

# Without these libtpu searches for a TPU on this host and for other workers.
LIBTPU_ENVIRONMENT = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
GPU = re.compile(r"(a100|h100|h200|b200|cpu):(?:(\d+)x)?(\d+)")
ACCEPTED = "GPUs such as h200:8 or h200:4x8 (4 hosts of 8), or a TPU slice such as v5e:2x4, v5p:2x2x1 or v6e:4x4"
CUDA_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


@dataclasses.dataclass(frozen=True)
class GpuModel:
    """What the compiler needs to know about a GPU: limits and rates from NVIDIA's data sheets."""

    name: str
    capability: int
    """Major compute capability; the minor one is 0."""
    cores: int
    """Streaming multiprocessors."""
    clock_ghz: float
    memory_bytes: int
    bandwidth: int
    """Bytes per second of device memory."""
    l2_bytes: int
    shared_bytes: int
    """Shared memory of a multiprocessor; a block may use 1 KiB less."""


GPU_MODELS = {
    "a100": GpuModel("NVIDIA A100-SXM4-80GB", 8, 108, 1.41, 85_095_874_560, 2_039_000_000_000, 41_943_040, 167_936),
    "h100": GpuModel("NVIDIA H100 80GB HBM3", 9, 132, 1.98, 84_942_979_072, 3_352_320_000_000, 52_428_800, 233_472),
    "h200": GpuModel("NVIDIA H200", 9, 132, 1.98, 151_397_597_184, 4_800_000_000_000, 52_428_800, 233_472),
    "b200": GpuModel("NVIDIA B200", 10, 148, 1.965, 191_514_411_008, 7_672_320_000_000, 132_644_864, 233_472),
}
# Versions that the compiled program may rely on: CUDA 13 and cuDNN 9, as the CUDA plugin requires them.
CUDA_VERSION, CUDNN_VERSION = "13.0.0", (9, 10, 0)


def absent_devices(name: str, *, slices: int, hardware: Hardware) -> Sequence[jax.Device]:
    """Devices of a topology; ConfigError if it is unknown or its compiler is not installed."""
    found = GPU.fullmatch(name)
    if found is None:
        return _tpu_devices(name, slices=slices, hardware=hardware)
    model, hosts, count = found.group(1), int(found.group(2) or 1), int(found.group(3))
    if model == "cpu":
        return _simulated_devices(name, hosts * count)
    return _gpu_devices(name, GPU_MODELS[model], topology=f"{slices}x{hosts}x{count}")


def compiler_options(hardware: Hardware, devices: Sequence[jax.Device]) -> dict[str, str | bool]:
    """The XLA flags of the hardware option that the environment does not set, as options of one compilation.

    Only for GPUs that are not attached: for attached devices the flags are in the environment already, and libtpu
    reads those for a TPU slice from its own variable.
    """
    if devices[0].platform != "gpu" or devices[0].client.runtime_type != "compile_only_runtime":
        return {}
    flags = merge_flags(with_tuned_flags(hardware).xla_flags, os.environ.get("XLA_FLAGS", "")).split()
    pairs = (flag.removeprefix("--").partition("=") for flag in flags if flag.startswith("--xla_gpu"))
    return {name: {"true": True, "false": False}.get(value, value) for name, _, value in pairs}


def _simulated_devices(name: str, count: int) -> Sequence[jax.Device]:
    devices = jax.devices("cpu")
    if len(devices) != count:
        reason = f"this process has {len(devices)} simulated devices"
        hint = f"set hardware=cpu hardware.simulated_devices={count}"
        raise ConfigError(Problem("task.topology", reason, value=name, hint=hint))
    return devices


def _gpu_devices(name: str, model: GpuModel, *, topology: str) -> Sequence[jax.Device]:
    if all(_is_missing(plugin) for plugin in CUDA_PLUGINS):
        hint = "pip install 'jax-cuda13-plugin[with-cuda]' of jax's version; no GPU is needed"
        raise ConfigError(Problem("task.topology", "the CUDA plugin of jax is not installed", value=name, hint=hint))
    # The plugin otherwise rejects a host without a CUDA driver.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        return topologies.get_topology_desc(
            platform="cuda", topology_name=name, topology=topology, target_config=target_config(model)
        ).devices
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError, NotImplementedError) as error:
        reason = f"is not a topology that the CUDA plugin accepts: {str(error).splitlines()[0]}"
        raise ConfigError(Problem("task.topology", reason, value=name, accepted=ACCEPTED)) from None


def _is_missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True


def target_config(model: GpuModel) -> str:
    """The GPU as a text proto of XLA's GpuTargetConfigProto, which the driver would otherwise fill in."""
    major, minor, patch = CUDNN_VERSION
    return f"""
gpu_device_info {{
  name: "{model.name}" device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability {model.capability}.0a"
  cuda_compute_capability {{ major: {model.capability} feature_extension: ACCELERATED_FEATURES }}
  core_count: {model.cores} fpus_per_core: 128 clock_rate_ghz: {model.clock_ghz}
  device_memory_size: {model.memory_bytes} memory_bandwidth: {model.bandwidth} l2_cache_size: {model.l2_bytes}
  shared_memory_per_core: {model.shared_bytes} shared_memory_per_block: 49152
  shared_memory_per_block_optin: {model.shared_bytes - 1024}
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  device_address_bits: 64 ecc_enabled: true pcie_bandwidth: 34359738368
  driver_version: "{CUDA_VERSION}" runtime_version: "{CUDA_VERSION}" compile_time_toolkit_version: "{CUDA_VERSION}"
  dnn_version: "{major}.{minor}.{patch}"
  device_interconnect_info {{ active_links: {12 if model.capability == 8 else 18} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: {major} minor: {minor} patch: {patch} }}
device_description_str: "{model.name}"
"""


def _tpu_devices(name: str, *, slices: int, hardware: Hardware) -> Sequence[jax.Device]:
    """Devices of a TPU slice; sets the XLA flags of the hardware option."""
    if importlib.util.find_spec("libtpu") is None:
        hint = "pip install 'jax[tpu]', which pins the matching libtpu; it requires Linux on x86-64"
        reason = "libtpu is not installed, which a TPU slice requires"
        raise ConfigError(Problem("task.topology", reason, value=name, accepted=ACCEPTED, hint=hint))
    flags = merge_flags(with_tuned_flags(hardware).xla_flags, os.environ.get("LIBTPU_INIT_ARGS", ""))
    os.environ.update({**LIBTPU_ENVIRONMENT, **os.environ, "LIBTPU_INIT_ARGS": flags})
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, num_slices=slices).devices
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError, NotImplementedError) as error:
        reason = f"is not a topology that libtpu knows: {str(error).splitlines()[0]}"
        raise ConfigError(Problem("task.topology", reason, value=name, accepted=ACCEPTED)) from None
