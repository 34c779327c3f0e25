"""Command line flags: those of Hydra, without the ones that maxhydra replaces."""

import argparse
from collections.abc import Iterator
from typing import NoReturn

from maxhydra.config.errors import ConfigError, Problem, did_you_mean

INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
REPLACED = {
    "--config-path": "use --config-dir to add a folder of options",
    "-cp": "use --config-dir to add a folder of options",
    "--experimental-rerun": "start with the same run.name to resume a run",
}


class Parser(argparse.ArgumentParser):
    """ArgumentParser that raises ConfigError, so that a wrong flag is reported like any other problem."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(Problem(self.prog, message, hint=f"see {self.prog} --help"))


def parser() -> Parser:
    flags = Parser(prog="maxhydra", add_help=False, allow_abbrev=False)
    flags.add_argument("overrides", nargs="*", help="key=value, group=option, ~key; see --help")
    flags.add_argument("--cfg", "-c", choices=["job", "hydra", "all"], help="Print the config instead of running")
    flags.add_argument("--resolve", action="store_true", help="With --cfg: resolve interpolations")
    flags.add_argument("--package", "-p", help="With --cfg: the section to print")
    flags.add_argument("--run", "-r", action="store_true", help="Run one job (the default)")
    flags.add_argument("--multirun", "-m", action="store_true", help="Run the jobs of a sweep")
    flags.add_argument("--shell-completion", "-sc", action="store_true", help="install=SHELL, uninstall=SHELL")
    flags.add_argument("--config-name", "-cn", default="config", help="Primary config instead of config.yaml")
    flags.add_argument("--config-dir", "-cd", help="Additional folder of options")
    flags.add_argument("--info", "-i", const="all", nargs="?", choices=INFO, help="Print how the config is composed")
    flags.add_argument("--hydra-help", action="store_true", help="Hydra's help")
    return flags


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse flags and overrides in any order."""
    known = parser()
    flags, rest = known.parse_known_intermixed_args(arguments)
    if rest:
        name = rest[0].partition("=")[0]
        names = [option for action in known._actions for option in action.option_strings] + ["--help", "--version"]
        hint = REPLACED.get(name) or did_you_mean(name, names)
        raise ConfigError(Problem(name, "no such flag", accepted=", ".join(names), hint=hint))
    modes = [flags.run, flags.multirun, flags.cfg is not None, flags.info is not None, flags.shell_completion]
    if sum(modes) > 1:
        raise ConfigError(Problem("maxhydra", "takes one of --run, --multirun, --cfg, --info and --shell-completion"))
    if flags.resolve and flags.cfg is None:
        raise ConfigError(Problem("--resolve", "is only used with --cfg"))
    if problems := list(_repeated(flags.overrides)):
        raise ConfigError(problems)
    return flags


def _repeated(overrides: list[str]) -> Iterator[Problem]:
    """Yield the keys that one command sets more than once. Deleting a key and adding it again is not a repetition."""
    given: dict[str, list[str]] = {}
    for override in overrides:
        if "=" in override and not override.startswith("~"):
            given.setdefault(override.lstrip("+").partition("=")[0], []).append(override)
    for key, settings in given.items():
        if len(settings) > 1:
            times = "twice" if len(settings) == 2 else f"{len(settings)} times"
            yield Problem(key, f"is set {times}: {' and '.join(settings)}", hint="keep one of them")
