"""What a config asks of kernels. A backend that was asked for and cannot serve is the config's mistake."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from maxhydra.config import ConfigError, Problem
from maxhydra.kernels.dispatch import UnsupportedError
from maxhydra.kernels.tiles import Sizes


class KernelChoice(NamedTuple):
    """Of one operation, by the names of its arguments."""

    backend: str
    sizes: Sizes
    """Of the tile of the backend's kernel."""


@contextmanager
def kernel_errors_as_config_errors() -> Iterator[None]:
    """Kernels in here are named by the key of model.kernels that chose them."""
    try:
        yield
    except UnsupportedError as error:
        key, accepted = f"model.kernels.{error.operation}", ", ".join(("auto", *error.able))
        raise ConfigError(Problem(key, "; ".join(error.reasons), value=error.backend, accepted=accepted)) from None
