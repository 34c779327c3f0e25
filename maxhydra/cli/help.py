"""`maxhydra --help`: groups with their options, overlays, commands, flags and examples, listed from the folders."""

import ast
import re
import shutil
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from maxhydra.config.registry import CONF, defaults, description, groups, is_overlay, project_folders
from maxhydra.config.schema.config import Config

COMMANDS = Path(__file__).parent / "commands"

FLAGS = {
    "-m, --multirun": "run one job for each combination of values: train.steps=100,200",
    "-c, --cfg job|hydra|all": "print the config and exit; --resolve resolves ${...}, -p PATH selects a section",
    "-i, --info [WHAT]": "print how the config is composed: all, config, defaults, defaults-tree, plugins, searchpath",
    "-cd, --config-dir DIR": "a folder with your own options, with the layout of conf/",
    "-cn, --config-name NAME": "primary config instead of config.yaml",
    "-sc, --shell-completion": 'completion of groups, options and keys: eval "$(maxhydra -sc install=bash)"',
    "--hydra-help": "help of Hydra itself",
    "-h, --help; --version": "",
}

EXAMPLES = {
    "maxhydra": "train a tiny model on Shakespeare, in two minutes on a laptop",
    "maxhydra train.steps=1000 optimizer=muon run.name=muon": "longer, another optimizer; the same run.name resumes",
    "maxhydra data=text data.path=my.txt": "train on your own text",
    "maxhydra task=inspect model=llama3.1-405b task.devices=256": "parameters and memory, without the devices",
    "maxhydra task=tune model=llama3.2-1b task.save_as=fast": "find the fastest settings, save as an experiment",
    "maxhydra -m optimizer.learning_rate=1e-3,3e-3 run.name=lr": "a sweep in outputs/lr",
    "maxhydra runs best sweep=lr": "its best run, and the command to run it again",
    "maxhydra explain optimizer.learning_rate": "the meaning of a key, and where its value comes from",
}


@cache
def commands() -> dict[str, str]:
    """Return the summary of each subcommand."""
    return docstrings(COMMANDS)


def docstrings(folder: Path) -> dict[str, str]:
    """Return the first docstring line of each module in a folder, without importing it."""
    paths = (path for path in sorted(folder.glob("*.py")) if not path.name.startswith("_"))
    modules = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    return {name: (ast.get_docstring(module) or "").partition("\n")[0] for name, module in modules.items()}


def help_text(arguments: list[str]) -> str:
    """Return the help text, including the options of `--config-dir`."""
    options = groups((CONF, *project_folders(), *_config_dirs(arguments)))
    overlays = {group: paths for group, paths in options.items() if is_overlay(paths[0])}
    sections = {group: paths for group, paths in options.items() if group not in overlays}
    lines = [
        "maxhydra: train and run language models in JAX, as Hydra experiments",
        "",
        "usage: maxhydra [group=option ...] [key=value ...] [flags]",
        "       maxhydra COMMAND ...",
        "",
        "Config groups and their options (* is the default):",
        *_groups(sections),
        "",
        "Overlays, which can set any key:",
        *_table({f"{group}={path.stem}": description(path) for group, paths in overlays.items() for path in paths}),
        "",
        "Commands:",
        *_table(commands()),
        "",
        "Flags:",
        *_table(FLAGS),
        "",
        "Examples:",
        *(line for command, text in EXAMPLES.items() for line in (f"  {command}", f"      {text}")),
        "",
        "All keys: maxhydra --cfg job, and docs/config.md.",
    ]
    return "\n".join(lines) + "\n"


def _config_dirs(arguments: list[str]) -> Iterator[Path]:
    for flag, value in zip(arguments, [*arguments[1:], ""], strict=True):
        name, _, inline = flag.partition("=")
        if name in ("--config-dir", "-cd"):
            yield Path(inline or value).expanduser()


def _groups(options: dict[str, list[Path]]) -> Iterator[str]:
    chosen = dict(defaults())
    width = max(len(group) for group in options) + 2
    for group, paths in options.items():
        doc = Config.__annotations__[group].__doc__ if group in Config.__annotations__ else ""
        summary = re.split(r"[.;:]\s", f"{doc} ")[0].strip()
        names = ", ".join(f"*{path.stem}" if chosen.get(group) == path.stem else path.stem for path in paths)
        yield from _entry(group, f"{names}  ({summary})" if summary else names, width)


def _table(rows: dict[str, str]) -> Iterator[str]:
    width = min(max((len(name) for name in rows), default=0), 34) + 2
    for name, text in rows.items():
        yield from _entry(name, text, width)


def _entry(name: str, text: str, width: int) -> list[str]:
    columns = max(60, min(shutil.get_terminal_size((110, 24)).columns, 120))
    head, indent = f"  {name:<{width}}", " " * (width + 2)
    if len(name) >= width:
        return [f"  {name}", *textwrap.wrap(text, columns, initial_indent=indent, subsequent_indent=indent)]
    wrapped = textwrap.wrap(text, columns, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)
    return [line.rstrip() for line in wrapped] or [head.rstrip()]
