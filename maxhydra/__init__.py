"""maxhydra: train and run language models in JAX, as Hydra experiments.

As a library: `from maxhydra import compose, run, load_run, runs`; the other names are for objects of your own. A name
is imported when it is used, so that `import maxhydra` takes milliseconds. See docs/library.md.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maxhydra.config.declare import Options, option, schema, section
    from maxhydra.config.errors import ConfigError, Problem
    from maxhydra.library import RunResult, StoredRun, compose, load_run, run

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "Options",
    "Problem",
    "RunResult",
    "StoredRun",
    "compose",
    "load_run",
    "option",
    "run",
    "schema",
    "section",
]

_MODULES = {
    "maxhydra.config.declare": ("Options", "option", "schema", "section"),
    "maxhydra.config.errors": ("ConfigError", "Problem"),
    "maxhydra.library": ("RunResult", "StoredRun", "compose", "load_run", "run"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__", "runs"]
