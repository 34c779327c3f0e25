"""task=bench: its records describe the config, and its figures are consistent."""

import importlib
import json
import re
import resource
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra import tasks
from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import Composer, compose
from maxhydra.config.schema.config import parameter_estimate
from maxhydra.config.schema.tasks.analysis import TuneTask
from maxhydra.measure import record
from maxhydra.measure.kernels import relative_error
from maxhydra.measure.record import BenchTarget, OutOfMemoryError, explain_out_of_memory
from maxhydra.record.processes import host_bytes
from maxhydra.runtime.detect import hardware_options
from maxhydra.tune.space import axes
from tests.support.cli import ROOT, bench_script

FIXED = ["task=bench", "model=micro", "task.steps=2", "task.warm_up=1", "run.name=it"]
SMALL = ["train.per_device_batch_size=2", "train.seq_len=16", "model.num_layers=1", "model.scan_unroll=1"]


def run(folder: Path, *overrides: str) -> tuple[tasks.Result, list[dict[str, Any]]]:
    arguments = [*FIXED, *SMALL, *overrides]
    composed = compose(arguments)
    result = tasks.run(composed.config, choices=composed.choices, overrides=arguments, path=folder / "it")
    path = folder / "it" / "bench.jsonl"
    return result, [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.exhaustive
def test_lines_of_all_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["task.load.batches=[2]", "task.load.prompt=4", "task.load.new=4", "task.load.repeats=1"]
    result, lines = run(tmp_path, "task.what=[pretrain,kernels,decode]", "objective=tokens_per_second", *load)
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert printed == lines
    (step,), kernels, (decode,) = (
        [line for line in lines if line["bench"] == kind] for kind in ("pretrain", "kernels", "decode")
    )
    assert step["devices"] == 8 and step["settings"]["data"] == "synthetic"
    # 8 devices, 2 sequences of 16 tokens each.
    np.testing.assert_allclose(step["tokens_per_second"], 256 / step["step_ms"] * 1e3, rtol=0.02)
    assert result.objective == step["tokens_per_second"]
    # Untrained, all 260 tokens are equally likely: ln 260.
    assert abs(step["loss"][0] - np.log(260)) < 1 and step["loss"][1] < step["loss"][0]
    assert all(line["backend"] == "xla" and line["error"] < 1e-5 for line in kernels)
    (attention,) = (line for line in kernels if line["operation"] == "attention")
    assert attention["shapes"]["q_BTNH"] == [16, 16, 4, 16]
    assert decode["batch"] == 2 and decode["tokens_per_second"] > 0
    facts = json.loads((tmp_path / "it" / "run.json").read_text())
    assert facts["status"] == "finished" and facts["lines"] == lines


def test_out_of_memory_is_one_line_that_suggests_settings(tmp_path: Path) -> None:
    # The hardware option declares a device with a fraction of a MiB.
    result, lines = run(tmp_path, "hardware=cpu", "hardware.memory_gib=0.0001")
    assert result.status == "failed" and not lines
    assert "train.per_device_batch_size under 2" in result.reason and "\n" not in result.reason
    assert json.loads((tmp_path / "it" / "run.json").read_text())["status"] == "failed"


def test_distance_is_the_largest_relative_error() -> None:
    result, expected = {"a": jnp.ones(3), "b": jnp.array([1.0, 0.0])}, {"a": jnp.ones(3), "b": jnp.array([1.0, 1.0])}
    np.testing.assert_allclose(relative_error(result, expected), 0.5**0.5, rtol=1e-6)


def test_a_failed_allocation_is_explained() -> None:
    with pytest.raises(OutOfMemoryError) as caught, explain_out_of_memory("try less"):
        jnp.zeros(2**46).block_until_ready()
    assert re.fullmatch(r"out of memory \(.*\b281474976710656 bytes; .* GiB available\); try less", str(caught.value))
    with pytest.raises(ValueError, match="else"), explain_out_of_memory("try less"):
        raise ValueError("something else")


def test_engine_settings_that_the_load_determines_are_rejected() -> None:
    with pytest.raises(ConfigError) as caught:
        compose([*FIXED, "task.what=[]", "task.engine.max_batch=7", "task.load.batches=[]"])
    assert {problem.path for problem in caught.value.problems} == {
        "task.what",
        "task.engine.max_batch",
        "task.load.batches",
    }


def commands_of_the_page() -> list[list[str]]:
    lines = (ROOT / "docs" / "performance.md").read_text().splitlines()
    commands = [shlex.split(line) for line in lines if line.strip().startswith("maxhydra task=")]
    assert len(commands) > 4
    return [command[1:] for command in commands]


@pytest.mark.slow
@pytest.mark.parametrize("command", commands_of_the_page(), ids=lambda command: " ".join(command)[:60])
def test_commands_of_the_page_compose(command: list[str]) -> None:
    examination = Composer().check_overrides(command, with_hydra=False)
    task = examination.composed().config.task
    if isinstance(task, TuneTask):
        assert axes(examination.composed().config, task, hardware_options()["gpu-h200"])


def test_the_table_of_results_is_generated_from_the_stored_records() -> None:
    table = bench_script("table")
    page, lines = table.DOCS.read_text(), table.read_lines([ROOT / "docs" / "performance.jsonl"])
    assert lines and page == table.placed(page, table.table(lines)), "python bench/table.py docs/performance.jsonl"
    kernel = {"bench": "kernels", "device": "a", "jax": "1", "kernel": "attention", "case": "plain", "shape": [4, 64]}
    text = table.table([{**kernel, "xla": {"forward_ms": 2.5, "error": 0.1}, "triton": {"refused": "no"}}])
    assert text.endswith("| attention, plain | 4 x 64 | xla (forward ms 2.5, error 0.1), triton (refused no) |\n")
    for line in lines:
        assert f"{line.get('tokens_per_second', line.get('ours', 0)):,.0f}" in page


def test_xla_flags_of_the_shell_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SimpleNamespace(device_kind="cpu", devices=1)
    target = BenchTarget(compose(["model=micro"]).config, machine, {"model": "micro"}, ("train.seq_len=8",))  # type: ignore[arg-type]
    for flags, recorded in (("", []), ("  --xla_one=1 --xla_two", ["--xla_one=1", "--xla_two"])):
        monkeypatch.setattr("maxhydra.measure.record.original_environment", lambda flags=flags: {"XLA_FLAGS": flags})
        line = target.line("pretrain", tokens_per_second=3)
        assert line.get("xla_flags", []) == recorded
        assert bench_script("table").settings(line) == ", ".join(["train.seq_len=8", *recorded])


def test_a_peer_benchmark_gets_the_same_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    compare = importlib.import_module("compare")
    command = compare.peer_command("pretrain", ["model=tiny", "train.per_device_batch_size=4", "train.grad_accum=2"])
    sizes = dict(zip(command[1::2], command[2::2], strict=True))
    assert sizes == {
        "--model": "tiny",
        "--device": "cpu",
        "--batch": "8",
        "--seq-len": "128",
        "--steps": "20",
    }
    record = {"bench": "pretrain", "tokens_per_second": 300, "model": "tiny", "overrides": []}
    slower = {**record, "tokens_per_second": 250}
    rounded = {**record, "tokens_per_second": 400, "overrides": ["quantization=int8"]}
    peer = {"bench": "pretrain", "tokens_per_second": 200, "peer": "torch", "model": "tiny"}
    other = {**peer, "model": "large"}
    (line,) = compare.ratios([slower, record, rounded, peer, other])
    assert line["ratio"] == 1.5


def test_memory_limits_of_the_shell_and_the_memory_of_all_processes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_DATA: 3 * 2**30, resource.RLIMIT_AS: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], limits[kind]))
    assert 0 <= host_bytes() < 3 * 2**30
    config = compose(["model=micro", "model.emb_dim=8192"]).config
    # Weights and moments in float32, at least half of the latter.
    needed = parameter_estimate(config.model) * 4 * 2.5
    monkeypatch.setattr(record, "host_bytes", lambda: 0.6 * needed)
    record.require_memory(config, SimpleNamespace(memory_gib=None, process_count=2))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="but this host has"):
        record.require_memory(config, SimpleNamespace(memory_gib=None, process_count=1))  # type: ignore[arg-type]
    serve = record.suggest_less_memory(compose(["task=serve"]).config)
    assert "task.engine.cache_tokens" in serve and "mesh.fsdp" in serve and "train." not in serve
