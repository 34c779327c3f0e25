"""The registry reflects the files on disk, whatever happens to the files, the index, or the processes."""

import functools
import json
import math
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from maxhydra.config.compose.composer import compose
from maxhydra.config.errors import ConfigError
from maxhydra.config.serialize import to_yaml
from maxhydra.record import MetricsWriter, RunDirectory
from maxhydra.runs import Registry, frame, settings
from maxhydra.runs.compare import compare
from maxhydra.runs.importance import importance
from maxhydra.runs.index import FILE
from maxhydra.runs.query import rank_runs, select_runs, sort_runs
from tests.support.run_folders import change_facts, metrics_lines, write_run
from tests.support.skips import import_optional

ROOT = Path(__file__).parents[2]
RATES = {"a": 1e-4, "b": 1e-3, "c": 3e-3}


@pytest.fixture
def outputs(tmp_path):
    """A sweep of three runs, and a single run."""
    for number, (name, rate) in enumerate(RATES.items()):
        write_run(tmp_path / "lr" / name, rate=rate, seed=number, created=f"2026-03-0{number + 1}T12:00:00Z")
    write_run(tmp_path / "alone", rate=2e-3, status="failed", steps=5, tags=["odd"], created="2026-03-09T12:00:00Z")
    return tmp_path


def paths(runs):
    return [run.path for run in runs]


def flatten(node, path=""):
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from flatten(value, f"{path}.{key}" if path else key)
    else:
        yield path, node


@functools.cache
def full_config():
    return to_yaml(compose(["optimizer=muon"], None).config)


@pytest.mark.parametrize(
    "notes",
    ["plain", "two\nlines: here\n", "- no list", "a: b # c", "é ☃ 'quoted'", " wide " * 40, "|", "\t", "x\n\n  y\n- z"],
)
def test_config_parsed_in_sections_equals_the_whole_yaml(notes):
    content = yaml.safe_load(full_config())
    content["run"]["notes"], content["run"]["tags"] = notes, [notes, "b"]
    text = yaml.safe_dump(content, sort_keys=False)
    parsed = dict(settings.read(text))
    expected = {path: settings.cell(value) for path, value in flatten(content) if value != {} or "." in path}
    assert parsed == expected and parsed["run.notes"] == notes


def test_runs_at_all_depths_newest_first(outputs):
    write_run(outputs / "deep" / "er" / "x", created="2026-03-10T12:00:00Z")
    (outputs / ".hidden").mkdir()
    write_run(outputs / ".hidden" / "y")
    write_run(outputs / "alone" / "checkpoints" / "z")
    runs = Registry(outputs).runs()
    assert paths(runs) == ["deep/er/x", "alone", "lr/c", "lr/b", "lr/a"]
    assert runs[2].sweep == "lr" and runs[1].sweep == "" and runs[1].tags == ("odd",) and runs[1].step == 5


def test_metrics_match_the_file(tmp_path):
    rng = np.random.default_rng(0)
    loss, accuracy = rng.normal(size=50), rng.normal(size=50)
    loss[7] = math.nan
    folder = write_run(tmp_path / "a", steps=1)
    (folder / "metrics.jsonl").unlink()
    writer = MetricsWriter(folder / "metrics.jsonl")
    for step in range(50):
        writer.write(step, {"loss": loss[step]} | ({"accuracy": accuracy[step]} if step % 3 == 0 else {}))
    writer.close()
    registry = Registry(tmp_path)
    (id,) = (run.id for run in registry.runs())
    assert registry.metric("loss:min")[id] == np.nanmin(loss) and registry.metric("loss:max")[id] == np.nanmax(loss)
    assert registry.metric("loss")[id] == loss[-1] and registry.metric("accuracy")[id] == accuracy[48]
    assert registry.metric("accuracy:min")[id] == accuracy[::3].min()


def test_changes_on_disk_are_detected(outputs):
    registry = Registry(outputs)
    token = registry.token
    registry.refresh()
    assert registry.token == token
    metrics = outputs / "lr" / "a" / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write(metrics_lines(41, -10) + '{"step": 42, "lo')
    registry.refresh()
    assert registry.token != token
    run = registry.find("lr/a")
    assert run.step == 41 and registry.metric("loss:min")[run.id] == pytest.approx(-10 + 5 / 41)
    assert registry.read_errors() == [f"{metrics} line 46: is half-written; skipped"]
    with metrics.open("a") as file:
        file.write('ss": 7.5}\n')
    registry.refresh()
    assert not registry.read_errors() and registry.metric("loss")[run.id] == 7.5
    assert registry.metric("loss:min")[run.id] == pytest.approx(-10 + 5 / 41)

    writer = MetricsWriter(metrics)
    writer.truncate(after_step=10)
    writer.close()
    RunDirectory(outputs / "lr" / "b").label(add=["good"], note="why")
    change_facts(outputs / "alone", status="finished", notes="fixed")
    write_run(outputs / "new")
    (outputs / "lr" / "c" / "run.json").unlink()
    registry.refresh()
    assert sorted(paths(registry.runs())) == ["alone", "lr/a", "lr/b", "new"]
    assert registry.find("lr/a").step == 10 and registry.metric("loss:min")[run.id] > 2
    assert registry.find("lr/b").tags == ("good",) and registry.find("lr/b").notes == "why"
    assert registry.find("alone").status == "finished" and registry.find("alone").notes == "fixed"
    assert "lr/c" not in [str(value) for value in registry.values("path", registry.runs()).values()]


def test_a_new_file_with_a_reused_inode_is_read_from_the_start(outputs):
    """If a run was resumed twice since the last refresh, ext4 gives the third file the inode of the first."""
    registry = Registry(outputs)
    run, metrics = registry.find("lr/a"), outputs / "lr" / "a" / "metrics.jsonl"
    inode = metrics.stat().st_ino
    metrics.write_text("".join(metrics_lines(step, 100.5) for step in range(1, 90)))
    assert metrics.stat().st_ino == inode
    registry.refresh()
    assert registry.metric("loss:min")[run.id] == pytest.approx(100.5 + 5 / 89) and not registry.read_errors()


@pytest.mark.parametrize(
    "facts",
    [
        {"created": None},
        {"created": "today"},
        {"updated": "2026-03-04T12:00:00"},
        {"tags": 5},
        {"command": 5},
        {"sessions": "x"},
        {"sessions": [{"host": socket.gethostname(), "pid": None, "pid_started": None, "seconds": 1}]},
        {"sessions": [{"host": "", "pid": 1, "pid_started": None, "seconds": 10**400}]},
    ],
)
def test_a_run_in_an_unknown_format_does_not_hide_the_others(outputs, facts):
    write_run(outputs / "odd", **{"status": "running", **facts})
    registry = Registry(outputs)
    assert sorted(paths(registry.runs())) == ["alone", "lr/a", "lr/b", "lr/c", "odd"]
    assert registry.find("odd").status == "lost" and registry.find("odd").step == 40
    (message,) = registry.read_errors()
    assert "odd/run.json" in message and "the run is listed without it" in message


def test_damage_is_reported_and_hides_nothing(outputs, capsys):
    (outputs / "lr" / "a" / "run.json").write_text('{"name": "a",\n "status"')
    (outputs / "lr" / "b" / "config.yaml").write_text("a: [1\n")
    (outputs / "lr" / "c" / "labels.json").write_text("[]")
    metrics = outputs / "alone" / "metrics.jsonl"
    rows = metrics.read_text().splitlines()
    metrics.write_text("\n".join([rows[0], "\x00\x00", '{"loss": 1}', '{"step": 3, "loss": "x"}', *rows[1:], '{"st']))
    write_run(outputs / "odd", sessions=[])
    write_run(outputs / "odder", objective="eval/loss")
    registry = Registry(outputs)
    assert sorted(paths(registry.runs())) == ["alone", "lr/a", "lr/b", "lr/c", "odd", "odder"]
    assert registry.find("lr/a").status == "lost" and "run.json is not JSON" in (registry.find("lr/a").reason or "")
    assert registry.find("alone").step == 5 and registry.metric("loss")[registry.find("alone").id] > 0
    messages = "\n".join(registry.read_errors())
    for part in (
        "lr/a/run.json: is not JSON (line 2",
        "lr/b/config.yaml: is not YAML",
        "lr/c/labels.json: is damaged",
        "odd/run.json: is damaged (sessions); the run is listed without it",
        "odder/run.json: is damaged (objective is not an object); the run is listed without it",
        "alone/metrics.jsonl line 2: is not a row",
        "alone/metrics.jsonl line 3: is not a row",
        "alone/metrics.jsonl line 4: is not a row",
        "alone/metrics.jsonl line 9: is half-written",
    ):
        assert part in messages
    assert len(registry.read_errors()) == 9
    assert (outputs / "alone" / "metrics.jsonl").read_text().endswith('{"st')


@pytest.mark.parametrize("damage", ["delete", "garbage", "cut", "version", "foreign", "read-only", "a folder"])
def test_the_index_is_rebuilt(outputs, damage, monkeypatch):
    before = Registry(outputs)
    expected = [run._replace(id=0, change=0) for run in before.runs()]
    before.close()
    index = outputs / FILE
    content = index.read_bytes()
    match damage:
        case "delete":
            index.unlink()
        case "garbage":
            index.write_bytes(os.urandom(len(content)))
        case "cut":
            index.write_bytes(content[: len(content) // 2])
        case "version":
            with sqlite3.connect(index) as connection:
                connection.execute("PRAGMA user_version = 999")
        case "foreign":
            index.unlink()
            with sqlite3.connect(index) as connection:
                connection.execute("CREATE TABLE run (x)")
        case "a folder":
            index.unlink()
            index.mkdir()
        case "read-only":
            monkeypatch.setattr(os, "access", lambda *_: False)
    registry = Registry(outputs)
    assert [run._replace(id=0, change=0) for run in registry.runs()] == expected
    assert registry.setting("optimizer.learning_rate")[registry.find("lr/b").id] == 1e-3


def test_damage_after_the_first_page_is_detected_on_read(outputs):
    Registry(outputs).close()
    index = outputs / FILE
    content = index.read_bytes()
    index.write_bytes(content[:4096] + os.urandom(len(content) - 4096))
    assert len(Registry(outputs).runs()) == 4


def test_parallel_reading_gives_the_same_result(outputs, monkeypatch):
    serial = Registry(outputs)
    expected = [(run.path, run.step, serial.metrics([run.id])[run.id]) for run in serial.runs()]
    serial.close()
    (outputs / FILE).unlink()
    monkeypatch.setattr("maxhydra.runs.index.PARALLEL_RUNS", 1)
    parallel = Registry(outputs)
    assert [(run.path, run.step, parallel.metrics([run.id])[run.id]) for run in parallel.runs()] == expected


def test_a_run_whose_process_is_gone_is_lost(tmp_path):
    code = """
import sys, time
from maxhydra.record import RunDirectory
RunDirectory(sys.argv[1]).start("", {})
print("on", flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "a")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"on\n"
        registry = Registry(tmp_path)
        assert [run.status for run in registry.runs()] == ["running"]
        (tmp_path / "a" / "metrics.jsonl").write_text('{"step": 1, "lo')
        registry.refresh()
        assert not registry.read_errors()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (run,) = registry.runs()
    assert run.status == "lost" and "ended without reporting a status" in run.reason
    assert paths(select_runs(registry, ["status=lost"])) == ["a"] and len(registry.read_errors()) == 1


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        (["status=finished"], "lr/c lr/b lr/a"),
        (["status!=finished"], "alone"),
        (["tag=odd"], "alone"),
        (["tag!=odd", "sweep=lr"], "lr/c lr/b lr/a"),
        (["optimizer.learning_rate=1e-3"], "lr/b"),
        (["optimizer.learning_rate>=0.001", "optimizer.learning_rate<0.003"], "alone lr/b"),
        (["model=tiny", "run.seed=2"], "lr/c"),
        (["adapter=none", "eval/loss<2.7"], "lr/b"),
        (["loss:min<2.2", "step>5"], "lr/b"),
        (["train.target_eval_loss=null", "path~LR/"], "lr/c lr/b lr/a"),
        (["model.pattern~layer", "created<2026-03-02"], "lr/a"),
        (["eval/loss!=1"], "alone lr/c lr/b lr/a"),
        (["optimizer.kind=sgd"], ""),
    ],
)
def test_conditions(outputs, conditions, expected):
    assert " ".join(paths(select_runs(Registry(outputs), conditions))) == expected


def test_order_and_best(outputs):
    registry = Registry(outputs)
    runs = registry.runs()
    rows = {path.parent.name: path.read_text().splitlines() for path in outputs.rglob("metrics.jsonl")}
    final = {name: [json.loads(row)["eval/loss"] for row in lines if "eval" in row] for name, lines in rows.items()}
    ranking = sorted((values[-1], name) for name, values in final.items() if values)
    ascending = sort_runs(registry, runs, "eval/loss", descending=False)
    assert [run.path[3:] for run in ascending][:3] == [name for _, name in ranking]

    assert sort_runs(registry, runs, "eval/loss", descending=True)[-1].path == "alone"
    metric, ranked, largest = rank_runs(registry, runs, None)
    assert not largest
    assert metric == "eval/loss" and [run.path[3:] for run in ranked] == [name for _, name in ranking]
    fastest = rank_runs(registry, runs, "tokens_per_second")
    assert fastest.largest and fastest.runs[-1].path == "alone"
    assert rank_runs(registry, runs, "tokens_per_second:max").runs == fastest.runs
    assert rank_runs(registry, runs, "tokens_per_second", largest=False).runs[0].path == "alone"


def test_all_invalid_conditions_are_reported_at_once(outputs):
    registry = Registry(outputs)
    with pytest.raises(ConfigError) as error:
        select_runs(registry, ["optimizer.learning_rat=3", "status=finishd", "nothing", "learning_rate.x=1"])
    text = str(error.value)
    assert len(error.value.problems) == 4
    assert "did you mean 'optimizer.learning_rate'?" in text and "did you mean 'finished'?" in text
    with pytest.raises(ConfigError, match=r"did you mean 'run\.seed'"):
        registry.values("seed", registry.runs())
    with pytest.raises(ConfigError, match="is ambiguous: 3 runs match"):
        registry.find("lr/")
    with pytest.raises(ConfigError, match="did you mean 'alone'"):
        registry.find("alon3")
    with pytest.raises(ConfigError, match="is not a folder"):
        Registry(outputs / "nowhere")
    assert registry.find("al").path == "alone" and registry.find("c").path == "lr/c"
    assert registry.find(f"{outputs}/lr/b/").path == "lr/b"


def test_comparison(outputs):
    change_facts(outputs / "lr" / "b", packages={"jax": "0.11.2"})
    registry = Registry(outputs)
    comparison = compare(registry, [registry.find("lr/a"), registry.find("lr/b")])
    assert {entry.name: entry.values for entry in comparison.config} == {
        "optimizer.learning_rate": (1e-4, 1e-3),
        "run.seed": (0, 1),
    }
    assert [(entry.name, entry.values) for entry in comparison.surroundings] == [("package jax", ("0.10.2", "0.11.2"))]
    assert {entry.name for entry in comparison.metrics} == {"loss", "eval/loss", "learning_rate", "tokens_per_second"}


def test_importance_matches_the_analysis_of_variance():
    import scipy.stats

    rng = np.random.default_rng(0)
    group = rng.integers(0, 4, 40)
    results = group * 0.5 + rng.normal(size=40)
    share = importance({"x": [int(g) for g in group]}, results.tolist())["x"]
    ratio = scipy.stats.f_oneway(*(results[group == g] for g in range(4))).statistic
    between, within = 3, 40 - 4
    assert share == pytest.approx(between * (ratio - 1) / (between * ratio + within))
    rate = 10 ** rng.uniform(-4, -2, 60)
    curved = (np.log10(rate) + 3) ** 2
    shares = importance({"noise": rng.normal(size=60).tolist(), "rate": rate.tolist()}, curved.tolist())
    assert list(shares) == ["rate", "noise"] and shares["rate"] > 0.8 and shares["noise"] < 0.15
    assert importance({"x": [1, 2]}, [1.0, 2.0]) == {}
    assert importance({"x": ["a", "a", "b", "b"]}, [1.0, 1.0, 1.0, 1.0]) == {"x": 0.0}


def test_importance_of_a_small_effect_next_to_a_large_one():
    """The shares of a two-way analysis of variance without interactions, in a grid of 2 x 3 with known effects."""
    rates, sizes = [1, 1, 1, 2, 2, 2], ["a", "b", "c"] * 2
    results = np.array([2.0, 1.9, 1.8, 1.0, 0.9, 0.81])
    model = np.array([[1, rate == 2, size == "b", size == "c"] for rate, size in zip(rates, sizes, strict=True)], float)

    def left(columns: list[int]) -> float:
        return float(np.linalg.lstsq(model[:, columns], results)[1][0])

    full, total = left([0, 1, 2, 3]), left([0])
    expected = {"rate": left([0, 2, 3]) - full - full / 2, "size": left([0, 1]) - full - 2 * full / 2}
    shares = importance({"size": sizes, "rate": rates}, results.tolist())
    assert list(shares) == ["rate", "size"]
    assert shares == pytest.approx({name: value / total for name, value in expected.items()})
    assert shares["size"] > 0.02


def test_frame(outputs):
    pandas = import_optional("pandas", extra="test")
    table = frame(outputs, "sweep=lr").set_index("path")
    assert isinstance(table, pandas.DataFrame)
    assert table["optimizer.learning_rate"].to_dict() == {f"lr/{name}": rate for name, rate in RATES.items()}
    assert table["metric:eval/loss"].idxmin() == "lr/b" and "metric:learning_rate" in table
