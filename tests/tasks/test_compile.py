"""task=compile end to end: a run with its executable trains bit-equally, and one with another config exits with 2."""

import json
from pathlib import Path

import pytest

from tests.support.cli import SMALL, losses, run, run_ok

CONFIG = [
    *SMALL,
    "hardware=cpu",
    "train.steps=4",
    "train.eval_batches=0",
    "mesh.fsdp=2",
    "train.per_device_batch_size=1",
]


@pytest.mark.exhaustive
def test_a_run_with_a_compiled_step_equals_one_without(tmp_path: Path) -> None:
    compiled = ["task=compile", "task.segments=false", "task.output=step", "task.format=json"]
    printed = run_ok(*compiled, *CONFIG, cwd=tmp_path, devices=2).stdout
    report = json.loads(printed[printed.index("{") :])
    assert report["devices"] == 2 and report["bytes_per_device"]["state and batch"] > 0
    assert any(row["kind"] == "all-gather" and row["axes"] == "fsdp" for row in report["collectives"])

    run_ok(*CONFIG, "run.name=usual", cwd=tmp_path, devices=2)
    run_ok(*CONFIG, "run.name=loaded", "hardware.compiled=step", cwd=tmp_path, devices=2)
    assert losses(tmp_path / "outputs" / "loaded") == losses(tmp_path / "outputs" / "usual")

    changed = run(*CONFIG, "hardware.compiled=step", "train.seq_len=64", cwd=tmp_path, devices=2)
    assert changed.returncode == 2
    assert "train.seq_len=64: hardware.compiled was compiled with" in changed.stderr
    unknown = run(*compiled, *CONFIG, "hardware=auto", cwd=tmp_path, devices=2)
    assert unknown.returncode == 2 and "hardware: is auto" in unknown.stderr
    again = run(*compiled, *CONFIG, cwd=tmp_path, devices=2)
    assert again.returncode == 2 and "task.output=step: exists already" in again.stderr
