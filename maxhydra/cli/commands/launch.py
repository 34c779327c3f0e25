"""Print the scripts a launcher would submit, or the output of a job: launch render|logs ...

maxhydra launch render hydra/launcher=slurm optimizer.learning_rate=1e-3,3e-3     the batch script, without a cluster
maxhydra launch render hydra/launcher=gke hydra.launcher.image=IMAGE ... > jobs.yaml
maxhydra launch logs lr/3 -f                                                      follow the output of a GKE job
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
            Problem(f"launch {verb}", "no such command", accepted=", ".join(VERBS), hint=did_you_mean(verb, VERBS))
        )
    return (_render if verb == "render" else _logs)(arguments[1:])


def _render(arguments: list[str]) -> int:
    """Compose and validate as for a launch, and print the scripts or manifests."""
    # Imported here so that --help does not wait for Hydra.
    from maxhydra.cli import multirun  # noqa: PLC0415
    from maxhydra.cli.hydra_app import translate_errors  # noqa: PLC0415
    from maxhydra.config.compose.composer import find_composer  # noqa: PLC0415
    from maxhydra.config.compose.overrides import searchpath  # noqa: PLC0415
    from maxhydra.launch.registry import make_backend  # noqa: PLC0415

    args = parse_flags(arguments)
    composer = find_composer(args.config_dir, args.config_name, searchpath(args.overrides))
    plan = translate_errors(lambda: multirun.make_plan(composer, args.overrides))
    if plan is None:
        hint = "remove hydra/sweeper and give every key a single value"
        raise ConfigError(
            Problem(
                "hydra/sweeper",
                "cannot be rendered: it chooses jobs as results come in",
                hint=hint,
            )
        )
    print(make_backend(plan.launcher, plan.context).render(plan.trials), end="")
    return 0


def _logs(arguments: list[str]) -> int:
    from maxhydra.launch.gke import GkeJobs, GkeSettings  # noqa: PLC0415
    from maxhydra.sweep.plan import read_plan  # noqa: PLC0415

    parser = Parser(prog="maxhydra launch logs", add_help=False)
    parser.add_argument("name", help="SWEEP/NUMBER")
    parser.add_argument("-f", "--follow", action="store_true")
    parser.add_argument("--outputs", default="outputs")
    args = parser.parse_args(arguments)
    name, _, number = args.name.rpartition("/")
    folder = Path(name) if Path(name).is_dir() else Path(args.outputs) / name
    plan = read_plan(folder.absolute())
    if not isinstance(plan.launcher, GkeSettings):
        hint = f"maxhydra runs tail {args.name}"
        raise ConfigError(Problem("launch logs", "only supports jobs on GKE", args.name, hint=hint))
    job = number.partition("_")[0]
    if not job.isdecimal():
        raise ConfigError(Problem("launch logs", "is not a job", args.name, f"{args.name}/0, ..."))
    for text in GkeJobs(plan.launcher, plan.context).logs(int(job), follow=args.follow):
        print(text, end="", flush=True)
    return 0
