"""docs/config.md matches the schema, and every key of the schema is read somewhere."""

import ast
import functools
import re
from pathlib import Path

import pytest

from maxhydra.config.docs import PATH, reference
from maxhydra.config.fields import walk
from maxhydra.config.registry import PACKAGE, task_schemas
from maxhydra.config.schema.config import Config
from maxhydra.kernels import docs

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_reference_is_current() -> None:
    assert PATH.read_text() == reference(), "run `python -m maxhydra.config.docs`"


def test_tables_of_kernels_are_current() -> None:
    page = docs.PATH.read_text()
    assert docs.with_tables(page) == page, "run `python -m maxhydra.kernels.docs`"
    assert set(re.findall(r"<!-- table: (\w+) -->", page)) == set(docs.OPERATIONS)


def schema_keys() -> dict[str, str]:
    """Path -> name of every key that is not a section, those of single tasks included."""
    trees = [Config, *task_schemas().values()]
    return {path: field.name for cls in trees for path, field in walk(cls) if not field.spec.is_section}


def modules() -> list[ast.Module]:
    """Every module, those of the schema without its declarations."""
    found = []
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        tree = ast.parse(path.read_text())
        if PACKAGE / "config" in path.parents:
            tree.body = [node for node in tree.body if not isinstance(node, ast.ClassDef)]
        found.append(tree)
    return found


@functools.cache
def attributes_read() -> set[str]:
    """Names read as `something.name`, and those read by `getattr(something, name)` in a loop over a constant."""
    nodes = [node for tree in modules() for node in ast.walk(tree)]
    plain = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    loops = {(loop.iter.id, loop.target.id) for loop in nodes if _over_constant(loop)}
    calls = [ast.unparse(node.args[1]) for node in nodes if isinstance(node, ast.Call) and _is_getattr(node)]
    constants = {constant for constant, target in loops if target in calls}
    assigned = [node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)]
    tuples = [node.value for node in assigned if {ast.unparse(target) for target in node.targets} & constants]
    return plain | {str(name) for names in tuples for name in _flat(names)}


def _flat(names: ast.Tuple) -> list[object]:
    """The constants in a tuple, those of starred tuples within it too."""
    items = [item.value if isinstance(item, ast.Starred) else item for item in names.elts]
    nested = [item.elts if isinstance(item, ast.Tuple) else [item] for item in items]
    return [item.value for group in nested for item in group if isinstance(item, ast.Constant)]


def _over_constant(node: ast.AST) -> bool:
    is_loop = isinstance(node, (ast.For, ast.comprehension))
    return is_loop and isinstance(node.iter, ast.Name) and node.iter.id.isupper() and isinstance(node.target, ast.Name)


def _is_getattr(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "getattr" and isinstance(call.args[1], ast.Name)


@pytest.mark.exhaustive
def test_every_key_is_read() -> None:
    assert [path for path, attribute in schema_keys().items() if attribute not in attributes_read()] == []


def test_every_key_has_a_line_of_documentation() -> None:
    trees = [Config, *task_schemas().values()]
    assert [path for cls in trees for path, field in walk(cls) if not field.doc] == []
