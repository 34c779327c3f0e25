"""Options of the group `model` as model configs, without composing a run for each (half a second in Hydra).

Functions take the folders of options, by default the packaged one. Of options with the same name the first one counts,
as in Hydra's search path.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from maxhydra.config.compose.validate import section_from
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.registry import CONF, description
from maxhydra.config.schema.model import Model

PACKAGED = (CONF,)
SELF = "_self_"


def model_options(folders: Sequence[Path] = PACKAGED) -> dict[str, str]:
    """Return the description of every option that defines a model."""
    return {name: description(path) for name, path in _paths(folders).items() if not name.startswith("from_hf")}


def model_option(name: str, folders: Sequence[Path] = PACKAGED) -> Model:
    """Return the model of an option."""
    return model_from(_merged(name, folders), source=str(_paths(folders)[name]))


def model_from(values: Any, *, source: str) -> Model:
    """Return the model of plain values; raise ConfigError with every problem, attributed to `source`."""
    return section_from(Model, values, path="model", source=source)


def option_text(name: str, folders: Sequence[Path] = PACKAGED) -> str:
    """Return the text of an option file and of all options that it inherits from."""
    path = _paths(folders)[name]
    return path.read_text(encoding="utf-8") + "".join(option_text(parent, folders) for parent in _parents(path))


def _paths(folders: Sequence[Path]) -> dict[str, Path]:
    """Return the files of the options by name, those of the first folder first."""
    paths: dict[str, Path] = {}
    for folder in folders:
        for path in sorted((folder / "model").glob("*.yaml")):
            paths.setdefault(path.stem, path)
    return paths


def _merged(name: str, folders: Sequence[Path]) -> Any:
    """Merge an option over those in its defaults list."""
    paths = _paths(folders)
    values = OmegaConf.create(paths[name].read_text(encoding="utf-8"))
    assert isinstance(values, DictConfig)
    values.pop("defaults", None)
    parents = _parents(paths[name])
    if unknown := [parent for parent in parents if parent not in paths]:
        accepted = "names of other options of the group model, and _self_"
        raise ConfigError(Problem(str(paths[name]), "has a defaults list that is not supported", unknown[0], accepted))
    return OmegaConf.merge(*(_merged(parent, folders) for parent in parents), values)


def _parents(path: Path) -> list[str]:
    content = OmegaConf.create(path.read_text(encoding="utf-8"))
    assert isinstance(content, DictConfig)
    return [str(entry).removeprefix("/model/") for entry in content.get("defaults", []) if entry != SELF]
