"""Tiers of the tests: quick, default and exhaustive.

An exhaustive test is a further instance of a behaviour that a test of the default tier covers as well: another model
family, mesh, store, task or moment of a kill. `exhaustive` implies `slow`. `default_cases` names the cases of a
parametrized test that are in the default tier; the others are exhaustive. tests/conftest.py loads this module as a
plugin.
"""

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    default = item.get_closest_marker("default_cases")
    if default is not None and item.callspec.id not in default.args:  # type: ignore[attr-defined]
        item.add_marker("exhaustive")
    if item.get_closest_marker("exhaustive") is not None:
        item.add_marker("slow")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Fail if `default_cases` names a case that does not exist, provided that whole files were collected."""
    if any("::" in argument for argument in config.args):
        return
    missing: dict[str, set[str]] = {}
    for item in items:
        if (default := item.get_closest_marker("default_cases")) is not None:
            missing.setdefault(item.nodeid.partition("[")[0], set(default.args)).discard(item.callspec.id)  # type: ignore[attr-defined]
    unknown = {name: sorted(cases) for name, cases in missing.items() if cases}
    if unknown:
        raise pytest.UsageError(f"default_cases names cases that do not exist: {unknown}")
