"""Kernel choices of the config. A requested backend that does not support the call is a config error."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from maxhydra.config import ConfigError, Problem
from maxhydra.kernels.dispatch import UnsupportedError
from maxhydra.kernels.tiles import Sizes


class KernelChoice(NamedTuple):
    """Backend and tile sizes of one operation; the fields are named like the arguments of its function."""

    backend: str
    sizes: Sizes
    """Tile sizes of the backend's kernel."""


@contextmanager
def kernel_errors_as_config_errors() -> Iterator[None]:
    """Raise UnsupportedError of kernels as ConfigError for the key of model.kernels that chose the backend."""
    try:
        yield
    except UnsupportedError as error:
        key, accepted = f"model.kernels.{error.operation}", ", ".join(("auto", *error.supported))
        raise ConfigError(Problem(key, "; ".join(error.reasons), value=error.backend, accepted=accepted)) from None
