"""Entry point: arguments to help, a subcommand or a run; failures to a message and an exit code."""

import errno
import gc
import importlib
import sys
from types import ModuleType

# Registers model=from_hf, an option whose values are read from a Hugging Face folder.
import maxhydra.convert
from maxhydra.cli.help import help_text
from maxhydra.config.errors import ConfigError, Problem, did_you_mean
from maxhydra.config.registry import modules
from maxhydra.record.log import printable

OK, FAILED, WRONG_CONFIG, INTERRUPTED = 0, 1, 2, 130


# Errors of the file system, which a traceback does not explain, and what to do about them.
_FULL = "free some space and run the same command again to resume"
_PROTECTED = "make it writable, or choose another folder (run.outputs, task.output, data.cache)"
_OCCUPIED = "a file is in the way: move it, or choose another folder"
FILE_ERRORS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _FULL),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), _PROTECTED),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST, errno.EISDIR), _OCCUPIED),
    errno.EFBIG: "raise the limit of file sizes (ulimit -f) and run the same command again to resume",
    errno.ENAMETOOLONG: "choose shorter names",
    errno.EIO: "the disk or the network file system failed",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
}


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
    except OSError as error:
        if error.errno not in FILE_ERRORS:
            raise
        print(f"maxhydra: {describe_file_error(error)}", file=sys.stderr)
        return FAILED


def import_run_job() -> ModuleType:
    """Import `maxhydra.cli.run_job`, and with it jax, once the config is known to be valid.

    Garbage collection takes a sixth of the time of these imports and finds nothing, so it is paused. Later collections
    skip the imported objects.
    """
    name, was_enabled = "maxhydra.cli.run_job", gc.isenabled()
    if name in sys.modules:
        return sys.modules[name]
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def describe_file_error(error: OSError) -> str:
    """Return one line about an error in FILE_ERRORS: what failed, the file, and what to do."""
    file = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror}{file}; {FILE_ERRORS[error.errno or 0]}"


def report(error: ConfigError) -> int:
    """Print all problems of a config and return the exit code."""
    count = len(error.problems)
    print(f"maxhydra: {count} problem{'s' if count > 1 else ''}\n{printable(str(error))}", file=sys.stderr)
    return WRONG_CONFIG


def _dispatch(arguments: list[str]) -> int:
    first = arguments[0] if arguments else ""
    names = modules("maxhydra.cli.commands")
    if first in names:
        return importlib.import_module(f"maxhydra.cli.commands.{first}").main(arguments[1:])
    if first[:1].isalnum() and "=" not in first:
        hint = did_you_mean(first, names)
        raise ConfigError(Problem(first, "no such command", accepted=", ".join(names), hint=hint))
    if {"-h", "--help"} & set(arguments):
        print(help_text(arguments), end="")
        return OK
    if "--version" in arguments:
        print(f"maxhydra {maxhydra.__version__}")
        return OK
    return importlib.import_module("maxhydra.cli.hydra_app").start(arguments)
