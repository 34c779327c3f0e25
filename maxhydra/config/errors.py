"""Config errors: all problems at once, each with path, value, accepted values, a hint and its origin."""

import dataclasses
import difflib
import re
from collections.abc import Iterable
from enum import Enum
from typing import Any

UNSET = object()
# Maximum number of options that an error lists.
SHOWN = 12


@dataclasses.dataclass(frozen=True)
class Problem:
    """One mistake in the config.  `path` is the dotted key, `value` the given value (UNSET if there is none),
    `accepted` describes valid values, `hint` says how to fix it, and `source` is where the value was set (a YAML file
    with its line, or the command line)."""

    path: str
    reason: str
    value: Any = UNSET
    accepted: str = ""
    hint: str = ""
    source: str = ""

    def under(self, prefix: str) -> "Problem":
        """Return the problem with its path below a parent section."""
        return dataclasses.replace(self, path=f"{prefix}.{self.path}" if prefix else self.path)

    def __str__(self) -> str:
        head = self.path if self.value is UNSET else f"{self.path}={show(self.value)}"
        lines = [f"{head}: {self.reason}"]
        lines += [f"accepted: {self.accepted}"] if self.accepted else []
        lines += [self.hint] if self.hint else []
        lines += [f"set in {self.source}"] if self.source else []
        return "\n    ".join(lines)


class ConfigError(Exception):
    """The config is not valid; reported without a traceback. Exit code 2."""

    def __init__(self, problems: Problem | Iterable[Problem]):
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        super().__init__(str(self))

    def __str__(self) -> str:
        return "\n".join(f"  {problem}" for problem in self.problems)


def show(value: Any) -> str:
    """Format a value as on the command line."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(show, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{show(item)}' for key, item in value.items())}}}"
    return str(value)


# Text that Hydra's override grammar reads as text without quotes, unless it is one of its constants.
_PLAIN_TEXT = re.compile(r"(?!(?i:null|true|false|inf|nan)\Z)[A-Za-z_./][-\w./]*", re.ASCII)


def quoted(text: str) -> str:
    """Quote a text for Hydra's override grammar: sweep names contain `=` and commas, and a path may contain a quote.

    Hydra treats a backslash literally except before a quote.
    """
    if _PLAIN_TEXT.fullmatch(text):
        return text
    return "'" + re.sub(r"(\\*)('|\Z)", lambda match: match[1] * 2 + (match[2] and r"\'"), text) + "'"


def unquoted(text: str) -> str:
    """Return the text of a value that `quoted` wrote."""
    if not text.startswith("'"):
        return text
    return re.sub(r"(\\+)('|\Z)", lambda match: match[1][: len(match[1]) // 2] + match[2], text[1:-1])


def last_of_each_key(arguments: Iterable[str]) -> list[str]:
    """Return arguments without the overrides whose key is set again later; flags and deletions (`~key`) stay."""
    unique: dict[str, str] = {}
    for number, text in enumerate(arguments):
        is_setting = "=" in text and not text.startswith(("-", "~"))
        key = text.lstrip("+").partition("=")[0] if is_setting else f"={number}"
        unique.pop(key, None)
        unique[key] = text
    return list(unique.values())


def options_shown(group: str, options: list[str], near: str = "") -> str:
    """List the options of a group; of many, those most similar to a name and the command that lists all."""
    if len(options) <= SHOWN:
        return ", ".join(options)
    nearest = difflib.get_close_matches(near, options, n=SHOWN, cutoff=0.0)
    command = "maxhydra models" if group == "model" else "maxhydra --help"
    return f"{', '.join(nearest)}, ... {len(options) - len(nearest)} more: `{command}`"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `did you mean 'x'?`, or an empty string if no known name is similar."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else ""
