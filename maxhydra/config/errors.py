"""What a user sees when a config is wrong: every problem at once, with path, value, what is accepted, the way out."""

import dataclasses
import difflib
import re
from collections.abc import Iterable
from enum import Enum
from typing import Any

UNSET = object()
# Options that an error lists; a group that has more has too many to read.
SHOWN = 12


@dataclasses.dataclass(frozen=True)
class Problem:
    """One mistake in the config.

    `path` is the dotted key, `value` what was given (UNSET where there is none), `accepted` what would be right, `hint`
    the way out, `source` where the value was written (a YAML file with its line, or the command line).
    """

    path: str
    reason: str
    value: Any = UNSET
    accepted: str = ""
    hint: str = ""
    source: str = ""

    def under(self, prefix: str) -> "Problem":
        """The same problem seen from a parent section."""
        return dataclasses.replace(self, path=f"{prefix}.{self.path}" if prefix else self.path)

    def __str__(self) -> str:
        head = self.path if self.value is UNSET else f"{self.path}={show(self.value)}"
        lines = [f"{head}: {self.reason}"]
        lines += [f"accepted: {self.accepted}"] if self.accepted else []
        lines += [self.hint] if self.hint else []
        lines += [f"set in {self.source}"] if self.source else []
        return "\n    ".join(lines)


class ConfigError(Exception):
    """The config cannot be run as asked. Exit code 2, no traceback."""

    def __init__(self, problems: Problem | Iterable[Problem]):
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        super().__init__(str(self))

    def __str__(self) -> str:
        return "\n".join(f"  {problem}" for problem in self.problems)


def show(value: Any) -> str:
    """A value as one would write it on the command line."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(show, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{show(item)}' for key, item in value.items())}}}"
    return str(value)


def quoted(text: str) -> str:
    """As Hydra reads it whole, whatever is in it: names of sweeps hold `=` and commas, and a path may hold a quote.

    To Hydra a backslash is one like any other, but before a quote.
    """
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + (found[2] and r"\'"), text) + "'"


def options_shown(group: str, options: list[str], near: str = "") -> str:
    """The options of a group; of very many those nearest to a name, and where the others are listed."""
    if len(options) <= SHOWN:
        return ", ".join(options)
    nearest = difflib.get_close_matches(near, options, n=SHOWN, cutoff=0.0)
    command = "maxhydra models" if group == "model" else "maxhydra --help"
    return f"{', '.join(nearest)}, ... {len(options) - len(nearest)} more: `{command}`"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?`, or nothing when no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else ""
