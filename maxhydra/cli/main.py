"""From the arguments to help, a subcommand or a run; and from every way to fail to a message and an exit code."""

import importlib
import sys

from maxhydra import __version__
from maxhydra.cli.errors import RunFailed
from maxhydra.cli.help import commands, help_text
from maxhydra.config.errors import ConfigError, Problem, did_you_mean

OK, FAILED, WRONG_CONFIG, INTERRUPTED = 0, 1, 2, 130


def run(arguments: list[str]) -> int:
    """Exit code of `maxhydra ARGUMENTS`."""
    try:
        return _dispatch(arguments)
    except ConfigError as error:
        return report(error)
    except RunFailed as error:
        print(f"maxhydra: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe went away (`maxhydra --cfg job | head`); Python would complain once more at exit.
        sys.stderr.close()
        return OK


def report(error: ConfigError) -> int:
    """Print all problems, and nothing else."""
    count = len(error.problems)
    print(f"maxhydra: {count} problem{'s' if count > 1 else ''}\n{error}", file=sys.stderr)
    return WRONG_CONFIG


def _dispatch(arguments: list[str]) -> int:
    first = arguments[0] if arguments else ""
    if first in commands():
        return importlib.import_module(f"maxhydra.cli.commands.{first}").main(arguments[1:])
    if first[:1].isalnum() and "=" not in first:
        names = ", ".join(commands())
        raise ConfigError(Problem(first, "no such command", accepted=names, hint=did_you_mean(first, commands())))
    if {"-h", "--help"} & set(arguments):
        print(help_text(arguments), end="")
        return OK
    if "--version" in arguments:
        print(f"maxhydra {__version__}")
        return OK
    return importlib.import_module("maxhydra.cli.hydra_app").start(arguments)
