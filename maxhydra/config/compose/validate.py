"""From the composed values to the config: what is missing or out of range, then every section's own checks."""

import dataclasses
from collections.abc import Callable, Set
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from maxhydra.config.declare import Schema
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.fields import FieldType, fields
from maxhydra.config.schema.config import Config

UNSURE = object()
T = TypeVar("T", bound=Schema)


class Validator:
    """Builds the sections bottom up and lists every problem.

    A section whose own values are sound is checked even when others are not. `origin` tells where a path was set, and
    nothing is said about the paths in `unsure`: their problems are known already.
    """

    def __init__(self, origin: Callable[[str], str], unsure: Set[str]):
        self.problems: list[Problem] = []
        self._origin = origin
        self._unsure = unsure

    def section(self, node: DictConfig, path: str = "") -> Any:
        """An instance of the node's schema class, or UNSURE."""
        cls = OmegaConf.get_type(node)
        assert cls is not None
        values = {name: self._value(field.spec, node, name, _join(path, name)) for name, field in fields(cls).items()}
        if any(value is UNSURE for value in values.values()):
            return UNSURE
        section = cls(**values)
        self.problems += [self._placed(problem.under(path)) for problem in section.check()]
        return section

    def _value(self, spec: FieldType, node: DictConfig, name: str, path: str) -> Any:
        if path in self._unsure:
            return UNSURE
        if OmegaConf.is_missing(node, name):
            return self._refuse(path, "a value is needed", "???", spec)
        try:
            value = node[name]
        except OmegaConfBaseException as error:
            raw = OmegaConf.to_container(node, resolve=False)
            assert isinstance(raw, dict)
            return self._refuse(path, _first_line(error), raw.get(name), spec)
        if spec.is_section:
            return self.section(value, path)
        if spec.type is dict:
            return self._names(spec, value, path)
        if isinstance(value, ListConfig):
            return self._list(spec, value, path)
        reason = spec.mismatch(value)
        return self._refuse(path, reason, value, spec) if reason else value

    def _names(self, spec: FieldType, node: DictConfig, path: str) -> Any:
        assert spec.item is not None
        values = {str(key): self._value(spec.item, node, str(key), _join(path, str(key))) for key in node}
        return UNSURE if any(value is UNSURE for value in values.values()) else values

    def _list(self, spec: FieldType, node: ListConfig, path: str) -> Any:
        try:
            value = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            return self._refuse(path, _first_line(error), OmegaConf.to_container(node), spec)
        reason = spec.mismatch(value)
        return self._refuse(path, reason, value, spec) if reason else value

    def _refuse(self, path: str, reason: str, value: Any, spec: FieldType) -> Any:
        self.problems.append(self._placed(Problem(path, reason, value, spec.accepted)))
        return UNSURE

    def _placed(self, problem: Problem) -> Problem:
        return problem if problem.source else dataclasses.replace(problem, source=self._origin(problem.path))


def instantiate(node: DictConfig) -> Config:
    """The config of a composed node; every problem at once where there are any."""
    builder = Validator(origin=lambda path: "", unsure=frozenset())
    config = builder.section(node)
    if builder.problems:
        raise ConfigError(builder.problems)
    assert isinstance(config, Config)
    return config


def section_from(cls: type[T], values: Any, *, path: str, source: str) -> T:
    """A section alone, of values as YAML holds them; ConfigError with every problem, told of `source`."""
    builder = Validator(origin=lambda path: source, unsure=frozenset())
    node = OmegaConf.merge(OmegaConf.structured(cls), values)
    assert isinstance(node, DictConfig)
    section = builder.section(node, path)
    if builder.problems:
        raise ConfigError(builder.problems)
    assert isinstance(section, cls)
    return section


def _first_line(error: OmegaConfBaseException) -> str:
    return str(error.msg or error).splitlines()[0]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
