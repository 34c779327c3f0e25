"""The hardware options of conf/hardware, and which of them fits a device."""

import dataclasses
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from maxhydra.config.schema.hardware import Hardware, Platform
from maxhydra.runtime.detect import DetectedDevices


@cache
def hardware_options() -> dict[str, Hardware]:
    """Every option of conf/hardware by name."""
    folder = Path(str(files("maxhydra"))) / "conf" / "hardware"
    return {path.stem: hardware_from(OmegaConf.load(path)) for path in sorted(folder.glob("*.yaml"))}


def hardware_from(values: Any) -> Hardware:
    """The schema's defaults under some values."""
    return cast(Hardware, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Hardware), values)))


def resolve(hardware: Hardware, found: DetectedDevices) -> tuple[str, Hardware]:
    """Name and values of the option that fits the device found, under what the config itself sets.

    A device that no option knows keeps its platform's name and has no ceilings.
    """
    if hardware.platform is not Platform.auto:
        return _name_of(hardware), hardware
    name, option = next(
        ((name, option) for name, option in hardware_options().items() if _fits(option, found)),
        (found.platform.value, hardware_from({"platform": found.platform})),
    )
    default = hardware_from({})
    chosen = {field.name: getattr(hardware, field.name) for field in dataclasses.fields(Hardware)}
    changed = {key: value for key, value in chosen.items() if value != getattr(default, key)}
    for key in ("peak_tflops", "flag_sets"):
        if key in changed:
            changed[key] = getattr(option, key) | changed[key]
    return name, dataclasses.replace(option, **changed)


def matches(hardware: Hardware, kind: str) -> bool:
    """Whether a device's name is one of the option's."""
    return any(re.search(pattern, kind, re.IGNORECASE) for pattern in hardware.device_kinds)


def _fits(option: Hardware, found: DetectedDevices) -> bool:
    return option.platform is found.platform and matches(option, found.kind)


def _name_of(hardware: Hardware) -> str:
    """The option a config was made from: the composed config holds its values, not its name."""
    for name, option in hardware_options().items():
        if (option.platform, option.device_kinds) == (hardware.platform, hardware.device_kinds):
            return name
    return hardware.platform.value
