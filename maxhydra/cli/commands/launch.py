"""Print manifests and scripts of a launcher, or the output of a job; build an image: launch render|logs|image ...

maxhydra launch render hydra/launcher=slurm optimizer.learning_rate=1e-3,3e-3     the batch script, without a cluster
maxhydra launch render hydra/launcher=gke hydra.launcher.image=IMAGE ... > jobs.yaml
maxhydra launch render hydra/launcher=skypilot hydra.launcher.accelerators=H100:8 ... > task.yaml
maxhydra launch image REGISTRY/maxhydra:1 [--extra gpu|tpu|cpu] [--push] [--run]  docker build of this checkout
maxhydra launch logs lr/3 -f                                                      follow the output of a GKE job
"""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import maxhydra
from maxhydra.cli.flags import Parser
from maxhydra.cli.flags import parse as parse_flags
from maxhydra.cli.main import RunFailed
from maxhydra.config.errors import ConfigError, Problem, did_you_mean
from maxhydra.record.provenance import code

VERBS = ("render", "logs", "image")
EXTRAS = ("gpu", "tpu", "cpu")


def main(arguments: list[str]) -> int:
    verb = arguments[0] if arguments else "--help"
    if {"-h", "--help"} & set(arguments) or verb == "--help":
        print(__doc__)
        return 0
    if verb not in VERBS:
        raise ConfigError(
            Problem(f"launch {verb}", "no such command", accepted=", ".join(VERBS), hint=did_you_mean(verb, VERBS))
        )
    return {"render": _render, "logs": _logs, "image": _image}[verb](arguments[1:])


def _render(arguments: list[str]) -> int:
    """Compose and validate as for a launch, and print the scripts or manifests."""
    # Imported here so that --help does not wait for Hydra.
    from maxhydra.cli import multirun  # noqa: PLC0415
    from maxhydra.cli.hydra_app import translate_errors  # noqa: PLC0415
    from maxhydra.config.compose.composer import find_composer  # noqa: PLC0415
    from maxhydra.config.compose.overrides import searchpath  # noqa: PLC0415
    from maxhydra.launch.registry import render  # noqa: PLC0415

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
    print(render(plan.launcher, plan.context, plan.trials), end="")
    return 0


def _image(arguments: list[str]) -> int:
    """Print the commands that build and push the image of jobs, or run them."""
    parser = Parser(prog="maxhydra launch image", add_help=False)
    parser.add_argument("tag", help="image with its registry, such as us-docker.pkg.dev/project/repository/maxhydra:1")
    parser.add_argument("--extra", default="gpu", choices=EXTRAS, help="accelerator of the packages")
    parser.add_argument("--push", action="store_true", help="push it to its registry, too")
    parser.add_argument("--run", action="store_true", help="run the commands instead of printing them")
    args = parser.parse_args(arguments)
    git, _ = code()
    checkout = Path(maxhydra.__file__).parent.parent
    if git is None or not (checkout / "Dockerfile").exists():
        hint = "run this in a git checkout of maxhydra, installed with pip install -e ."
        raise ConfigError(Problem("launch image", "needs the source with its Dockerfile", str(checkout), hint=hint))
    if git["dirty"] and args.run:
        print("maxhydra: the image contains uncommitted changes, but is labelled with the last commit", file=sys.stderr)
    build = ["docker", "build", "--tag", args.tag, "--build-arg", f"EXTRA={args.extra}"]
    commands = [[*build, "--build-arg", f"REVISION={git['sha']}", str(checkout)]]
    commands += [["docker", "push", args.tag]] if args.push else []
    if args.run and shutil.which("docker") is None:
        raise ConfigError(Problem("launch image", "needs docker", hint="install it, or run the commands elsewhere"))
    for command in commands:
        print(shlex.join(command), flush=True)
        if args.run and subprocess.run(command, check=False).returncode:
            raise RunFailed(f"{shlex.join(command[:2])} failed")
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
