"""Options of conf/hardware, and the one that matches a detected device."""

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
    """All options of conf/hardware by name."""
    folder = Path(str(files("maxhydra"))) / "conf" / "hardware"
    return {path.stem: hardware_from(OmegaConf.load(path)) for path in sorted(folder.glob("*.yaml"))}


def hardware_from(values: Any) -> Hardware:
    """Hardware config with these values and the schema's defaults."""
    return cast(Hardware, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Hardware), values)))


def resolve(hardware: Hardware, detected: DetectedDevices) -> tuple[str, Hardware]:
    """Name of the option that matches the detected device, and its values overridden by those of the config.

    A device without an option gets the name of its platform and no peak figures.
    """
    if hardware.platform is not Platform.auto:
        return _name_of(hardware), hardware
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
    return name, dataclasses.replace(option, **changed)


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
