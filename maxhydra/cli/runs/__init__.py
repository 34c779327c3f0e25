"""Verbs of `maxhydra runs`, discovered by name.

A module of this package has, for each of its verbs, `declare_<verb>(parser)` and `run_<verb>(args) -> exit code`, whose
docstring is the help of the verb; `maxhydra runs --help` shows its first line.
"""

import ast
from pathlib import Path
from typing import NamedTuple

PREFIX = "run_"


class Verb(NamedTuple):
    module: str
    help: str

    @property
    def summary(self) -> str:
        return self.help.partition("\n")[0]


def verbs() -> dict[str, Verb]:
    """Return the verbs by name, without importing their modules."""
    found = {}
    for path in Path(__file__).parent.glob("[a-z]*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith(PREFIX):
                found[node.name.removeprefix(PREFIX)] = Verb(path.stem, ast.get_docstring(node) or "")
    return dict(sorted(found.items()))
