"""How a command can end besides well, without a traceback."""


class RunFailed(Exception):
    """The run ended badly, and the text says why. Exit code 1."""
