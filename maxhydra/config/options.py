"""Options of the group `model` as model configs, without composing a run for each (half a second in Hydra)."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from maxhydra.config.compose.validate import section_from
from maxhydra.config.registry import CONF, description
from maxhydra.config.schema.model import Model

FOLDER = CONF / "model"
SELF = "_self_"


def model_options() -> dict[str, str]:
    """Return the description of every option that defines a model."""
    return {path.stem: description(path) for path in sorted(FOLDER.glob("*.yaml")) if path.stem != "from_hf"}


def model_option(name: str) -> Model:
    """Return the model of an option."""
    return model_from(_merged(name), source=str(FOLDER / f"{name}.yaml"))


def model_from(values: Any, *, source: str) -> Model:
    """Return the model of plain values; raise ConfigError with every problem, attributed to `source`."""
    return section_from(Model, values, path="model", source=source)


def option_text(name: str) -> str:
    """Return the text of an option file and of all options that it inherits from."""
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    return text + "".join(option_text(parent) for parent in _parents(text))


def _merged(name: str) -> Any:
    """Merge an option over those in its defaults list."""
    path: Path = FOLDER / f"{name}.yaml"
    text = path.read_text(encoding="utf-8")
    values = OmegaConf.create(text)
    assert isinstance(values, DictConfig)
    values.pop("defaults", None)
    return OmegaConf.merge(*(_merged(parent) for parent in _parents(text)), values)


def _parents(text: str) -> list[str]:
    content = OmegaConf.create(text)
    assert isinstance(content, DictConfig)
    return [str(entry) for entry in content.get("defaults", []) if entry != SELF]
