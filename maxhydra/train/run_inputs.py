"""Inputs of a training run outside its config: weights, data, tokenizer, chat template and user code.

A new run records its inputs in run.json. A session that resumes the run compares them by content: a difference is an
error unless run.accept_changed_inputs names its kind. Weights are pinned: a resumed run loads the checkpoint that the
run loaded first, even if the run that wrote it has trained on.
"""

import dataclasses
import importlib.util
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from maxhydra.config import Config, Problem
from maxhydra.config.option_types import used_objects
from maxhydra.config.schema.data import Fingerprint as FingerprintMethod
from maxhydra.config.schema.run import INPUT_KINDS
from maxhydra.config.schema.tasks.distill import DistillTask
from maxhydra.config.schema.tasks.training import DpoTask, GrpoTask, Reference
from maxhydra.convert.adapter_lineage import describe_weights_change, find_pinned, weights_record
from maxhydra.data.sources import input_files as corpus_files
from maxhydra.data.tokenizers import input_files as tokenizer_files
from maxhydra.data.tokenizers import template_files
from maxhydra.record.fingerprint import describe_change, fingerprint_files, is_unchanged

PARAMETERS, FULL_STATE, TEACHER = "checkpoint.load_parameters", "checkpoint.load_full_state", "task.teacher.weights"
REWARD = "reward.terms.{}.weights"
OBSERVERS = ("tracker.", "train.callbacks.", "data.eval_sets.")
ACCEPT_INPUTS = "run.accept_changed_inputs"
# Record types that are rendered with a chat template.
TEMPLATED = ("chat", "image_chat", "audio_chat", "preference", "image_preference", "labeled", "scored", "prompts")

Record = Mapping[str, Any]
Records = dict[str, dict[str, Record]]
log = logging.getLogger("maxhydra")


@dataclasses.dataclass(frozen=True)
class Input:
    """Something that a run depends on: its kind, the config key that names it, and where it is."""

    kind: str
    key: str
    location: str


@dataclasses.dataclass(frozen=True)
class FileInput(Input):
    """Files that are read in every session. `is_full` hashes all of their content, whatever their size."""

    paths: Sequence[Path]
    is_full: bool = False

    def record(self) -> Record:
        return {"location": self.location, **fingerprint_files(self.paths, is_full=self.is_full)}

    def compare(self, before: Record) -> tuple[str, Record]:
        """How the files differ from an earlier record (empty: not at all), and their record now."""
        now = fingerprint_files(self.paths, like=dict(before))
        if not is_unchanged(dict(before), now):
            return describe_change(dict(before), now, self.paths), self.record()
        if now["sample"] is not None and now["modified"] != before["modified"]:
            text = (
                "%s=%s was modified, but its size and samples are unchanged; data.fingerprint=full compares all of it"
            )
            log.info(text, self.key, self.location)
        is_stronger = self.is_full and now["sample"] is not None
        return "", self.record() if is_stronger else {"location": self.location, **now}


@dataclasses.dataclass(frozen=True)
class WeightsInput(Input):
    """Weights that a run loads. Unless `is_reloaded`, only a new run does, and later sessions have checkpoints."""

    is_reloaded: bool

    def record(self) -> Record:
        return weights_record(self.key, self.location)

    def compare(self, before: Record) -> tuple[str, Record]:
        """How the weights differ from an earlier record (empty: they are found), and the record to use."""
        if not self.is_reloaded and self.location == before["location"]:
            return "", before
        if (found := find_pinned(self.key, [self.location], before)) is not None:
            return "", {**before, "location": self.location, "path": found}
        return describe_weights_change(self.key, self.location, before), self.record()


@dataclasses.dataclass(frozen=True)
class InputChange:
    """An input that differs from the run's last session."""

    kind: str
    key: str
    location: str | None
    description: str

    def problem(self) -> Problem:
        reason = f"has changed since the last session of this run: {self.description}"
        hint = f"restore it, choose another run.name, or accept the change with {ACCEPT_INPUTS}=[{self.kind}]"
        return Problem(self.key, reason, value=self.location, hint=hint)

    def __str__(self) -> str:
        return f"{self.kind} ({self.key}={self.location}): {self.description}"


def list_inputs(config: Config) -> list[FileInput | WeightsInput]:
    """All inputs of a training config."""
    return [*_weights(config), *_data(config), *_tokenizer(config), *_user_code(config)]


def record_inputs(config: Config) -> Records:
    """The inputs of a new run, by kind and key."""
    return _by_kind((item, item.record()) for item in list_inputs(config))


def compare_inputs(config: Config, before: Mapping[str, Mapping[str, Record]]) -> tuple[list[InputChange], Records]:
    """The inputs that differ from those of the run's last session, and the records of this session."""
    changes: list[InputChange] = []
    records: list[tuple[Input, Record]] = []
    inputs = list_inputs(config)
    for item in inputs:
        known = before.get(item.kind, {}).get(item.key)
        if known is None:
            changes.append(InputChange(item.kind, item.key, item.location, "the run did not have this input before"))
            records.append((item, item.record()))
            continue
        difference, record = item.compare(known)
        records.append((item, record))
        if difference:
            changes.append(InputChange(item.kind, item.key, item.location, difference))
    named = {(item.kind, item.key) for item in inputs}
    for kind, entries in before.items():
        for key, record in entries.items():
            if (kind, key) not in named:
                changes.append(InputChange(kind, key, None, f"it was {record['location']}"))
    return changes, _by_kind(records)


def pin_weights(config: Config, records: Mapping[str, Mapping[str, Record]]) -> Config:
    """The config with every location of weights replaced by the recorded checkpoint."""
    paths = {key: record["path"] for entries in records.values() for key, record in entries.items() if "path" in record}
    fields = {key.rpartition(".")[2]: paths[key] for key in (PARAMETERS, FULL_STATE) if key in paths}
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, **fields))
    terms = {
        name: dataclasses.replace(term, weights=paths.get(REWARD.format(name), term.weights))
        for name, term in config.reward.terms.items()
    }
    config = dataclasses.replace(config, reward=dataclasses.replace(config.reward, terms=terms))
    if isinstance(config.task, DistillTask) and TEACHER in paths:
        teacher = dataclasses.replace(config.task.teacher, weights=paths[TEACHER])
        return dataclasses.replace(config, task=dataclasses.replace(config.task, teacher=teacher))
    return config


def _by_kind(records: Iterable[tuple[Input, Record]]) -> Records:
    found: Records = {}
    for item, record in records:
        found.setdefault(item.kind, {})[item.key] = record
    return found


def _weights(config: Config) -> Iterator[WeightsInput]:
    """The initial weights, as the frozen base of an adapter, as the reference, or only for a new run; other models."""
    has_adapter = config.adapter.is_enabled
    has_reference = _needs_reference_weights(config)
    kind = "reference" if has_reference and not has_adapter else "base"
    if (location := config.checkpoint.load_parameters) is not None:
        yield WeightsInput(kind, PARAMETERS, location, is_reloaded=has_adapter or has_reference)
    if (location := config.checkpoint.load_full_state) is not None:
        yield WeightsInput("base", FULL_STATE, location, is_reloaded=False)
    for name, term in config.reward.terms.items():
        if term.weights is not None:
            yield WeightsInput("reward", REWARD.format(name), term.weights, is_reloaded=True)
    if isinstance(config.task, DistillTask) and config.task.teacher.weights is not None:
        yield WeightsInput("teacher", TEACHER, config.task.teacher.weights, is_reloaded=True)


def _needs_reference_weights(config: Config) -> bool:
    """Whether the task loads the initial weights again as the reference model."""
    has_adapter = config.adapter.is_enabled
    if isinstance(config.task, DpoTask):
        return config.task.reference_with(adapter=has_adapter) is Reference.cached
    return isinstance(config.task, GrpoTask) and config.task.kl.beta > 0 and not has_adapter


def _data(config: Config) -> Iterator[FileInput]:
    data = config.data
    is_full = data.fingerprint is FingerprintMethod.full
    for name, corpus in data.corpora().items():
        prefix = f"data.sources.{name}" if name else "data"
        for field, paths in corpus_files(corpus, data).items():
            yield FileInput("data", f"{prefix}.{field}", str(getattr(corpus, field)), paths, is_full)


def _tokenizer(config: Config) -> Iterator[FileInput]:
    tokenizer = config.data.tokenizer
    if files := tokenizer_files(tokenizer):
        yield FileInput("tokenizer", "data.tokenizer.path", str(tokenizer.path), files)
    is_templated = any(corpus.record_type in TEMPLATED for corpus in config.data.corpora().values())
    if is_templated and (files := template_files(tokenizer)):
        location = tokenizer.chat_template or str(files[0])
        yield FileInput("template", "data.tokenizer.chat_template", location, files)


def _user_code(config: Config) -> Iterator[FileInput]:
    """The modules of objects of the user, except those that only observe the run."""
    for key, path in used_objects(config):
        section = key.partition(".")[0]
        if not key.startswith(OBSERVERS):
            yield _code(section if section in INPUT_KINDS else "code", key, path)
    for tool in config.environment.tools:
        if ":" in tool:
            yield _code("environment", "environment.tools", tool)


def _code(kind: str, key: str, function: str) -> FileInput:
    """The module file of a user's function, found without running it."""
    return FileInput(kind, key, function, _module_files(function.partition(":")[0]), is_full=True)


def _module_files(module: str) -> list[Path]:
    """The source file of a module; empty if it cannot be found, which the task reports."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return []
    return [Path(spec.origin)] if spec is not None and spec.has_location and spec.origin else []
