"""Resume, extend or cancel a sweep, or show its state and results: sweep resume|extend|cancel|status|report NAME.

maxhydra sweep resume lr                   run the remaining jobs; interrupted ones resume from their checkpoints
maxhydra sweep resume lr --workers 2       two jobs at a time
maxhydra sweep resume lr --trials 40       continue a search up to 40 trials in total
maxhydra sweep resume lr --max-failures 9  continue a search until 9 jobs have failed
maxhydra sweep resume lr --detach          on a cluster: submit the remaining jobs and do not wait
maxhydra sweep extend lr optimizer.learning_rate=3e-2,1e-1     add jobs to a grid, and run them
maxhydra sweep cancel lr                   running jobs save a checkpoint and stop; resume continues them
maxhydra sweep status lr                   jobs, their states, and the best so far
maxhydra sweep report lr                   results by setting: mean over seeds and its 95% confidence interval
"""

import argparse
import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from maxhydra.cli.flags import Parser
from maxhydra.cli.main import RunFailed
from maxhydra.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from maxhydra.sweep.plan import SweepPlan

# Sweep settings that `resume` can change.
CHANGEABLE = ("workers", "trials", "max_failures")


def main(arguments: list[str]) -> int:
    parser = _parser()
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    args = parser.parse_args(arguments)
    # Imported here so that --help does not wait a second for optuna.
    from maxhydra.cli.runs._common import say  # noqa: PLC0415
    from maxhydra.sweep.run import cancel, read_plan, resume_sweep, status, write_plan  # noqa: PLC0415

    folder = _folder(args)
    plan = read_plan(folder)
    if args.verb == "report":
        _report(plan)
        return 0
    if args.overrides and args.verb != "extend":
        raise ConfigError(Problem(f"sweep {args.verb}", "takes no overrides", " ".join(args.overrides)))
    if args.verb == "status":
        say("\n".join(status(plan)))
        return 0
    if args.verb == "cancel":
        cancel(plan, say=say)
        return 0
    if args.detach and (plan.space or plan.launcher.kind == "local"):
        reason = "a search needs results to choose the next trial" if plan.space else "local jobs need this process"
        raise ConfigError(Problem("--detach", f"is not possible for this sweep: {reason}"))
    if args.verb == "extend":
        plan = _extend(plan, args.overrides)
    changes = {name: value for name in CHANGEABLE if (value := getattr(args, name)) is not None}
    if "trials" in changes and (not plan.space or plan.settings.sampler == "grid"):
        raise ConfigError(Problem("--trials", "is only possible for a search; these jobs are fixed", args.trials))
    if "max_failures" in changes and not plan.space:
        reason = "is only possible for a search; other sweeps run all jobs even if some fail"
        raise ConfigError(Problem("--max-failures", reason, args.max_failures))
    plan = dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, **changes))
    if problems := list(plan.settings.problems()):
        raise ConfigError(problems)
    if args.verb == "extend":
        write_plan(plan)
    if reason := resume_sweep(plan, say=partial(say, flush=True), detach=args.detach):
        raise RunFailed(reason)
    return 0


def _report(plan: "SweepPlan") -> None:
    """Print the results of the finished jobs, best first; jobs that differ only in seeds are one row."""
    from maxhydra.cli.runs.browse import print_seed_groups  # noqa: PLC0415
    from maxhydra.runs.query import rank_runs, select_runs  # noqa: PLC0415
    from maxhydra.runs.registry import Registry  # noqa: PLC0415

    registry = Registry(plan.folder)
    finished = select_runs(registry, ["status=finished"])
    if not finished:
        raise ConfigError(Problem("sweep report", "no job has finished", plan.argument, hint="maxhydra sweep status"))
    metric, ranked, largest = rank_runs(registry, finished, None)
    print_seed_groups(registry, ranked, metric, largest=largest, limit=None, as_json=False)


def _extend(plan: "SweepPlan", overrides: list[str]) -> "SweepPlan":
    """Add jobs to a grid sweep. Raises ConfigError if a job is invalid, or the sweep is a search."""
    from maxhydra.cli import multirun  # noqa: PLC0415
    from maxhydra.config.compose.composer import find_composer  # noqa: PLC0415
    from maxhydra.config.compose.overrides import searchpath  # noqa: PLC0415

    if plan.space:
        hint = f"maxhydra sweep resume {plan.argument} --trials {2 * plan.settings.trials}"
        raise ConfigError(Problem("sweep extend", "supports grids; continue a search with more trials", hint=hint))
    if not overrides:
        hint = f"maxhydra sweep extend {plan.argument} run.seed=1,2"
        raise ConfigError(Problem("sweep extend", "needs new values", hint=hint))
    lines = [line for job in plan.listed for line in job]
    return multirun.extend_plan(find_composer(plan.config_dir, searchpath=searchpath(lines)), plan, overrides)


def _parser() -> Parser:
    parser = Parser(prog="maxhydra sweep", add_help=False)
    parser.add_argument("verb", choices=["resume", "extend", "cancel", "status", "report"])
    parser.add_argument("name", help="name of the sweep, or its folder")
    parser.add_argument("overrides", nargs="*", help="extend: KEY=VALUE,VALUE")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--trials", type=int)
    parser.add_argument("--max-failures", type=int)
    parser.add_argument("--detach", action="store_true")
    parser.add_argument("--outputs", default="outputs", help="folder that contains the runs")
    return parser


def _folder(args: argparse.Namespace) -> Path:
    given = Path(args.name).expanduser()
    return (given if given.is_dir() else Path(args.outputs) / args.name).absolute()
