"""Batch-size ramp: its sizes, and a run that passes through them, uninterrupted and resumed."""

import json
from pathlib import Path

import jax
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.data import BatchSpec
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.train import plan_batches
from tests.support.cli import SMALL, losses, parameter_hash, rewind, run_ok


def plan(*overrides: str, devices: int = 1) -> BatchSpec:
    config = compose(list(overrides), None).config
    return plan_batches(config, Sharder(build_mesh(config.mesh, jax.devices()[:devices]), config.mesh.rules))


def test_sizes_last_equally_long() -> None:
    ramp = ["train.ramp.start=2", "train.ramp.increment=2", "train.ramp.sequences=90"]
    spec = plan("train.per_device_batch_size=8", "train.grad_accum=3", *ramp, devices=2)
    assert spec.batch == 48
    assert spec.ramp == ((30, 12), (60, 24), (90, 36))
    assert [spec.batch_at(n) for n in (0, 29, 30, 59, 60, 89, 90, 10**9)] == [12, 12, 24, 24, 36, 36, 48, 48]


def test_the_last_increment_may_be_smaller() -> None:
    ramp = ["train.ramp.start=1", "train.ramp.increment=4", "train.ramp.sequences=10"]
    assert plan("train.per_device_batch_size=8", *ramp).ramp == ((5, 1), (10, 5))


def test_sizes_that_do_not_fit_the_mesh() -> None:
    ramp = ["train.ramp.start=1", "train.ramp.increment=0.25", "train.ramp.sequences=10"]
    with pytest.raises(ConfigError, match=r"train\.ramp\.increment=1\.25: makes 2\.5 sequences on 2 devices"):
        plan("train.per_device_batch_size=2", *ramp, devices=2)
    with pytest.raises(ConfigError, match=r"train\.ramp\.start=8.*is not less than per_device_batch_size=8"):
        plan("train.per_device_batch_size=8", "train.ramp.start=8")


@pytest.mark.exhaustive
def test_a_ramped_run_resumes_at_its_batch_size(tmp_path: Path) -> None:
    ramp = ["train.ramp.start=2", "train.ramp.increment=3", "train.ramp.sequences=16", "train.eval_batches=0"]
    arguments = [*SMALL, *ramp, "optimizer/schedule=constant", "checkpoint.every=5", "train.steps=9"]
    run_ok(*arguments, "run.name=whole", cwd=tmp_path)
    whole = tmp_path / "outputs/whole"
    # Step 5 is within the second size.
    parts = rewind(whole, 5, "parts")
    assert "resuming from step 5" in run_ok(*arguments, "run.name=parts", cwd=tmp_path).stderr
    assert losses(whole) == losses(parts)
    assert parameter_hash(whole, 9) == parameter_hash(parts, 9)
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    # At least eight sequences by twos, then by fives, of 32 tokens each.
    assert [int(row["tokens"]) // 32 for row in rows] == [2] * 4 + [5] * 2 + [8] * 3
