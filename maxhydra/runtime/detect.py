"""Finds the accelerator from files and variables, without jax: flags must be set before a backend starts."""

import dataclasses
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from maxhydra.config.schema.hardware import Platform

# JAX_PLATFORMS names vendors where our platforms name kinds of chip.
JAX_NAMES = {"cpu": Platform.cpu, "cuda": Platform.gpu, "gpu": Platform.gpu, "rocm": Platform.gpu, "tpu": Platform.tpu}

# PCI device ids of vendor Google; v2 and v3 share one.
TPU_PCI_IDS = {
    "0x0027": "TPU v3",
    "0x005e": "TPU v4",
    "0x0062": "TPU v5p",
    "0x0063": "TPU v5e",
    "0x006f": "TPU v6e",
    "0x0076": "TPU7x",
}


@dataclasses.dataclass(frozen=True)
class DetectedDevices:
    """A kind of device on this host, how many of them this process may use, and what was seen."""

    platform: Platform
    kind: str
    count: int
    seen: str


def detect(platform: Platform, env: Mapping[str, str], root: Path) -> DetectedDevices:
    """The devices of a platform; for `auto` those of JAX_PLATFORMS, else the first of GPU, TPU and CPU that is here."""
    asked = platform
    if asked is Platform.auto and (named := env.get("JAX_PLATFORMS", "").split(",")[0]):
        asked = JAX_NAMES.get(named, Platform.auto)
    if asked is Platform.gpu:
        return _gpu(env, root) or DetectedDevices(Platform.gpu, "", 0, "no NVIDIA driver is here")
    if asked is Platform.tpu:
        return _tpu(env, root) or DetectedDevices(Platform.tpu, "", 0, "no TPU is here")
    if asked is Platform.cpu:
        return DetectedDevices(Platform.cpu, "cpu", 1, "the CPU was asked for")
    return _gpu(env, root) or _tpu(env, root) or DetectedDevices(Platform.cpu, "cpu", 1, "neither GPU nor TPU is here")


def cpu_rejects_cache(root: Path) -> bool:
    """Whether XLA rejects, with pages of errors, the very programs that it compiled on this CPU (openxla/xla#44565).

    It records a tuning preference of LLVM as if it were an instruction set. LLVM has that preference for the CPUs whose
    gather instructions were slowed down by a security fix, which Linux lists under the bug `gds`.
    """
    cpuinfo = root / "proc/cpuinfo"
    return cpuinfo.is_file() and bool(re.search(r"^bugs\s*:.*\bgds\b", cpuinfo.read_text(), re.MULTILINE))


def _gpu(env: Mapping[str, str], root: Path) -> DetectedDevices | None:
    """NVIDIA GPUs that CUDA_VISIBLE_DEVICES lets this process see."""
    kinds = list(_driver_models(root)) or list(_nvidia_smi_models(env))
    visible = kinds
    if "CUDA_VISIBLE_DEVICES" in env:
        visible = [name for name in env["CUDA_VISIBLE_DEVICES"].split(",") if name.strip() not in ("", "-1")]
    if not kinds or not visible:
        return None
    return DetectedDevices(
        Platform.gpu, kinds[0], len(visible), f"{len(visible)} x {kinds[0]} of {len(kinds)} on this host"
    )


def _driver_models(root: Path) -> Iterator[str]:
    for path in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        if model := re.search(r"^Model:\s*(.+?)\s*$", path.read_text(), re.MULTILINE):
            yield model[1]


def _nvidia_smi_models(env: Mapping[str, str]) -> Iterator[str]:
    """`GPU 0: NVIDIA H200 (UUID: ...)`; containers can lack the driver's files and still have the tool."""
    tool = shutil.which("nvidia-smi", path=env.get("PATH", ""))
    if tool is None:
        return
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False).stdout
    except subprocess.TimeoutExpired:
        return
    yield from re.findall(r"^GPU \d+: (.+?) \(UUID", listed, re.MULTILINE)


def _tpu(env: Mapping[str, str], root: Path) -> DetectedDevices | None:
    """TPU chips: GKE names the type in the environment; a TPU VM shows the chips on its PCI bus."""
    chips = [
        TPU_PCI_IDS[identity]
        for vendor in sorted(root.glob("sys/bus/pci/devices/*/vendor"))
        if vendor.read_text().strip() == "0x1ae0"
        and (identity := (vendor.parent / "device").read_text().strip()) in TPU_PCI_IDS
    ]
    if accelerator := env.get("TPU_ACCELERATOR_TYPE"):
        return DetectedDevices(Platform.tpu, accelerator, len(chips), f"TPU_ACCELERATOR_TYPE={accelerator}")
    return (
        DetectedDevices(Platform.tpu, chips[0], len(chips), f"{len(chips)} x {chips[0]} on the PCI bus")
        if chips
        else None
    )
