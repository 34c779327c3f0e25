"""The options of `model` as model configs, without composing a run around each, which takes Hydra half a second."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from maxhydra.config.compose.validate import section_from
from maxhydra.config.registry import CONF, description
from maxhydra.config.schema.model import Model

FOLDER = CONF / "model"
OWN = "_self_"


def model_options() -> dict[str, str]:
    """Name -> what its file says of itself, for every option that states a model."""
    return {path.stem: description(path) for path in sorted(FOLDER.glob("*.yaml")) if path.stem != "from_hf"}


def model_option(name: str) -> Model:
    """The model of an option."""
    return model_from(_merged(name), source=str(FOLDER / f"{name}.yaml"))


def model_from(values: Any, *, source: str) -> Model:
    """The model config of values as YAML holds them; ConfigError with every problem, told of `source`."""
    return section_from(Model, values, path="model", source=source)


def option_text(name: str) -> str:
    """All that an option's values depend on."""
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    return text + "".join(option_text(other) for other in _others(text))


def _merged(name: str) -> Any:
    """An option over those that its defaults list names."""
    path: Path = FOLDER / f"{name}.yaml"
    text = path.read_text(encoding="utf-8")
    own = OmegaConf.create(text)
    assert isinstance(own, DictConfig)
    own.pop("defaults", None)
    return OmegaConf.merge(*(_merged(other) for other in _others(text)), own)


def _others(text: str) -> list[str]:
    content = OmegaConf.create(text)
    assert isinstance(content, DictConfig)
    return [str(entry) for entry in content.get("defaults", []) if entry != OWN]
