"""Imports go down the rows of docs/architecture.md, never up, across or around."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "maxhydra"


def rows() -> dict[str, int]:
    """Package -> row, from the table in docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    found = re.findall(r"^\| (\d+) \| ([\w, ]+) \|", text, re.MULTILINE)
    return {package.strip(): int(row) for row, packages in found for package in packages.split(",")}


def modules() -> list[Path]:
    kernels = [PACKAGE / "kernels" / path.relative_to(ROOT / "kernels") for path in (ROOT / "kernels").rglob("*.py")]
    return [path for path in PACKAGE.rglob("*.py") if "conf" not in path.parts] + kernels


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path) -> set[str]:
    """Sub-packages of maxhydra that a module imports, by statement or by `import_module` with a name in the code."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and node.args and _called(node) == "import_module":
            found.add(_leading_text(node.args[0]))
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in found if name.startswith("maxhydra.") and not name.startswith("maxhydra.__")}


def test_imports_go_down() -> None:
    where, wrong = rows(), []
    for path in modules():
        own, *rest = path.relative_to(PACKAGE).parts
        if rest:
            assert own in where, f"{own} has no row in docs/architecture.md"
            others = sorted(other for other in imported(path) - {own} if where[other] >= where[own])
            wrong += [f"{path}: row {where[own]} imports {other} of row {where[other]}" for other in others]
    assert wrong == []


def test_modules_have_no_import_cycles() -> None:
    """Imports at module level, within packages too; an import inside a function runs later and cannot form a cycle."""
    paths = {name_of(path): path for path in modules()}
    edges = {name: top_level_imports(path, set(paths)) - {name} for name, path in paths.items()}
    while leaves := {name for name, targets in edges.items() if not targets}:
        edges = {name: targets - leaves for name, targets in edges.items() if name not in leaves}
    assert not edges, f"cycles among {sorted(edges)}"


def test_files_and_functions_are_short() -> None:
    for path in modules():
        assert len(path.read_text().splitlines()) <= 400, path
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name}"


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def top_level_imports(path: Path, known: set[str]) -> set[str]:
    """Modules of maxhydra that a module imports while it is loaded."""
    found = set()
    for node in parsed(path).body:
        if isinstance(node, ast.ImportFrom) and node.module in known:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & known) | ({node.module} if names - known else set())
    return found


def test_every_package_has_a_row() -> None:
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name not in ("conf", "__pycache__")}
    assert packages <= set(rows())


def test_no_family_names_in_shared_code() -> None:
    """A family is data: its name stands in conf/model and convert/, nowhere else.

    llama3 is a rope scaling's name too, and olmo that of a format of token shards.
    """
    family = re.compile(r"\b(mistral|mixtral|gemma|qwen|deepseek|kimi|gpt|olmo|llama(?!3\b))", re.IGNORECASE)
    for path in modules():
        text = path.read_text()
        if "convert" in path.parts or not family.search(text):
            continue
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                node.body = [line for line in node.body if not _is_text(line)] or [ast.Pass()]
        found = {name.lower() for name in family.findall(ast.unparse(tree))}
        assert found <= ({"olmo"} if "data" in path.parts or path.name in ("data.py", "usage.py") else set()), path


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _leading_text(node: ast.expr) -> str:
    """The constant beginning of a string or f-string: `maxhydra.tasks.` of f"maxhydra.tasks.{name}"."""
    first = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""


def test_import_module_counts_as_an_import(tmp_path: Path) -> None:
    """Discovered plug-ins of a package are its own modules; any other package must be in a lower row."""
    source = 'import_module("maxhydra.convert.hf_config"); importlib.import_module(f"maxhydra.tasks.{name}")\n'
    (tmp_path / "module.py").write_text(source + "import_module(f'{__name__}.x'); import_module(name)\n")
    assert imported(tmp_path / "module.py") == {"convert", "tasks"}


def _is_text(statement: ast.stmt) -> bool:
    """A docstring, of a module, class, function or field: prose may name what code may not."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
