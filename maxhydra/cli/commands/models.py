"""List the models that model=NAME knows, with sizes, context and licence: models [FILTER] [--json].

maxhydra models
maxhydra models llama3
maxhydra models 'qwen3*' --json

FILTER is a part of the name, or a pattern with * and ?. Active parameters are those that a token meets, which in a
mixture of experts are fewer. The licence is that of the published weights, where there are any.
"""

import argparse
import hashlib
import json
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from maxhydra.config import ConfigError, Problem
from maxhydra.config.errors import did_you_mean
from maxhydra.config.options import model_option, model_options, option_text
from maxhydra.config.registry import CONF, PACKAGE
from maxhydra.record.atomic_io import replace_file

# Counting the weights of all models takes some seconds: what was counted is kept, by all that it depends on.
COUNTED = Path("~/.cache/maxhydra/models.json")
DEPENDS = ("config", "layers", "model")
HEAD = ("model", "parameters", "active", "layers", "context", "licence")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("maxhydra models", description=__doc__.partition("\n")[0])
    parser.add_argument("filter", nargs="?", default="", help="a part of the name, or a pattern with * and ?")
    parser.add_argument("--json", action="store_true", help="a list of objects, exact numbers")
    asked = parser.parse_args(arguments)
    names = [name for name in model_options() if _fits(name, asked.filter)]
    if not names:
        hint = did_you_mean(asked.filter, model_options())
        raise ConfigError(Problem("models", "no model is called so", value=asked.filter, hint=hint))
    found = list(_entries(names))
    print(json.dumps(found, indent=2) if asked.json else "\n".join(_table(found)))
    return 0


def _fits(name: str, asked: str) -> bool:
    return fnmatch(name, asked) if set("*?[") & set(asked) else asked in name


def _entries(names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """What is known of each model; counted anew where nothing is kept of it."""
    path = COUNTED.expanduser()
    kept = _kept(path)
    code = hashlib.sha256()
    for file in sorted(file for package in DEPENDS for file in (PACKAGE / package).rglob("*.py")):
        code.update(file.read_bytes())
    fresh = {}
    told, licences = model_options(), yaml.safe_load((CONF / "licences.yaml").read_text(encoding="utf-8"))
    for name in names:
        key = hashlib.sha256(option_text(name).encode() + code.digest()).hexdigest()
        if key not in kept:
            fresh[key] = kept[key] = _counted(name)
        yield {"model": name, **kept[key], "licence": _licence(name, licences), "description": told[name]}
    if fresh:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({**_kept(path), **fresh}))


def _kept(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _counted(name: str) -> dict[str, int]:
    # jax, only where something has to be counted.
    from maxhydra.model import active_parameters, build, parameter_count  # noqa: PLC0415

    model = model_option(name)
    return {
        "parameters": parameter_count(build(model).shapes),
        "active": active_parameters(model),
        "layers": model.num_layers,
        "context": model.context_length,
    }


def _licence(name: str, licences: dict[str, str]) -> str:
    """That of the longest beginning of the name; a miniature has no weights to license."""
    fitting = [prefix for prefix in licences if name.startswith(prefix)]
    return licences[max(fitting, key=len)] if fitting and not name.endswith("-tiny") else ""


def _table(found: list[dict[str, Any]]) -> Iterator[str]:
    rows = [HEAD, *(tuple(_shown(entry[column]) for column in HEAD) for entry in found)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(HEAD))]
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:5], widths[1:5], strict=True)),
        ]
        yield "  ".join([*cells, row[5]]).rstrip()


def _shown(value: Any) -> str:
    """Large counts in millions and billions; a context of 131072 is 128k."""
    if isinstance(value, str):
        return value
    if value >= 1024 and value % 1024 == 0 and value < 2**24:
        return f"{value // 1024}k"
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if value >= size:
            return f"{value / size:.4g}{unit}"
    return str(value)
