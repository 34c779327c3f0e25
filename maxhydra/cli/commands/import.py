"""Translate a config of MaxText to a maxhydra command: import maxtext CONFIG [key=value ...] [--output FILE].

maxhydra import maxtext base.yml model_name=llama3.1-8b steps=1000 run_name=first
maxhydra import maxtext sft.yml model_name=qwen3-4b --output conf/experiment/sft.yaml
maxhydra import maxtext base.yml model_name=gemma2-2b load_parameters_path=gs://b/x --task decode

Arguments are those of MaxText: a YAML file, whose base_config is followed, and keys. The command is printed; keys
without an equivalent are listed on stderr with the reason, or as comments of the experiment of --output. MaxText's
defaults that change training and differ from ours are part of the command. docs/maxtext.md lists every key.

  --output FILE  write an experiment, for experiment=NAME, instead of printing a command
  --task TASK    pretrain, sft, dpo, grpo, distill, decode, serve, compile or inspect; otherwise as the keys say
  --quiet        do not list keys that are set in another way, or are not needed
"""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from maxhydra.cli.flags import Parser
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.record.atomic_io import replace_file

if TYPE_CHECKING:
    from maxhydra.cli.maxtext.translation import Translation

SOURCES = ("maxtext",)


def main(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    # Imported here so that --help does not wait for Hydra.
    from maxhydra.cli.maxtext.post_training import TASKS  # noqa: PLC0415
    from maxhydra.cli.maxtext.translate import experiment, translate  # noqa: PLC0415

    args = _parser(TASKS).parse_intermixed_args(arguments)
    if args.source not in SOURCES:
        raise ConfigError(Problem("import", "is not a source", value=args.source, accepted=", ".join(SOURCES)))
    t = translate(Path(args.config), args.overrides, task=args.task)
    notes = list(_notes(t, quiet=args.quiet))
    if args.output is not None:
        path = Path(args.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, experiment(t, [f"Translated from {args.config} of MaxText.", *notes]))
        print(f"maxhydra experiment={path.stem}")
        return 0
    print(" \\\n    ".join(["maxhydra", *map(shlex.quote, t.overrides())]))
    for line in notes:
        print(line, file=sys.stderr)
    return 0


def _parser(tasks: tuple[str, ...]) -> Parser:
    parser = Parser("maxhydra import")
    parser.add_argument("source")
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--output")
    parser.add_argument("--task", choices=tasks)
    parser.add_argument("--quiet", action="store_true")
    return parser


def _notes(t: "Translation", *, quiet: bool) -> Iterator[str]:
    """Yield the notes under a heading each: those that change the run, then the others."""
    groups = (
        {"no equivalent:": True} if quiet else {"no equivalent:": True, "set in another way, or not needed:": False}
    )
    for heading, changes_run in groups.items():
        lines = [f"  {note}" for note in t.notes if note.changes_run is changes_run]
        yield from [heading, *lines] if lines else []
