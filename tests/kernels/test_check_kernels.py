"""bench/check_kernels.py and bench/same_loss.py: errors of kernels and of quantized training are detected."""

import importlib
import json
import math
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import pytest

from maxhydra.measure.kernels import relative_error

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    monkeypatch.syspath_prepend(BENCH)
    return {name: importlib.import_module(name) for name in ("checks", "check_kernels", "same_loss")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "dtype", "backend"),
    [
        ("rms_norm", "bfloat16", "xla"),
        pytest.param("gated_delta", "float32", "chunked", marks=pytest.mark.exhaustive),
        pytest.param("linear_cross_entropy", "float32", "xla", marks=pytest.mark.exhaustive),
    ],
)
def test_backends_of_this_machine_are_within_the_limits(
    bench: dict[str, ModuleType], kernel: str, dtype: str, backend: str
) -> None:
    """Kernels for other machines are skipped."""
    check_kernels = bench["check_kernels"]
    case = next(case for case in check_kernels.KERNELS[kernel].cases() if case.dtype == dtype)
    (line,) = check_kernels.summary(check_kernels.run(case))
    assert (line["kernel"], line["backend"], line["dtype"], line["cases"]) == (kernel, backend, dtype, 1)
    assert 0 < line["gradients"] <= line["limit"] and "failed" not in line


@pytest.mark.slow
def test_errors_are_detected_and_reported(bench: dict[str, ModuleType]) -> None:
    """Wrong values, wrong gradients only, NaN among finite values, and an exception."""
    checks, check_kernels = bench["checks"], bench["check_kernels"]

    def broken(x: jax.Array) -> jax.Array:
        raise FloatingPointError("no such kernel")

    backends = {
        "right": jnp.sin,
        "far": lambda x: jnp.sin(x) * jnp.asarray(1.01, x.dtype),
        "flat": lambda x: jax.lax.stop_gradient(jnp.sin(x)),
        "none": lambda x: jnp.sin(x).at[2].set(jnp.nan),
        "broken": broken,
    }
    case = checks.Case("sine", "float16", (4, 64), (("mask", "all"),))
    results = checks.run_check(case, lambda case: checks.Check(backends, jnp.sin, (case.sample(0, *case.sizes),)))
    lines = {line["backend"]: line for line in check_kernels.summary(results)}
    assert [name for name, line in lines.items() if "failed" not in line] == ["right"]
    assert lines["flat"]["values"] < 1e-3 and lines["flat"]["gradients"] == 1
    (message,) = lines["broken"]["failed"]
    assert message == "float16 [4, 64] mask=all: FloatingPointError: no such kernel"
    one, none = jnp.ones(3), jnp.full(3, jnp.nan)
    assert math.isnan(relative_error((one, none, one), (one, one, one)))
    two = [checks.Result(case, "half", values, 0.0) for values in (0.0, math.nan, 0.001)]
    (line,) = check_kernels.summary(two)
    assert math.isnan(line["values"]) and len(line["failed"]) == 1


def test_every_kernel_has_its_own_cases(bench: dict[str, ModuleType]) -> None:
    kernels = bench["check_kernels"].KERNELS
    for name, kernel in kernels.items():
        cases = list(kernel.cases())
        assert len(set(cases)) == len(cases) >= 3 and {case.kernel for case in cases} == {name}
        assert {case.dtype for case in cases} <= set(bench["check_kernels"].LIMITS)


@pytest.mark.slow
def test_losses_are_means_over_the_seeds(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    same_loss = bench["same_loss"]
    losses = {("none", "0"): 2.0, ("none", "1"): 4.0, ("fp8", "0"): 2.2, ("fp8", "1"): 4.1}
    for (name, seed), loss in losses.items():
        folder = tmp_path / same_loss.folder(name, seed)
        folder.mkdir()
        rows = [{"step": step, "loss": loss} for step in (10, 90)] + [{"step": 100, "loss": loss, "eval/loss": loss}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lists, rest = same_loss.split(["model=tiny", "seeds=0,1"], {"formats": "none,fp8", "seeds": "0"})
    assert (lists, rest) == ({"formats": ["none", "fp8"], "seeds": ["0", "1"]}, ["model=tiny"])
    folders = {name: [tmp_path / same_loss.folder(name, seed) for seed in lists["seeds"]] for name in lists["formats"]}
    line = same_loss.line("fp8", "none", folders, rest)
    assert line["eval_runs"] == [2.2, 4.1] and line["eval_loss"] == {"100": 3.15}
    assert line["eval_over"] == line["loss_over"] == line["worst_over"] == 0.05
