"""Translation of a MaxText config to the arguments of one command, or to an experiment."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from maxhydra.cli.maxtext import architecture, data, mechanisms, parallelism, post_training, training
from maxhydra.cli.maxtext.settings import Settings, read_settings
from maxhydra.cli.maxtext.table import Row, rows
from maxhydra.cli.maxtext.translation import Note, Translation
from maxhydra.config.compose.composer import find_composer
from maxhydra.config.errors import ConfigError
from maxhydra.config.registry import GLOBAL, defaults
from maxhydra.config.yaml_files import dump_yaml

# Functions of the column `by`, in an order in which each can read the results of the earlier ones.
FUNCTIONS: dict[str, Callable[[Translation], None]] = {
    "task": post_training.task,
    "model": architecture.model,
    "engram": mechanisms.engram,
    "moba": mechanisms.moba,
    "data": data.data,
    "tokenizer": data.tokenizer,
    "lengths": training.lengths,
    "evaluation": training.evaluation,
    "dpo": post_training.dpo,
    "grpo": post_training.grpo,
    "reward": post_training.reward,
    "distill": post_training.distill,
    "adapter": post_training.adapter,
    "sampling": post_training.sampling,
    "engine": post_training.engine,
    "optimizer": training.optimizer,
    "schedule": training.schedule,
    "sparsity": mechanisms.sparsity,
    "spikes": training.spikes,
    "seeds": training.seeds,
    "mesh": parallelism.mesh,
    "remat": parallelism.remat,
    "kernels": parallelism.kernels,
    "quantization": parallelism.quantization,
    "checkpoint": training.checkpoint,
    "profile": training.profile,
    "tracking": training.tracking,
    "hardware": training.hardware,
    "diloco": training.diloco,
}
# Functions that only apply to a command with the config of a training run.
OF_TRAINING = ("optimizer", "schedule", "evaluation", "spikes", "checkpoint", "profile", "tracking", "diloco", "remat")
WITHOUT_TRAINING = ("decode", "serve")
NO_FILE, NO_EFFECT = "no such file", "has no effect"


def translate(path: Path, arguments: Iterable[str], *, task: str | None = None) -> Translation:
    """Return the translation of a config file with arguments; ConfigError for unknown keys and invalid values."""
    settings, newer = read_settings(path, arguments)
    t = Translation(settings, task or post_training.task_of(settings))
    _copy_rows(t)
    for name, function in FUNCTIONS.items():
        if name not in OF_TRAINING or t.task not in WITHOUT_TRAINING:
            function(t)
    t.notes += [Note(key, settings[key], rows()[key].text, changes_run=False) for key in _elsewhere(settings)]
    t.notes += [Note(key, "", f"of {path.name} is newer than the table", changes_run=False) for key in newer]
    _prune(t)
    return t


def _copy_rows(t: Translation) -> None:
    """Set the keys whose values need no other key."""
    for key, row in rows().items():
        given = t.settings.given(key)
        if row.to and not row.by and (given or row.always):
            t.set(row.to, _converted(t, key, row), from_keys=(key,))
        elif given and row.fixed and t.settings[key] not in row.fixed:
            t.unsupported(key, row.why)
        elif given and row.none:
            t.unsupported(key, row.none)


def _converted(t: Translation, key: str, row: Row) -> Any:
    value = t.settings[key]
    if row.null_at is not None and value == row.null_at:
        return None
    if row.values and value not in row.values:
        t.unsupported(key, f"accepted: {', '.join(map(str, row.values))}")
        return row.values[row.default]
    return row.values.get(value, value) if row.values else value


def _elsewhere(settings: Settings) -> list[str]:
    """Return given keys that are reached in another way, or belong to a part of MaxText that is not used here."""
    return [key for key in settings.values if rows()[key].instead or rows()[key].derived or rows()[key].cloud]


def _prune(t: Translation) -> None:
    """Leave out defaults of MaxText that are equal to ours, options that are chosen anyway, and keys without effect."""
    options = dict(defaults())
    t.choices = {group: name for group, name in t.choices.items() if group == "task" or options.get(group) != name}
    composer = find_composer()
    chosen = [f"{group}={name}" for group, name in t.choices.items()]
    node = composer.check_overrides(chosen, with_hydra=False).node
    t.values = {
        path: value
        for path, value in t.values.items()
        if path in t.required or node is None or not _equals(node, path.lstrip("+"), value)
    }
    problems = composer.check_overrides(t.overrides(), with_hydra=False).problems
    # Keys without effect are found only without other problems, so those of one round may hide others.
    while unused := {problem.path for problem in problems if NO_EFFECT in problem.reason} & t.values.keys():
        t.values = {path: value for path, value in t.values.items() if path not in unused}
        problems = composer.check_overrides(t.overrides(), with_hydra=False).problems
    # The command may be meant for another machine.
    t.notes += [Note(item.path, item.value, "no such file here", False) for item in problems if item.reason == NO_FILE]
    if others := [problem for problem in problems if problem.reason != NO_FILE]:
        raise ConfigError(others)


def _equals(node: DictConfig, path: str, value: Any) -> bool:
    try:
        found = OmegaConf.select(node, path)
    except OmegaConfBaseException:
        return False
    if OmegaConf.is_config(found):
        found = OmegaConf.to_container(found, enum_to_str=True)
    return bool(getattr(found, "name", found) == value)


def experiment(t: Translation, comments: Iterable[str]) -> str:
    """Return the translation as the text of an experiment, an option of conf/experiment."""
    lines = [f"# {GLOBAL}", *(f"# {line}".rstrip() for line in comments), "defaults:"]
    lines += [f"  - override /{group}: {option}" for group, option in t.choices.items()]
    content: dict[str, Any] = {}
    for path, value in t.values.items():
        section, names = content, path.lstrip("+").split(".")
        for name in names[:-1]:
            section = section.setdefault(name, {})
        last = names[-1]
        section[last] = section.get(last, {}) | value if isinstance(value, dict) else value
    return "\n".join(lines) + "\n" + (dump_yaml(content) if content else "")
