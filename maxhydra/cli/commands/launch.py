"""Show what a launcher would submit, or what a job prints: launch render|logs ...

maxhydra launch render hydra/launcher=slurm optimizer.learning_rate=1e-3,3e-3     the batch script; no cluster is needed
maxhydra launch render hydra/launcher=gke hydra.launcher.image=IMAGE ... > jobs.yaml
maxhydra launch logs lr/3 -f                                                      of a job on GKE, as it runs
"""

from pathlib import Path

from maxhydra.cli.flags import Parser
from maxhydra.cli.flags import parse as parse_flags
from maxhydra.config.errors import ConfigError, Problem, did_you_mean

VERBS = ("render", "logs")


def main(arguments: list[str]) -> int:
    verb = arguments[0] if arguments else "--help"
    if {"-h", "--help"} & set(arguments) or verb == "--help":
        print(__doc__)
        return 0
    if verb not in VERBS:
        raise ConfigError(
            Problem(f"launch {verb}", "no such verb", accepted=", ".join(VERBS), hint=did_you_mean(verb, VERBS))
        )
    return (_render if verb == "render" else _logs)(arguments[1:])


def _render(arguments: list[str]) -> int:
    """Compose and check as a launch does, and print what it would send."""
    # Hydra takes a while, which --help need not wait for.
    from maxhydra.cli import multirun  # noqa: PLC0415
    from maxhydra.cli.hydra_app import translated  # noqa: PLC0415
    from maxhydra.config.compose.composer import Composer  # noqa: PLC0415
    from maxhydra.config.compose.overrides import searchpath  # noqa: PLC0415
    from maxhydra.launch.registry import make_backend  # noqa: PLC0415

    asked = parse_flags(arguments)
    composer = Composer(asked.config_dir, asked.config_name, searchpath(asked.overrides))
    plan = translated(lambda: multirun.planned(composer, asked.overrides))
    if plan is None:
        hint = "leave out hydra/sweeper, and give each key one of its values"
        raise ConfigError(Problem("hydra/sweeper", "has no jobs yet: it proposes them one by one", hint=hint))
    print(make_backend(plan.launcher, plan.shared).render(plan.proposals), end="")
    return 0


def _logs(arguments: list[str]) -> int:
    from maxhydra.launch.gke import GkeJobs, GkeSettings  # noqa: PLC0415
    from maxhydra.sweep.plan import read_plan  # noqa: PLC0415

    parser = Parser(prog="maxhydra launch logs", add_help=False)
    parser.add_argument("name", help="SWEEP/NUMBER")
    parser.add_argument("-f", "--follow", action="store_true")
    parser.add_argument("--outputs", default="outputs")
    asked = parser.parse_args(arguments)
    name, _, number = asked.name.rpartition("/")
    folder = Path(name) if Path(name).is_dir() else Path(asked.outputs) / name
    plan = read_plan(folder.absolute())
    if not isinstance(plan.launcher, GkeSettings):
        hint = f"maxhydra runs tail {asked.name}"
        raise ConfigError(Problem("launch logs", "reads what jobs on GKE print", asked.name, hint=hint))
    job = number.partition("_")[0]
    if not job.isdecimal():
        raise ConfigError(Problem("launch logs", "names no job", asked.name, f"{asked.name}/0, ..."))
    for text in GkeJobs(plan.launcher, plan.shared).logs(int(job), follow=asked.follow):
        print(text, end="", flush=True)
    return 0
