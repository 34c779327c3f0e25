"""A run once more: the overrides it was started with, and whether the code is still the one it ran."""

import shlex
from pathlib import Path

from maxhydra.config.errors import ConfigError, Problem, quoted
from maxhydra.config.migrations import migrate_overrides
from maxhydra.record.provenance import code
from maxhydra.record.redact import HIDDEN
from maxhydra.runs.summary import Facts

# Flags that change what is composed; each takes a value.
_FLAGS = ("--config-dir", "-cd", "--config-name", "-cn")


def arguments(facts: Facts, name: str | None, *changes: str) -> list[str]:
    """What to give `maxhydra`: the flags and overrides of the run, another run.name (None: a new one), and changes."""
    if "overrides" not in facts:
        raise ConfigError(Problem(str(facts["name"]), "run.json does not say with which overrides it was started"))
    replaced = {_key(change) for change in changes} | {"run.name"}
    kept = [override for override in migrate_overrides(facts["overrides"]) if _key(override) not in replaced]
    hidden = [_key(override) for override in kept if HIDDEN in override]
    if hidden:
        hint = f"give it again: {' '.join(f'{key}=...' for key in hidden)}"
        raise ConfigError(Problem(hidden[0], "was a secret, and is not written down", hint=hint))
    named = [] if name is None else [f"run.name={quoted(name)}"]
    return [*_flags(facts), *kept, *changes, *named]


def rerun_command(facts: Facts) -> str:
    """The exact command for a shell, in the folder where it was given; a new run."""
    command, overrides = facts.get("command") or [], facts.get("overrides")
    unnamed = (
        []
        if overrides is None
        else [override for override in migrate_overrides(overrides) if _key(override) != "run.name"]
    )
    words = command if overrides is None else ["maxhydra", *_flags(facts), *unnamed]
    return f"cd {shlex.quote(str(facts.get('folder')))} && {shlex.join(words)}"


def changed_code(facts: Facts, folder: Path) -> str | None:
    """In words, how the code differs from what the run's last session ran; None where it does not."""
    then = facts.get("git") or {}
    now, diff = code()
    if not then.get("sha") or now is None:
        return "the run's code is not under version control" if not then.get("sha") else "this code is not"
    if then["sha"] != now["sha"]:
        return f"the run had commit {then['sha'][:8]}, this is {(now['sha'] or 'none')[:8]}"
    kept = folder / str(then["diff"]) if then.get("diff") else None
    before = kept.read_text(encoding="utf-8").rstrip("\n") if kept is not None and kept.exists() else ""
    if before != diff.rstrip("\n"):
        return "the commit is the same, the uncommitted changes are not"
    return None


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _flags(facts: Facts) -> list[str]:
    """--config-dir and --config-name of the command, each with its value; a worker's command says neither."""
    command: list[str] = facts.get("command") or []
    found = ["--config-dir", facts["config_dir"]] if facts.get("config_dir") else []
    for word, value in zip(command, [*command[1:], ""], strict=False):
        if word in _FLAGS:
            found += [word, value]
        elif word.partition("=")[0] in _FLAGS:
            found.append(word)
    return found
