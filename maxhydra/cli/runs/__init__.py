"""Verbs of `maxhydra runs`, one discovered file each.

A file has a docstring, whose first line `maxhydra runs --help` shows, `declare(parser)`, and `run(args) -> exit code`.
"""

from pathlib import Path

VERBS = Path(__file__).parent
