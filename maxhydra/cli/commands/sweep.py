"""Go on with a sweep, end it, or say where it stands: sweep resume|cancel|status NAME.

maxhydra sweep resume lr                   runs what is left; jobs that were interrupted go on from their checkpoints
maxhydra sweep resume lr --workers 2       two jobs at a time
maxhydra sweep resume lr --trials 40       a search goes on to so many jobs in all
maxhydra sweep resume lr --max-failures 9  a search goes on until so many jobs have failed in all
maxhydra sweep resume lr --detach          on a cluster: submits what is left, and does not wait
maxhydra sweep cancel lr                   jobs under way save and end; resume goes on with them
maxhydra sweep status lr
"""

import argparse
import dataclasses
from functools import partial
from pathlib import Path

from maxhydra.cli.flags import Parser
from maxhydra.cli.main import RunFailed
from maxhydra.config.errors import ConfigError, Problem

# What `resume` may change of a sweep's settings.
CHANGED = ("workers", "trials", "max_failures")


def main(arguments: list[str]) -> int:
    parser = _parser()
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    asked = parser.parse_args(arguments)
    # optuna takes a second to import, which --help need not wait for.
    from maxhydra.sweep.run import cancel, read_plan, resume_sweep, status  # noqa: PLC0415

    folder = _folder(asked)
    plan = read_plan(folder)
    if asked.verb == "status":
        print("\n".join(status(plan)))
        return 0
    if asked.verb == "cancel":
        cancel(plan, say=print)
        return 0
    if asked.detach and (plan.space or plan.launcher.kind == "local"):
        why = "a search waits for results to know what to try" if plan.space else "jobs of this machine are watched"
        raise ConfigError(Problem("--detach", f"does not go with this sweep: {why}"))
    changes = {name: value for name in CHANGED if (value := getattr(asked, name)) is not None}
    if "trials" in changes and (not plan.space or plan.settings.sampler == "grid"):
        raise ConfigError(Problem("--trials", "does not go with this sweep: all of its jobs are given", asked.trials))
    if "max_failures" in changes and not plan.space:
        reason = "does not go with this sweep: it goes on whatever fails"
        raise ConfigError(Problem("--max-failures", reason, asked.max_failures))
    plan = dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, **changes))
    if problems := list(plan.settings.problems()):
        raise ConfigError(problems)
    if reason := resume_sweep(plan, say=partial(print, flush=True), detach=asked.detach):
        raise RunFailed(reason)
    return 0


def _parser() -> Parser:
    parser = Parser(prog="maxhydra sweep", add_help=False)
    parser.add_argument("verb", choices=["resume", "cancel", "status"])
    parser.add_argument("name", help="of the sweep, or its folder")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--trials", type=int)
    parser.add_argument("--max-failures", type=int)
    parser.add_argument("--detach", action="store_true")
    parser.add_argument("--outputs", default="outputs", help="folder that holds the runs")
    return parser


def _folder(asked: argparse.Namespace) -> Path:
    given = Path(asked.name).expanduser()
    return (given if given.is_dir() else Path(asked.outputs) / asked.name).absolute()
