"""List the models of model=NAME with parameters, context length and license: models [FILTER] [--json].

maxhydra models
maxhydra models llama3
maxhydra models 'qwen3*' --json
maxhydra models --config-dir conf

FILTER is a part of the name, or a pattern with * and ?. Models of installed projects are listed too, and those in the
folders of --config-dir and hydra.searchpath=[...]. Active parameters are those used for one token, which are fewer in a
mixture of experts. The license is that of the published weights, if there are any.
"""

import argparse
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from maxhydra.config import ConfigError, Problem
from maxhydra.config.compose.hydra_loader import source_folder
from maxhydra.config.compose.overrides import SEARCHPATH, searchpath
from maxhydra.config.errors import did_you_mean
from maxhydra.config.options import PACKAGED, model_option, model_options, option_text
from maxhydra.config.registry import CONF, PACKAGE, project_folders
from maxhydra.record.atomic_io import replace_file

LICENCES = Path(__file__).with_name("licences.yaml")
# Counting the parameters of all models takes seconds, so counts are cached under a hash of their inputs.
CACHE = Path("~/.cache/maxhydra/models.json")
HASHED_PACKAGES = ("config", "layers", "model")
COLUMNS = ("model", "parameters", "active", "layers", "context", "licence")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("maxhydra models", description=__doc__.partition("\n")[0])
    parser.add_argument("filter", nargs="?", default="", help="part of the name, or a pattern with * and ?")
    parser.add_argument("--json", action="store_true", help="print JSON with exact numbers")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="additional folder of options")
    args = parser.parse_args([text for text in arguments if not text.startswith(SEARCHPATH)])
    folders = list(_folders(args.config_dir, searchpath(arguments)))
    names = [name for name in model_options(folders) if _matches(name, args.filter)]
    if not names:
        hint = did_you_mean(args.filter, model_options(folders))
        raise ConfigError(Problem("models", "no model matches", value=args.filter, hint=hint))
    entries = list(_entries(names, folders))
    print(json.dumps(entries, indent=2) if args.json else "\n".join(_table(entries)))
    return 0


def _folders(config_dir: str | None, added: Iterable[str]) -> Iterator[Path]:
    """Yield the folders of options in the order of Hydra's search path."""
    yield CONF
    yield from project_folders()
    for text in [*([] if config_dir is None else [config_dir]), *added]:
        scheme, _, path = text.rpartition("://")
        folder = source_folder(scheme, path).expanduser().absolute()
        if not folder.is_dir():
            raise ConfigError(Problem("models", "no such folder of options", text, hint=f"looked for {folder}"))
        yield folder


def _matches(name: str, pattern: str) -> bool:
    return fnmatch(name, pattern) if set("*?[") & set(pattern) else pattern in name


def _entries(names: Iterable[str], folders: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield the table entry of each model, with parameters counted or from the cache.

    Models of projects are always counted: their layers may be code of the project.
    """
    path = CACHE.expanduser()
    cached = _read_cache(path)
    code = hashlib.sha256()
    for file in sorted(file for package in HASHED_PACKAGES for file in (PACKAGE / package).rglob("*.py")):
        code.update(file.read_bytes())
    fresh = {}
    descriptions, licences = model_options(folders), yaml.safe_load(LICENCES.read_text(encoding="utf-8"))
    packaged = model_options()
    for name in names:
        key = hashlib.sha256(option_text(name, folders).encode() + code.digest()).hexdigest()
        if name not in packaged:
            cached[key] = _count(name, folders)
        elif key not in cached:
            fresh[key] = cached[key] = _count(name)
        licence = _licence(name, licences) if name in packaged else ""
        yield {"model": name, **cached[key], "licence": licence, "description": descriptions[name]}
    if fresh:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({**_read_cache(path), **fresh}))


def _read_cache(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _count(name: str, folders: Sequence[Path] = PACKAGED) -> dict[str, int]:
    # jax is imported only if a count is not cached.
    from maxhydra.model import active_parameters, build, parameter_count  # noqa: PLC0415

    model = model_option(name, folders)
    return {
        "parameters": parameter_count(build(model).shapes),
        "active": active_parameters(model),
        "layers": model.num_layers,
        "context": model.context_length,
    }


def _licence(name: str, licences: dict[str, str]) -> str:
    """Return the license of the longest matching name prefix; test models (-tiny) have no published weights."""
    matching = [prefix for prefix in licences if name.startswith(prefix)]
    return licences[max(matching, key=len)] if matching and "tiny" not in name.split("-") else ""


def _table(entries: list[dict[str, Any]]) -> Iterator[str]:
    rows = [COLUMNS, *(tuple(_format(entry[name]) for name in COLUMNS) for entry in entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:5], widths[1:5], strict=True)),
        ]
        yield "  ".join([*cells, row[5]]).rstrip()


def _format(value: Any) -> str:
    """Format large counts in millions and billions, and a context length of 131072 as 128k."""
    if isinstance(value, str):
        return value
    if value >= 1024 and value % 1024 == 0 and value < 2**24:
        return f"{value // 1024}k"
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if value >= size:
            return f"{value / size:.4g}{unit}"
    return str(value)
