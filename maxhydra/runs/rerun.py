"""Rerun a run: its original overrides, and whether the code has changed since."""

import os
import shlex
from pathlib import Path

from maxhydra.config.errors import ConfigError, Problem, last_of_each_key, quoted, unquoted
from maxhydra.config.migrations import migrate_overrides
from maxhydra.config.schema.config import Config
from maxhydra.config.usage import unused_keys, using_tasks
from maxhydra.record.facts import DEFAULT_OUTPUTS, SWEEP_FILE
from maxhydra.record.provenance import code
from maxhydra.record.redact import HIDDEN
from maxhydra.record.storage import is_remote
from maxhydra.runs.summary import Facts

# Flags that affect composition; each takes a value.
_FLAGS = ("--config-dir", "-cd", "--config-name", "-cn")


def rerun_arguments(facts: Facts, name: str | None, *changes: str, config: Config | None = None) -> list[str]:
    """Arguments of `maxhydra`: the run's flags and overrides, the changes, and a run.name (None: a new name).

    Overrides without effect in `config`, that of the run, are left out, and those that another task of the changes does
    not use: commands of earlier versions may contain them.
    """
    if "overrides" not in facts:
        raise ConfigError(Problem(str(facts["name"]), "has no overrides in its run.json, so it cannot be rerun"))
    replaced = {_key(change) for change in changes} | {"run.name"}
    stored = _stored_overrides(facts) if name is not None else _overrides_of_new_run(facts)
    overrides = [override for override in stored if _key(override) not in replaced]
    tasks = [change.partition("=")[2] for change in changes if _key(change) == "task"]
    unused = {key for key in map(_key, overrides) if tasks and tasks[-1] not in using_tasks(key)}
    if config is not None and not tasks:
        unused = unused_keys(config, map(_key, overrides))
    overrides = [override for override in overrides if _key(override) not in unused]
    redacted = [_key(override) for override in overrides if HIDDEN in override]
    if redacted:
        hint = f"pass it again: {' '.join(f'{key}=...' for key in redacted)}"
        raise ConfigError(Problem(redacted[0], "is a secret, whose value was not stored", hint=hint))
    run_name = [] if name is None else [f"run.name={quoted(name)}"]
    return [*_flags(facts), *overrides, *changes, *run_name]


def rerun_command(facts: Facts) -> str:
    """Shell command that reruns a run under a new name, in its original working directory."""
    original, overrides = facts.get("command") or [], facts.get("overrides")
    command = original if overrides is None else ["maxhydra", *_flags(facts), *_overrides_of_new_run(facts)]
    return f"cd {shlex.quote(str(facts.get('folder')))} && {shlex.join(command)}"


def describe_code_change(facts: Facts, folder: Path) -> str | None:
    """Describe how the code differs from that of the run's last session; None if it does not."""
    then = facts.get("git") or {}
    now, diff = code()
    if not then.get("sha") or now is None:
        return f"{'this code' if then.get('sha') else 'the code of the run'} is not under version control"
    if then["sha"] != now["sha"]:
        return f"the run used commit {then['sha'][:8]}, this is {(now['sha'] or 'none')[:8]}"
    patch = folder / str(then["diff"]) if then.get("diff") else None
    before = patch.read_text(encoding="utf-8").rstrip("\n") if patch is not None and patch.exists() else ""
    if before != diff.rstrip("\n"):
        return "the commit is the same, but the uncommitted changes differ"
    return None


def _stored_overrides(facts: Facts) -> list[str]:
    """Overrides of a run under their current names. Of a key that is set twice, the last: that value was used."""
    return last_of_each_key(migrate_overrides(facts.get("overrides") or []))


def _overrides_of_new_run(facts: Facts) -> list[str]:
    """Overrides of a run for another one, which is not named yet. A job of a sweep is rerun outside of the sweep."""
    overrides = []
    for override in _stored_overrides(facts):
        key, value = _key(override), override.partition("=")[2]
        if key == "run.outputs" and not is_remote(value):
            folder = Path(str(facts.get("folder")))
            outputs = folder / unquoted(value)
            if (outputs / SWEEP_FILE).exists():
                outputs = outputs.parent
            is_default = outputs == folder / DEFAULT_OUTPUTS
            overrides += [] if is_default else [f"{key}={quoted(os.path.relpath(outputs, folder))}"]
        elif key != "run.name":
            overrides.append(override)
    return overrides


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _flags(facts: Facts) -> list[str]:
    """--config-dir and --config-name of the original command. A worker's command has neither."""
    command: list[str] = facts.get("command") or []
    flags = ["--config-dir", facts["config_dir"]] if facts.get("config_dir") else []
    for argument, value in zip(command, [*command[1:], ""], strict=False):
        if argument in _FLAGS:
            flags += [argument, value]
        elif argument.partition("=")[0] in _FLAGS:
            flags.append(argument)
    return flags
