"""task=bench: its records describe the config, and its figures are consistent."""

import importlib
import json
import re
import resource
import shlex
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace
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
from tests.support.cli import ROOT

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


@pytest.mark.slow
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


def bench_module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of bench/ that imports others."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module(name)


def test_the_tables_of_results_are_generated_from_the_stored_records(monkeypatch: pytest.MonkeyPatch) -> None:
    table = bench_module("table", monkeypatch)
    lines = table.read_lines([ROOT / "docs" / "performance.jsonl"])
    pages = {path.name: path.read_text(encoding="utf-8") for path in table.PAGES}
    for path, (name, make) in table.PAGES.items():
        expected = table.placed(pages[path.name], make(lines), name=name)
        assert lines and pages[path.name] == expected, "python bench/table.py docs/performance.jsonl"
    kernel = {"bench": "kernels", "device": "a", "jax": "1", "kernel": "attention", "case": "plain", "shape": [4, 64]}
    text = table.tables([{**kernel, "xla": {"forward_ms": 2.5, "error": 0.1}, "triton": {"refused": "no"}}])
    assert text.endswith("| attention, plain | 4 x 64 | xla (forward ms 2.5, error 0.1), triton (refused no) |\n")
    for line in lines:
        assert f"{line.get('tokens_per_second', line.get('ours', 0)):,.0f}" in pages["measured.md"]


def test_xla_flags_of_the_shell_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SimpleNamespace(device_kind="cpu", devices=1)
    target = BenchTarget(compose(["model=micro"]).config, machine, {"model": "micro"}, ("train.seq_len=8",))  # type: ignore[arg-type]
    for flags, recorded in (("", []), ("  --xla_one=1 --xla_two", ["--xla_one=1", "--xla_two"])):
        monkeypatch.setattr("maxhydra.measure.record.original_environment", lambda flags=flags: {"XLA_FLAGS": flags})
        line = target.line("pretrain", tokens_per_second=3)
        assert line.get("xla_flags", []) == recorded
        assert bench_module("table", monkeypatch).settings(line) == ", ".join(["train.seq_len=8", *recorded])


def test_a_peer_benchmark_gets_the_same_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    compare = bench_module("compare", monkeypatch)
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
    # A model with fewer layers is another one.
    cut = {**record, "tokens_per_second": 900, "overrides": ["model.num_layers=2"]}
    (line,) = compare.ratios([slower, record, rounded, cut, peer, other])
    assert line["ratio"] == 1.5 and "layers" not in line
    (line,) = compare.ratios([record, cut, {**peer, "overrides": ["model.num_layers=2"]}])
    assert line["ratio"] == 4.5 and line["layers"] == 2


GPU = {"device": "NVIDIA H200", "devices": 1, "jax": "0.11.2", "date": "2026-11-19", "model": "llama3.2-1b"}
SERVED = {"bench": "serve_load", **GPU, "overrides": [], "clients": 64, "new": 128, "tokens_per_second": 47721.4}
SERVED |= {"p50_s": 0.167, "p95_s": 0.171, "p99_s": 0.319, "first_token_p50_s": 0.028, "first_token_p95_s": None}
SERVED |= {"lost": 0, "requests": 2751, "programs_compiled_under_load": 0.0}
SERVED |= {"memory_start_mib": 100.2, "memory_end_mib": 101.9}
START = {"bench": "serve_start", **GPU, "overrides": [], "is_cached": True, "programs_compiled": 45.0}
START |= {"start_s": 11.94, "first_response_s": 12.0}
ROLLOUTS = {"bench": "rollouts", **GPU, "overrides": [], "completions": 128, "prompt": 64, "new": 130}
ROLLOUTS |= {"tokens_per_second": 30100.0, "rounds_tokens_per_second": [30000.0, 30200.0], "is_identical": True}
DRAFTS = {"bench": "speculation", **GPU, "overrides": [], "text": "repeating", "batch": 1, "prompt": 512, "new": 512}
DRAFTS |= {"speculative": 3121.0, "plain": 1107.0, "ratio": 2.82, "tokens_accepted_per_token": 0.8}
MODEL_DRAFTS = {**DRAFTS, "method": "model", "draft": "llama3.2-1b", "model": "llama3.1-8b", "ratio": 1.9}
GRAMMARS = {"bench": "structured_output", **GPU, "overrides": [], "batch": 32, "error_rate": 0.01, "ms": 1.15}
GRAMMARS |= {"steps_per_call": "auto", "free_ms": 1.0, "cost_percent": 15.0, "steps_per_token": 1.1}
GRAMMARS |= {"rejected_per_token": 0.011}


def test_every_kind_of_row_has_a_table_of_its_newest_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    table = bench_module("table", monkeypatch)
    failed = {"bench": "failed", "row": "training/llama3.2-1b", "error": "out of memory"}
    lines = [failed, SERVED, START, ROLLOUTS, DRAFTS, MODEL_DRAFTS, GRAMMARS]
    everything, newest = table.tables(lines), table.results([*lines, {**SERVED, "tokens_per_second": 50000.0}])
    times = "0.167 s | 0.171 s | 0.319 s | 0.028 s"
    expected = {
        f"| `llama3.2-1b`, 128 tokens a request | 64 | 50,000 | {times} | 0 of 2,751 | 2026-11-19 |",
        "| `llama3.2-1b` | filled | 11.9 s | 12.0 s | 2026-11-19 |",
        "| `llama3.2-1b` | 128 | 64, 130 | 30,100 | yes | 2026-11-19 |",
        "| `llama3.2-1b` | n-grams | repeating | 1 | 3,121 | 1,107 | 2.82 | 2026-11-19 |",
        "| `llama3.1-8b` | `llama3.2-1b` | repeating | 1 | 3,121 | 1,107 | 1.90 | 2026-11-19 |",
        "| `llama3.2-1b` | 32 | 1.1 % | 1.15 | 1.00 | 15.0 % | 2026-11-19 |",
    }
    assert expected < set(newest.splitlines()) and "47,721" not in newest and "out of memory" not in newest
    assert "| 32 | auto | 1.1 % | 1.10 | 1.15 | 1.00 | 2026-11-19 |" in everything
    assert "47,721 | 0.167 s, 0.171 s, 0.319 s | 0.028 s |  | 0 of 2,751 | 0 | 100 to 102 | 2026-11-19 |" in everything


def test_the_error_of_a_failed_row_is_its_last_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    last_error = bench_module("failed_row", monkeypatch).last_error
    trace = "KeyError: 'a'\n\nDuring handling:\nmaxhydra.config.errors.ConfigError:  model=x: no\n    accepted: y\n"
    expected = "maxhydra.config.errors.ConfigError:  model=x: no\n    accepted: y"
    notice = "--------------------\nFor simplicity, JAX has removed its internal frames\n"
    assert last_error(f"compiling\n{trace}{notice}") == expected
    cause, last = f"jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED\n{notice}", "OutOfMemoryError: try less"
    assert last_error(f"{cause}\nThe above exception was the direct cause:\n\n{last}\n") == last
    assert last_error("usage: train_hf.py\ntrain_hf.py: error: no device\n") == "train_hf.py: error: no device"


@pytest.mark.exhaustive
def test_rows_of_the_script_compose() -> None:
    listing = subprocess.run(["bash", "bench/one_gpu.sh", "list"], cwd=ROOT, capture_output=True, text=True, check=True)
    commands = [line.split() for line in listing.stdout.splitlines()]
    scripts = {command[2] for command in commands}
    assert len({command[0] for command in commands}) == len(commands) > 30
    assert all((ROOT / script).is_file() for script in scripts)
    own = ("batch=", "prompt=", "new=", "repeats=")
    for name, _, script, *arguments in commands:
        if script in ("bench/pretrain.py", "bench/decode.py"):
            what = "pretrain" if script == "bench/pretrain.py" else "decode"
            overrides = [text for text in arguments if not text.startswith(own)]
            assert (
                not Composer()
                .check_overrides(["task=bench", f"task.what=[{what}]", *overrides], with_hydra=False)
                .problems
            ), name


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
