"""The record of a benchmark: target, environment and results, one line of JSON."""

import dataclasses
import datetime
from importlib.metadata import version
from typing import Any

import jax

from maxhydra.config import Config
from maxhydra.record import redact_argv
from maxhydra.runtime import Machine, original_environment
from maxhydra.runtime.flags import flags_in_effect

BenchRecord = dict[str, Any]
# The data option of a command that does not choose one.
DEFAULT_DATA = "demo"
# Prefixes of overrides that do not affect the result: measurement and storage settings.
IRRELEVANT = ("task", "run.")


@dataclasses.dataclass(frozen=True)
class BenchTarget:
    """A config on a machine; each record lists its choices, overrides and XLA flags."""

    config: Config
    machine: Machine
    choices: dict[str, str]
    overrides: tuple[str, ...]

    def line(self, what: str, **measured: Any) -> BenchRecord:
        model = self.choices.get("model")
        overrides = [text for text in self.overrides if not text.startswith(IRRELEVANT)]
        flags = list(flags_in_effect(original_environment()))
        return {
            "bench": what,
            **({"model": model} if model else {}),
            "overrides": redact_argv(overrides),
            **({"xla_flags": redact_argv(flags)} if flags else {}),
            "device": self.machine.device_kind,
            "devices": self.machine.devices,
            "jax": jax.__version__,
            "flax": version("flax"),
            "date": datetime.date.today().isoformat(),
            **measured,
        }


def with_synthetic_data(config: Config, choices: dict[str, str], overrides: tuple[str, ...]) -> Config:
    """The config with synthetic data, unless the command or an experiment chooses data."""
    is_chosen = choices.get("data", DEFAULT_DATA) != DEFAULT_DATA or any(text.startswith("data") for text in overrides)
    return (
        config if is_chosen else dataclasses.replace(config, data=dataclasses.replace(config.data, source="synthetic"))
    )
