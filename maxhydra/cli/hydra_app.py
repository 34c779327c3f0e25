"""Commands that need Hydra: a single run, a sweep, printing the config, shell completion.

The config is validated before anything runs. A single run executes exactly the config that was validated; Hydra
composes again only for the jobs of a sweep.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from maxhydra.cli import flags
from maxhydra.cli.help import commands
from maxhydra.cli.main import RunFailed, import_run_job
from maxhydra.cli.runs import verbs
from maxhydra.config.compose.composer import Composed, Composer, find_composer
from maxhydra.config.compose.hydra_errors import problem_of
from maxhydra.config.compose.hydra_loader import BASIC_LAUNCHER, Hydra
from maxhydra.config.compose.overrides import job_overrides, requests_sweep, searchpath
from maxhydra.config.errors import ConfigError, Problem

Result = TypeVar("Result")


def start(arguments: list[str]) -> int:
    """Execute a command line without subcommand and return the exit code."""
    args = flags.parse(arguments)
    composer = find_composer(args.config_dir, args.config_name, searchpath(args.overrides))
    with _hydra(composer) as app:
        if args.hydra_help:
            app.hydra_help(config_name=args.config_name, args_parser=flags.parser(), args=args)
            return 0
        if args.shell_completion:
            return _complete(app, args.config_name, args.overrides)
        if args.cfg or args.info:
            return _show(app, composer, args)
        if args.multirun or requests_sweep(args.overrides):
            return _sweep(app, composer, args.overrides)
        return _run(app, composer, args.overrides)


@contextmanager
def _hydra(composer: Composer) -> Iterator[Hydra]:
    app = Hydra(task_name="maxhydra", config_loader=composer.loader)
    GlobalHydra.instance().initialize(app)
    try:
        yield app
    finally:
        GlobalHydra.instance().clear()


def _run(app: Hydra, composer: Composer, overrides: list[str]) -> int:
    """Validate and run one job; Hydra sets up its logging, callbacks and output folder around the validated config."""
    composed = composer.check_overrides([*overrides, "hydra.mode=RUN"]).composed()
    _check_launcher(composed)
    failures: list[Exception] = []

    def job(_: DictConfig) -> None:
        execute = import_run_job().execute
        try:
            execute(composed.config, composed.choices, overrides=job_overrides(composed.node.hydra), path=None)
        except (ConfigError, RunFailed) as error:
            # Raised after Hydra has returned, because Hydra prints its own line around an exception of the job.
            failures.append(error)

    with composer.loader.reuse(composed.node):
        translate_errors(lambda: app.run(composer.config_name, task_function=job, overrides=overrides))
    for failure in failures:
        raise failure
    return 0


def _sweep(app: Hydra, composer: Composer, overrides: list[str]) -> int:
    # Imported here, because the launchers are not needed to run or print one config.
    from maxhydra.cli import multirun  # noqa: PLC0415

    return translate_errors(lambda: multirun.run(app, composer, overrides))


def _check_launcher(composed: Composed) -> None:
    """Reject a launcher without -m: Hydra would ignore it and run the job in this process."""
    if composed.node.hydra.launcher._target_ != BASIC_LAUNCHER:
        name = composed.node.hydra.runtime.choices["hydra/launcher"]
        hint = f"submit with maxhydra -m hydra/launcher={name} ...; a sweep of one job is fine"
        raise ConfigError(Problem("hydra/launcher", "is only used with -m", value=name, hint=hint))


def _show(app: Hydra, composer: Composer, args: argparse.Namespace) -> int:
    """Print the config if it composes, then report its problems: --cfg is mostly used on a config that fails."""
    checked = composer.check_overrides(args.overrides, with_hydra=args.cfg is not None)
    if checked.composes and checked.node is not None:
        with composer.loader.reuse(checked.node) if args.cfg is not None else nullcontext():
            translate_errors(lambda: _print(app, composer, args))
        sys.stdout.flush()
    checked.composed()
    return 0


def _print(app: Hydra, composer: Composer, args: argparse.Namespace) -> None:
    name = composer.config_name
    if args.info:
        app.show_info(args.info, config_name=name, overrides=args.overrides)
    else:
        app.show_cfg(name, args.overrides, cfg_type=args.cfg, package=args.package, resolve=args.resolve)


def _complete(app: Hydra, config_name: str, arguments: list[str]) -> int:
    """Handle `install=SHELL`, `uninstall=SHELL` and the shell's own `query=SHELL` with the line in COMP_LINE.

    Hydra's plugins complete overrides; subcommands and the verbs of `maxhydra runs` are added here.
    """
    action, _, shell = arguments[0].partition("=") if len(arguments) == 1 else ("", "", "")
    shells = sorted(app.get_shell_to_plugin_map(app.config_loader))
    if action not in ("install", "uninstall", "query") or shell not in shells:
        accepted = f"install=SHELL or uninstall=SHELL, with SHELL one of {', '.join(shells)}"
        raise ConfigError(Problem("--shell-completion", "needs an action and a shell", " ".join(arguments), accepted))
    sys.argv[0] = "maxhydra"  # the command whose completion is installed, also for `python -m maxhydra`
    if action == "query":
        line = os.environ.get("COMP_LINE", "")
        parts = line.split(" ")
        is_verb = parts[1:-1] == ["runs"]
        names = verbs() if is_verb else commands() if len(parts) == 2 else {}
        print("\n".join(name for name in names if name.startswith(parts[-1])))
        if is_verb:
            return 0  # a verb cannot be an override
        os.environ["COMP_LINE"] = _without_command(line)
    app.shell_completion(config_name=config_name, overrides=arguments)
    return 0


def _without_command(line: str) -> str:
    """Remove the subcommand from a line to complete; its arguments are paths and overrides as everywhere."""
    parts = line.split(" ")
    return " ".join(parts[:1] + parts[2:]) if len(parts) > 2 and parts[1] in commands() else line


def translate_errors(action: Callable[[], Result]) -> Result:
    """Run an action and convert errors that Hydra still raises after validation to ConfigError."""
    try:
        return action()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(problem_of(error)) from error
