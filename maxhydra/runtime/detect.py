"""Detect the accelerator without jax, whose flags must be set first, and choose the matching conf/hardware option."""

import dataclasses
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.hardware import Hardware, Platform
from maxhydra.config.yaml_files import FAST_LOADER

# JAX_PLATFORMS distinguishes vendors, our platforms do not.
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
    """Device kind of this host, the number of devices this process may use, and the evidence found (`seen`)."""

    platform: Platform
    kind: str
    count: int
    seen: str


def detect(platform: Platform, env: Mapping[str, str], root: Path) -> DetectedDevices:
    """Detect the devices of a platform; `auto` follows JAX_PLATFORMS, else takes the first of GPU, TPU and CPU."""
    if platform is Platform.auto and (name := env.get("JAX_PLATFORMS", "").split(",")[0]):
        platform = JAX_NAMES.get(name, Platform.auto)
    if platform is Platform.gpu:
        return _gpu(env, root) or DetectedDevices(Platform.gpu, "", 0, "no NVIDIA driver found")
    if platform is Platform.tpu:
        return _tpu(env, root) or DetectedDevices(Platform.tpu, "", 0, "no TPU found")
    if platform is Platform.cpu:
        return DetectedDevices(Platform.cpu, "cpu", 1, "CPU requested")
    return _gpu(env, root) or _tpu(env, root) or DetectedDevices(Platform.cpu, "cpu", 1, "no GPU or TPU found")


def cpu_rejects_cache(root: Path) -> bool:
    """True if XLA rejects cached programs that it compiled on this very CPU, with pages of errors (openxla/xla#44565).

    XLA records an LLVM tuning preference as if it were an instruction set. LLVM sets it for CPUs whose gather
    instructions were slowed down by a security fix, which Linux lists as the bug `gds`.
    """
    cpuinfo = root / "proc/cpuinfo"
    return cpuinfo.is_file() and bool(re.search(r"^bugs\s*:.*\bgds\b", cpuinfo.read_text(), re.MULTILINE))


def _gpu(env: Mapping[str, str], root: Path) -> DetectedDevices | None:
    """NVIDIA GPUs that CUDA_VISIBLE_DEVICES makes visible to this process."""
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
    """Parse `GPU 0: NVIDIA H200 (UUID: ...)`; containers may have nvidia-smi but not the driver's files."""
    tool = shutil.which("nvidia-smi", path=env.get("PATH", ""))
    if tool is None:
        return
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False).stdout
    except subprocess.TimeoutExpired:
        return
    yield from re.findall(r"^GPU \d+: (.+?) \(UUID", listed, re.MULTILINE)


def _tpu(env: Mapping[str, str], root: Path) -> DetectedDevices | None:
    """TPU chips, from GKE's TPU_ACCELERATOR_TYPE or from the PCI bus of a TPU VM."""
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


@cache
def hardware_options() -> dict[str, Hardware]:
    """All options of conf/hardware by name."""
    folder = Path(str(files("maxhydra"))) / "conf" / "hardware"
    return {path.stem: hardware_from(_read(path)) for path in sorted(folder.glob("*.yaml"))}


def _read(path: Path) -> Any:
    """Values of a packaged option, without OmegaConf's parser, which takes 5 ms per file."""
    return yaml.load(path.read_text(encoding="utf-8"), Loader=FAST_LOADER) or {}


def hardware_from(values: Any) -> Hardware:
    """Hardware config with these values and the schema's defaults."""
    return cast(Hardware, OmegaConf.to_object(OmegaConf.merge(_defaults(), values)))


@cache
def _defaults() -> DictConfig:
    return OmegaConf.structured(Hardware)


def resolve(hardware: Hardware, detected: DetectedDevices) -> tuple[str, Hardware]:
    """Name of the option that matches the detected device, and its values overridden by those of the config.

    A device without an option gets the name of its platform and no peak figures.
    """
    if hardware.platform is not Platform.auto:
        return _name_of(hardware), with_tuned_flags(hardware)
    name, option = next(
        ((name, option) for name, option in hardware_options().items() if _fits(option, detected)),
        (detected.platform.value, hardware_from({"platform": detected.platform})),
    )
    default = hardware_from({})
    values = {field.name: getattr(hardware, field.name) for field in dataclasses.fields(Hardware)}
    changed = {key: value for key, value in values.items() if value != getattr(default, key)}
    for key in ("peak_tflops", "flag_sets"):
        if key in changed:
            changed[key] = getattr(option, key) | changed[key]
    if "xla_flags" in changed:
        changed["xla_flags"] = change_flags(option.xla_flags, hardware.xla_flags)
    return name, dataclasses.replace(option, **changed)


def with_tuned_flags(hardware: Hardware) -> Hardware:
    """Hardware whose option was chosen by name, with the changes of its config to the flags of the option applied."""
    options = hardware_options().values()
    tuned = [flag for option in options if option.device_kinds == hardware.device_kinds for flag in option.xla_flags]
    return dataclasses.replace(hardware, xla_flags=change_flags(tuned, hardware.xla_flags))


def change_flags(tuned: list[str], given: list[str]) -> list[str]:
    """Add flags, which replace tuned ones of the same name; `~--xla_name` removes a tuned flag."""
    removed = [flag.removeprefix("~") for flag in given if flag.startswith("~")]
    names = [flag.partition("=")[0] for flag in tuned]
    if unknown := [name for name in removed if name not in names]:
        reason, accepted = f"removes {unknown[0]}, which is not set", ", ".join(f"~{name}" for name in names)
        raise ConfigError(Problem("hardware.xla_flags", reason, value=given, accepted=accepted or "flags to add"))
    added = [flag for flag in given if not flag.startswith("~")]
    replaced = {*removed, *(flag.partition("=")[0] for flag in added)}
    return [*(flag for flag, name in zip(tuned, names, strict=True) if name not in replaced), *added]


def matches_device(hardware: Hardware, kind: str) -> bool:
    """True if a device's name matches one of the option's patterns."""
    return any(re.search(pattern, kind, re.IGNORECASE) for pattern in hardware.device_kinds)


def _fits(option: Hardware, detected: DetectedDevices) -> bool:
    return option.platform is detected.platform and matches_device(option, detected.kind)


def _name_of(hardware: Hardware) -> str:
    """Name of the option that a config was composed from; the config itself has only the values."""
    for name, option in hardware_options().items():
        if (option.platform, option.device_kinds) == (hardware.platform, hardware.device_kinds):
            return name
    return hardware.platform.value
