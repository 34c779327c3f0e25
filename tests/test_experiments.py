"""Every experiment and every debug overlay runs, with a model small enough for a test."""

import re
import shutil
from pathlib import Path

import pytest
from running import ROOT, SMALL, facts, finished, losses

EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))
OVERLAYS = sorted(path.stem for path in (ROOT / "conf" / "debug").glob("*.yaml"))
SIZES = [override for override in SMALL if override.startswith(("model.", "train.seq_len"))]
# Sizes that other models set and the small one must not inherit.
SIZES += ["model.dtypes.compute=float32", "model.vocab_size=320", "model.context_length=64", "train.loss_chunk=0"]


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stands for any that an experiment goes on from."""
    cwd = tmp_path_factory.mktemp("earlier")
    finished("experiment=arithmetic_pretrain", *SIZES, "debug=one_step", "checkpoint.mode=synchronous", cwd=cwd)
    return cwd / "outputs" / "arithmetic_pretrain"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs(name: str, tmp_path: Path, earlier: Path) -> None:
    text = (ROOT / "conf/experiment" / f"{name}.yaml").read_text()
    for needed in re.findall(r"\$\{run\.outputs\}/(\w+)", text):
        shutil.copytree(earlier, tmp_path / "outputs" / needed)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 400)
    own_text = ["data.path=text.txt"] if "override /data: text" in text else []
    finished(f"experiment={name}", *SIZES, *own_text, "debug=one_step", "run.name=it", cwd=tmp_path)
    run = facts(tmp_path / "outputs" / "it")
    assert run["status"] == "finished"
    assert run["choices"]["experiment"] == name


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_overlay_runs(name: str, tmp_path: Path) -> None:
    finished(*SIZES, "train.steps=3", f"debug={name}", "run.name=it", cwd=tmp_path)
    assert facts(tmp_path / "outputs" / "it")["status"] == "finished"


def test_overfit_fits_its_batch(tmp_path: Path) -> None:
    """One batch of 8 x 32 bytes, learned by heart: the loss falls far under what text in general allows."""
    finished(*SIZES, "debug=overfit", "train.steps=150", "train.per_device_batch_size=2", "run.name=it", cwd=tmp_path)
    seen = losses(tmp_path / "outputs" / "it")
    assert seen[150] < 1.0 < 5.0 < seen[1]
