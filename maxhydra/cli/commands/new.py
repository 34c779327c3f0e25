"""Create a project of your own, with options, a data source, a reward, a model and a test: new NAME.

maxhydra new my_project
pip install -e my_project
maxhydra model=my_project data=my_project

The folder NAME is a Python package. Once it is installed, maxhydra finds the options in its conf/ without --config-dir.
"""

import keyword
import re
import shutil
from pathlib import Path
from string import Template

from maxhydra.cli.flags import Parser
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.registry import groups

TEMPLATES = Path(__file__).parents[1] / "project"
SUFFIX = ".template"


def main(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    parser = Parser(prog="maxhydra new", add_help=False)
    parser.add_argument("name")
    name = parser.parse_args(arguments).name
    folder = Path(name)
    _check_name(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _write_project(partial, folder.name)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"created {folder}\nnext:   pip install -e {folder}\n        maxhydra model={folder.name} data={folder.name}")
    return 0


def _check_name(folder: Path) -> None:
    """Raise ConfigError if the name is not that of a new package whose options would differ from ours."""
    name, accepted = folder.name, "a new Python package: lower-case letters, digits and _, such as my_project"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(Problem("new", "is not the name of a package", name, accepted))
    taken = {path.stem for paths in groups().values() for path in paths} | {"maxhydra", "test", "tests"}
    if name in taken:
        raise ConfigError(Problem("new", "is the name of an option of maxhydra", name, accepted))
    if folder.exists():
        raise ConfigError(Problem("new", "already exists", str(folder), hint="choose another name, or move it"))


def _write_project(folder: Path, name: str) -> None:
    """Write the files of TEMPLATES, in which `package` and `project` stand for the name in paths."""
    for source in sorted(TEMPLATES.rglob(f"*{SUFFIX}")):
        parts = [name if part == "package" else part for part in source.relative_to(TEMPLATES).parts]
        target = folder.joinpath(*parts)
        target = target.with_name(re.sub(r"^project\.yaml", f"{name}.yaml", target.name.removesuffix(SUFFIX)))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(Template(source.read_text(encoding="utf-8")).substitute(project=name), encoding="utf-8")
