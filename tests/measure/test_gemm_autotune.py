"""bench/gemm_autotune.py: entries of XLA's autotune results are identified, and the fastest algorithm is written."""

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.cli import bench_script

bench = bench_script("gemm_autotune")

ENTRY = """entries {
  key {
    target {
      device: "ed0e56ab8b2a0ecb"
      hlo_fingerprint: "%s"
    }
  }
  value {
    optimal_config {
      backend: %s
      backend_config {
        %s
      }
    }
  }
}
"""
GEMM_CONFIG = "gemm {\n          algorithm: 5\n          autotune_workspace_size: 33554432\n        }"
HLO = """
  %p.0 = bf16[512,256]{1,0} parameter(0)
  %p.1 = bf16[128,256]{0,1} parameter(1)
  %old = f32[512,128]{1,0} parameter(2)
  %made.1 = (f32[512,128]{1,0}, s8[33554432]{0}) custom-call(%p.0, %p.1, %old), \
custom_call_target="__cublas$lt$matmul", output_to_operand_aliasing={{0}: (2, {})}, \
backend_config={"gemm_backend_config":{"selected_algorithm":"6","beta":1,\
"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]},"lhs_stride":"131072"}}
  %norm = f32[512,128]{1,0} custom-call(%old), custom_call_target="__gpu$xla.gpu.triton"
"""


def entry(name: str) -> str:
    if name.startswith("fusion"):
        return ENTRY % (name, "NATIVE_EMITTER", "native_emitter {\n        }")
    return ENTRY % (name, "CUBLASLT", GEMM_CONFIG)


def gemm(number: int) -> Any:
    return bench.Gemm("bf16", 1024 * (number + 1), 512, 256, 1, 0, "10 10 10", False, False)


def test_gemms_of_a_program_are_read_with_their_layouts() -> None:
    expected = bench.Gemm("f32", 512, 128, 256, 1, 1, "10 01 10", True, True)
    assert bench.gemms_of(HLO) == [(expected, 6)]


def test_entries_get_other_algorithms_and_the_rest_of_the_file_is_unchanged() -> None:
    text = "".join(map(entry, ("a", "fusion", "b", "c")))
    results = bench.AutotuneResults(text, without=["c"])
    assert results.fingerprints() == ["a", "b"]
    changed = results.with_algorithms({0: 3}.get)
    assert re.findall(r"algorithm: (\d+)", changed) == ["3", "5", "5"]
    assert results.with_algorithms(lambda _: None) == text == results.with_algorithms(lambda _: 5)


def test_no_two_entries_have_the_same_order_of_algorithms() -> None:
    for number in range(32):
        runs = {run: bench.algorithm_in_run(number, run) for run in range(bench.ALGORITHMS)}
        assert sorted(runs.values()) == list(range(bench.ALGORITHMS)) and bench.identify_entry(runs, 32) == number
    assert bench.identify_entry({0: 0}, 32) is None


def test_the_fastest_algorithm_in_isolation_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A fake compiler with opaque entry keys, which differ between the step and isolated GEMMs, and a fake GPU whose
    clock differs from run to run."""
    rng = random.Random(0)
    count, positions = 11, list(range(11))
    rng.shuffle(positions)
    seconds = [[rng.uniform(1, 1.2) for _ in range(bench.ALGORITHMS)] for _ in range(count)]

    def algorithms(text: str, prefix: str) -> dict[int, int]:
        matches = re.findall(rf'"{prefix}(\d+)".*?algorithm: (\d+)', text, re.DOTALL)
        return {int(number): int(algorithm) for number, algorithm in matches}

    def start(work: Any, name: str, role: str, flag: str) -> SimpleNamespace:
        prefix, path = "step" if role == "step" else "alone", work.folder / f"{name}.txt"
        if flag == bench.DUMP:
            names = ["ref"] if role == "reference" else [f"{prefix}{n}" for n in range(count)]
            extra = ["ref"] if role == "alone" else []
            path.write_text("".join(map(entry, ["fusion", *names, *extra])))
        current = algorithms(path.read_text(), prefix)
        order = positions if role == "step" else positions[::-1]
        rows: list[Any] = [(gemm(n), current.get(order[n], 0)) for n in range(count)]
        if role == "timed":
            clock = rng.uniform(1, 1.1)
            rows = [(row, a, 1e-3 * clock * seconds[n][a], 5e-3 * clock) for n, (row, a) in enumerate(rows)]
        # One of the runs fails.
        if name != "run3":
            (work.folder / f"{name}.json").write_text(json.dumps(rows))
        (work.folder / f"{name}.log").write_text("out of memory\n")
        return SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr(bench.Workspace, "start", start)
    bench.choose(bench.Workspace(tmp_path, []), tmp_path / "chosen.txt")
    out, err = capsys.readouterr()
    assert "run3 failed: out of memory" in err and len(out.splitlines()) == count
    chosen = algorithms((tmp_path / "chosen.txt").read_text(), "step")
    lines = {line["rows"]: line for line in map(json.loads, out.splitlines())}
    for number in range(count):
        line = lines[gemm(number).rows]
        times = {int(algorithm): ms for algorithm, ms in line["ms"].items()}
        assert len(times) == bench.ALGORITHMS - 1
        best = min(times, key=lambda algorithm: seconds[number][algorithm])
        assert chosen[positions[number]] == line["chosen"] == best
