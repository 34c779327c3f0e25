"""maxhydra from Python, as scripts and as a notebook."""

import dataclasses
import json
import os
import subprocess
import sys
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from maxhydra import ConfigError, compose, load_run, run, runs
from tests.support.cli import ROOT, SMALL
from tests.support.skips import import_optional

QUICK = [*SMALL, "train.progress=none", "optimizer.learning_rate=1e-2"]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: one from a config, one from overrides."""
    folder = tmp_path_factory.mktemp("library") / "outputs"
    first = compose([*QUICK, f"run.outputs={folder}", "run.name=first", "train.steps=3", "checkpoint.every=2"])
    assert run(first).status == "finished"
    result = run([*QUICK, f"run.outputs={folder}", "run.name=second", "train.steps=2"])
    assert result.path == folder / "second" and result.reason == "all 2 steps done"
    assert result.objective == result.metrics["eval/loss"] and np.isfinite(result.metrics["loss"])
    return folder


def test_importing_maxhydra_is_light() -> None:
    code = (
        "import maxhydra, sys; print([name for name in ('numpy', 'jax', 'hydra', 'omegaconf') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.slow
def test_compose_reports_every_problem(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["train.step=3", "optimizer.learning_rate=-1"])
    assert {problem.path for problem in caught.value.problems} == {"train.step", "optimizer.learning_rate"}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [tiny, _self_]\nmlp_dim: 96\n")
    config = compose(["model=mine"], config_dir=tmp_path)
    assert config.model.mlp_dim == 96
    assert config.optimizer.learning_rate == compose([]).optimizer.learning_rate, "the recipe of its parent"


def test_only_a_composed_config_runs() -> None:
    config = compose(QUICK)
    with pytest.raises(ConfigError, match=r"was not returned by maxhydra\.compose"):
        run(dataclasses.replace(config, objective="loss"))


@pytest.mark.slow
def test_a_stored_run_has_config_metrics_and_checkpoints(outputs: Path) -> None:
    stored = load_run("first", outputs=outputs)
    assert stored.status == "finished" and stored.config.train.steps == 3 and stored.checkpoints == [2, 3]
    rows = [json.loads(line) for line in (outputs / "first" / "metrics.jsonl").read_text().splitlines()]
    losses = stored.metrics["loss"]
    assert losses.steps.tolist() == [1, 2, 3]
    assert losses.values.tolist() == [row["loss"] for row in rows if "loss" in row]
    assert stored.frame()["loss"].tolist() == losses.values.tolist()
    assert load_run(outputs / "first").path == stored.path


@pytest.mark.slow
def test_runs_are_queried_as_on_the_command_line(outputs: Path) -> None:
    assert [entry.path for entry in runs("train.steps=3", outputs=outputs)] == ["first"]
    assert {entry.path for entry in runs("status=finished", outputs=outputs)} == {"first", "second"}
    with pytest.raises(ConfigError, match="is not a setting or a metric"):
        runs("train.stepz=3", outputs=outputs)


@pytest.mark.exhaustive
def test_a_loaded_model_gives_the_loss_of_its_run(outputs: Path) -> None:
    """The logits give the eval loss that the run logged, by the formula of the cross-entropy in NumPy."""
    from maxhydra.data import eval_batches
    from maxhydra.train import plan_batches

    stored = load_run("first", outputs=outputs)
    loaded = stored.load_model()
    total = weight = 0.0
    with closing(eval_batches(stored.config.data, plan_batches(stored.config, loaded.sharder))) as batches:
        for batch in islice(batches, stored.config.train.eval_batches):
            logits = np.asarray(loaded.logits(batch["tokens"]), np.float64)
            normalizer = np.log(np.exp(logits).sum(-1))
            targets = np.take_along_axis(logits, np.asarray(batch["targets"])[..., None], -1)[..., 0]
            weights = np.asarray(batch["weights"])
            total, weight = total + ((normalizer - targets) * weights).sum(), weight + weights.sum()
    assert total / weight == pytest.approx(stored.metrics["eval/loss"].values[-1], rel=1e-4)
    assert loaded.generate("To be", tokens=3, temperature=0).startswith("To be")
    with pytest.raises(ConfigError, match="has no checkpoint of step 1"):
        stored.load_model(step=1)


@pytest.mark.exhaustive
def test_the_notebook_of_the_docs_runs(tmp_path: Path) -> None:
    nbclient = import_optional("nbclient", extra="test")
    nbformat = import_optional("nbformat", extra="test")
    import_optional("ipykernel", extra="test")
    notebook = nbformat.read(ROOT / "docs" / "library.ipynb", as_version=4)
    os.environ.setdefault("PYTHONPATH", str(ROOT))
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    texts = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("finished" in text for text in texts)
