"""Go on with a sweep, or say where it stands: sweep resume|status NAME.

maxhydra sweep resume lr                   runs what is left; jobs that were interrupted go on from their checkpoints
maxhydra sweep resume lr --workers 2       two jobs at a time
maxhydra sweep resume lr --trials 40       a search goes on to so many jobs in all
maxhydra sweep status lr
"""

import argparse
import dataclasses
from functools import partial
from pathlib import Path

from maxhydra.cli.errors import RunFailed
from maxhydra.cli.flags import Parser


def main(arguments: list[str]) -> int:
    parser = _parser()
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    asked = parser.parse_args(arguments)
    # optuna takes a second to import, which --help need not wait for.
    from maxhydra.sweep.start import go_on, read_plan, status  # noqa: PLC0415

    folder = _folder(asked)
    plan = read_plan(folder)
    if asked.verb == "status":
        print("\n".join(status(plan)))
        return 0
    changes = {name: value for name in ("workers", "trials") if (value := getattr(asked, name)) is not None}
    plan = dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, **changes))
    if reason := go_on(plan, say=partial(print, flush=True)):
        raise RunFailed(reason)
    return 0


def _parser() -> Parser:
    parser = Parser(prog="maxhydra sweep", add_help=False)
    parser.add_argument("verb", choices=["resume", "status"])
    parser.add_argument("name", help="of the sweep, or its folder")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--trials", type=int)
    parser.add_argument("--outputs", default="outputs", help="folder that holds the runs")
    return parser


def _folder(asked: argparse.Namespace) -> Path:
    given = Path(asked.name).expanduser()
    return (given if given.is_dir() else Path(asked.outputs) / asked.name).absolute()
