"""One command that Hydra serves: a run, a sweep, or a look at the config. The config is checked first, always."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from maxhydra.cli import completion, flags, job, multirun
from maxhydra.cli.errors import RunFailed
from maxhydra.config.compose.composer import Composer
from maxhydra.config.compose.hydra_errors import problem_of
from maxhydra.config.compose.overrides import searchpath
from maxhydra.config.errors import ConfigError

Answer = TypeVar("Answer")


def start(arguments: list[str]) -> int:
    """Exit code of a command that is not answered without Hydra."""
    asked = flags.parse(arguments)
    composer = Composer(asked.config_dir, asked.config_name, searchpath(asked.overrides))
    with _hydra(composer) as app:
        if asked.hydra_help:
            app.hydra_help(config_name=asked.config_name, args_parser=flags.parser(), args=asked)
            return 0
        if asked.shell_completion:
            return completion.answer(app, asked.config_name, asked.overrides)
        if asked.cfg or asked.info:
            return _show(app, composer, asked)
        if asked.multirun or multirun.is_asked(asked.overrides):
            return translated(lambda: multirun.run(app, composer, asked.overrides))
        composer.examine(asked.overrides, with_hydra=False).composed()
        return translated(lambda: _run(app, composer, asked.overrides))


@contextmanager
def _hydra(composer: Composer) -> Iterator[Hydra]:
    app = Hydra(task_name="maxhydra", config_loader=composer.loader)
    GlobalHydra.instance().initialize(app)
    try:
        yield app
    finally:
        GlobalHydra.instance().clear()


def _run(app: Hydra, composer: Composer, overrides: list[str]) -> int:
    """One job. Its failure is kept from Hydra, which would put a line of its own around the message."""
    failures: list[Exception] = []

    def single(node: DictConfig) -> float | None:
        try:
            return job.run(node)
        except (ConfigError, RunFailed) as error:
            failures.append(error)
            return None

    app.run(config_name=composer.config_name, task_function=single, overrides=[*overrides, "hydra.mode=RUN"])
    for failure in failures:
        raise failure
    return 0


def _show(app: Hydra, composer: Composer, asked: argparse.Namespace) -> int:
    """Show what composes, and then what is wrong with it: a config is looked at most when it does not work."""
    examination = composer.examine(asked.overrides, with_hydra=False)
    if examination.composes:
        translated(lambda: _print(app, composer, asked))
        sys.stdout.flush()
    examination.composed()
    return 0


def _print(app: Hydra, composer: Composer, asked: argparse.Namespace) -> int:
    name = composer.config_name
    if asked.info:
        app.show_info(asked.info, config_name=name, overrides=asked.overrides)
    else:
        app.show_cfg(name, asked.overrides, cfg_type=asked.cfg, package=asked.package, resolve=asked.resolve)
    return 0


def translated(action: Callable[[], Answer]) -> Answer:
    """What Hydra still refuses after our own checks becomes a message too."""
    try:
        return action()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(problem_of(error)) from error
