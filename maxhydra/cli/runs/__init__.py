"""Verbs of `maxhydra runs`: one file each, found by its name.

A file has a docstring, whose first line `maxhydra runs --help` shows, `declare(parser)`, and `run(asked) -> exit code`.
"""

from pathlib import Path

VERBS = Path(__file__).parent
