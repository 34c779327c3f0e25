"""Optional packages that only some sources and tokenizers need."""

import importlib
from types import ModuleType

from maxhydra.config import ConfigError, Problem


def need(package: str, setting: str, *, extra: str = "data") -> ModuleType:
    """Import an optional package, or raise an error that says how to install it.

    `setting` is the `key=value` that requires it, `extra` the extra of maxhydra that installs it.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.split(".")[0]:
            raise
        path, value = setting.split("=")
        reason = f"needs the package {package.split('.')[0]}, which is not installed"
        raise ConfigError(Problem(path, reason, value=value, hint=f"pip install 'maxhydra[{extra}]'")) from None
