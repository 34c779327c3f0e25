"""Run folders with random damage: listing and reports never fail and never lose another run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example
from hypothesis import strategies as st

from maxhydra.record import RunDirectory, scan_metrics
from maxhydra.record.facts import parse_facts
from maxhydra.runs import write_report
from maxhydra.runs.registry import Registry
from maxhydra.runs.settings import list_settings, read_config_text
from maxhydra.sweep.plan import read_plan
from tests.support.fuzzing import fuzz
from tests.support.run_folders import write_run

FILES = ("run.json", "config.yaml", "metrics.jsonl", "labels.json")
LABELS = json.dumps({"tags": {"a": True}, "note": "why"})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
# Position as a fraction of the file, and the bytes there; None ends the file.
CHANGES = st.lists(st.tuples(st.floats(0, 1), st.none() | st.binary(max_size=8)), min_size=1, max_size=3)


def damaged(content: bytes, changes: list[tuple[float, bytes | None]]) -> bytes:
    for at, new in changes:
        start = int(at * len(content))
        content = content[:start] + (b"" if new is None else new + content[start + len(new) :])
    return content


def new_runs(root: Path) -> Path:
    """Two runs, of which the second will be damaged."""
    shutil.rmtree(root, ignore_errors=True)
    write_run(root / "whole", steps=4)
    (write_run(root / "hurt", steps=4) / "labels.json").write_text(LABELS)
    return root / "hurt"


def check_readable(root: Path) -> None:
    registry = Registry(root)
    try:
        runs = {run.path: run for run in registry.runs()}
        assert "whole" in runs and runs["whole"].status == "finished"
        assert len(registry.settings([runs["whole"].id])[runs["whole"].id]) > 5
        if (root / "hurt" / "run.json").exists():
            registry.settings([runs["hurt"].id])
            write_report(registry.directory(runs["hurt"]))
        assert all(map(str, registry.read_errors()))
    finally:
        registry.close()


@pytest.mark.slow
@fuzz(cases=25, name=st.sampled_from(FILES), changes=CHANGES)
@example(name="metrics.jsonl", changes=[(0.5, b'\n{"step": 1' + b"0" * 30 + b', "a": 1}\n')])
@example(name="config.yaml", changes=[(0.0, b"a: &a [1]\nb: {c: *a}\nd: " + b"[" * 3000), (1.0, None)])
def test_damaged_bytes(name: str, changes: list[tuple[float, bytes | None]], tmp_path: Path) -> None:
    folder = new_runs(tmp_path / "outputs")
    (folder / name).write_bytes(damaged((folder / name).read_bytes(), changes))
    check_readable(tmp_path / "outputs")


@fuzz(cases=10, names=st.sets(st.sampled_from(FILES), min_size=1), is_folder=st.booleans())
def test_missing_files(names: set[str], is_folder: bool, tmp_path: Path) -> None:
    folder = new_runs(tmp_path / "outputs")
    for name in names:
        (folder / name).unlink()
        if is_folder and name != "run.json":
            (folder / name).mkdir()
    check_readable(tmp_path / "outputs")


@pytest.mark.exhaustive
@fuzz(cases=25, key=st.integers(0, 40), inner=st.booleans(), value=VALUES)
def test_facts_of_another_type(key: int, inner: bool, value: Any, tmp_path: Path) -> None:
    folder = new_runs(tmp_path / "outputs")
    facts = json.loads((folder / "run.json").read_text())
    section = facts["sessions"][0] if inner else facts
    section[list(section)[key % len(section)]] = value
    (folder / "run.json").write_text(json.dumps(facts))
    check_readable(tmp_path / "outputs")


@pytest.mark.slow
@fuzz(cases=10, changes=CHANGES, name=st.sampled_from(("run.json", "config.yaml")))
@example(changes=[(0.11328125, None), (0.90625, None)], name="config.yaml")
def test_a_damaged_run_starts_again(changes: list[tuple[float, bytes | None]], name: str, tmp_path: Path) -> None:
    folder = new_runs(tmp_path / "outputs")
    before = damaged((folder / name).read_bytes(), changes)
    (folder / name).write_bytes(before)
    run = RunDirectory(folder)
    run.start("task:\n  name: pretrain\n", {"task": "pretrain"})
    run.finish("finished", "done")
    assert parse_facts((folder / "run.json").read_bytes())["status"] == "finished"
    # config.yaml itself too: cut at the right byte, the damaged file equals the new one.
    contents = [path.read_bytes() for path in (*folder.glob("config*.yaml"), *folder.glob("run.json.damaged"))]
    assert before in contents or name == "run.json"


@fuzz(cases=100, changes=CHANGES)
def test_metrics(changes: list[tuple[float, bytes | None]], tmp_path: Path) -> None:
    lines = b'{"step": 1, "loss": 2.5}\n{"step": 2, "loss": "NaN", "eval/loss": 1e-3}\n'
    (tmp_path / "metrics.jsonl").write_bytes(damaged(lines, changes))
    scan_metrics(tmp_path / "metrics.jsonl")


@pytest.mark.slow
@fuzz(cases=60, text=st.text(max_size=60))
@example(text="a: &a [*a]")
def test_config_text(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(text.encode(errors="surrogatepass"))
    list_settings(read_config_text(tmp_path / "config.yaml"), {})


PLAN = {"folder": None, "fixed": ["a=1"], "space": {}, "listed": [["b=1"]], "folders": ["0"], "objectives": []}
PLAN |= {"settings": {}, "config_dir": None, "launcher": {"kind": "local"}}


@pytest.mark.slow
@fuzz(cases=100, changes=CHANGES, key=st.integers(0, 8), value=VALUES, is_value=st.booleans())
def test_sweep_plan(
    changes: list[tuple[float, bytes | None]], key: int, value: Any, is_value: bool, tmp_path: Path
) -> None:
    plan = {**PLAN, list(PLAN)[key]: value} if is_value else PLAN
    content = json.dumps(plan).encode()
    (tmp_path / "sweep.json").write_bytes(content if is_value else damaged(content, changes))
    read_plan(tmp_path)
