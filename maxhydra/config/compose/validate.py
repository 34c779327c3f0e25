"""Validation of composed values: missing and out-of-range values, then the checks of every section."""

import dataclasses
import os
from collections.abc import Callable, Set
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from maxhydra.config.declare import Schema
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.fields import FieldType, fields
from maxhydra.config.option_types import new_node
from maxhydra.config.schema.config import Config
from maxhydra.record.redact import ENVIRONMENT

UNSURE = object()
T = TypeVar("T", bound=Schema)


class Validator:
    """Builds the sections bottom up and collects every problem.

    A section whose own values are valid runs its checks even if other sections have problems. `origin` returns where a
    path was set. Paths in `unsure` are skipped: their problems are known already.
    """

    def __init__(self, origin: Callable[[str], str], unsure: Set[str]):
        self.problems: list[Problem] = []
        self._origin = origin
        self._unsure = unsure

    def section(self, node: DictConfig, path: str = "") -> Any:
        """Return an instance of the node's schema class, or UNSURE if a value of it has a problem."""
        cls = OmegaConf.get_type(node)
        assert cls is not None
        values = {name: self._value(field.spec, node, name, _join(path, name)) for name, field in fields(cls).items()}
        if any(value is UNSURE for value in values.values()):
            return UNSURE
        section = cls(**values)
        self.problems += [self._with_source(problem.under(path)) for problem in section.check()]
        return section

    def _value(self, spec: FieldType, node: DictConfig, name: str, path: str) -> Any:
        if path in self._unsure:
            return UNSURE
        if OmegaConf.is_missing(node, name):
            return self._reject(path, "a value is needed", "???", spec)
        num_reads = ENVIRONMENT.num_reads
        try:
            value = node[name]
        except OmegaConfBaseException as error:
            raw = OmegaConf.to_container(node, resolve=False)
            assert isinstance(raw, dict)
            return self._reject(path, _first_line(error), raw.get(name), spec)
        if spec.is_section:
            return self.section(value, path)
        if spec.type is dict:
            return self._dict(spec, value, path)
        if isinstance(value, ListConfig):
            value = self._list(spec, value, path)
            reason = ""
        else:
            reason = spec.mismatch(value)
        if ENVIRONMENT.num_reads > num_reads and isinstance(value, (str, list)):
            raw = OmegaConf.to_container(node, resolve=False)
            assert isinstance(raw, dict)
            ENVIRONMENT.add_reference(path, value, raw[name])
        return self._reject(path, reason, value, spec) if reason else value

    def _dict(self, spec: FieldType, node: DictConfig, path: str) -> Any:
        assert spec.item is not None
        values = {str(key): self._value(spec.item, node, str(key), _join(path, str(key))) for key in node}
        return UNSURE if any(value is UNSURE for value in values.values()) else values

    def _list(self, spec: FieldType, node: ListConfig, path: str) -> Any:
        try:
            value = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            return self._reject(path, _first_line(error), OmegaConf.to_container(node), spec)
        reason = spec.mismatch(value)
        return self._reject(path, reason, value, spec) if reason else value

    def _reject(self, path: str, reason: str, value: Any, spec: FieldType) -> Any:
        self.problems.append(self._with_source(Problem(path, reason, value, spec.accepted)))
        return UNSURE

    def _with_source(self, problem: Problem) -> Problem:
        return problem if problem.source else dataclasses.replace(problem, source=self._origin(problem.path))


def instantiate(node: DictConfig) -> Config:
    """Return the config of a composed node; raise ConfigError with every problem if there are any."""
    validator = Validator(origin=lambda path: "", unsure=frozenset())
    config = validator.section(node)
    if validator.problems:
        raise ConfigError(validator.problems)
    assert isinstance(config, Config)
    return config


def section_from(cls: type[T], values: Any, *, path: str, source: str) -> T:
    """Return one section from plain values; raise ConfigError with every problem, attributed to `source`."""
    validator = Validator(origin=lambda path: source, unsure=frozenset())
    # A third faster for a model than a merge that builds the schema node and copies `values`.
    schema: type = cls
    node = OmegaConf.unsafe_merge(new_node(schema), OmegaConf.create(values))
    assert isinstance(node, DictConfig)
    section = validator.section(node, path)
    if validator.problems:
        raise ConfigError(validator.problems)
    assert isinstance(section, cls)
    return section


def _first_line(error: OmegaConfBaseException) -> str:
    return str(error.msg or error).splitlines()[0]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _read_variable(name: str, default: Any = oc._DEFAULT_MARKER_) -> Any:
    """`${oc.env:NAME}`, whose values are not stored in the files of a run."""
    value = oc.env(name, default)
    if name in os.environ:
        ENVIRONMENT.add_read(name, os.environ[name])
    return value


OmegaConf.register_new_resolver("oc.env", _read_variable, replace=True)
