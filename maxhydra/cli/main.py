"""Entry point: arguments to help, a subcommand or a run; failures to a message and an exit code."""

import importlib
import sys

# Registers model=from_hf, an option whose values are read from a Hugging Face folder.
import maxhydra.convert
from maxhydra.cli.help import commands, help_text
from maxhydra.config.errors import ConfigError, Problem, did_you_mean
from maxhydra.record.log import printable

OK, FAILED, WRONG_CONFIG, INTERRUPTED = 0, 1, 2, 130


class RunFailed(Exception):
    """A run failed for the reason in the message; reported without a traceback. Exit code 1."""


def run(arguments: list[str]) -> int:
    """Execute `maxhydra ARGUMENTS` and return the exit code."""
    try:
        return _dispatch(arguments)
    except ConfigError as error:
        return report(error)
    except RunFailed as error:
        print(f"maxhydra: {printable(str(error))}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the pipe has exited (`maxhydra --cfg job | head`). Closing stderr keeps Python from printing
        # the same error again at exit.
        sys.stderr.close()
        return OK


def report(error: ConfigError) -> int:
    """Print all problems of a config and return the exit code."""
    count = len(error.problems)
    print(f"maxhydra: {count} problem{'s' if count > 1 else ''}\n{printable(str(error))}", file=sys.stderr)
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
        print(f"maxhydra {maxhydra.__version__}")
        return OK
    return importlib.import_module("maxhydra.cli.hydra_app").start(arguments)
