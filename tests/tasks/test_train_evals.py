"""train.evals: benchmarks during training, against task=eval of the checkpoint, on a mesh, and after a resume."""

import json
from pathlib import Path

import pytest

from tests.support.cli import SMALL, run, run_ok

EVALS = ["train.evals.tasks=[cloze,arithmetic]", "train.evals.limit=6", "train.eval_every=2", "train.eval_batches=1"]
FLOAT32 = ["model.dtypes.compute=float32", "checkpoint.every=2", "train.seq_len=64"]
TRAIN = [*SMALL, *FLOAT32, *EVALS, "train.steps=4"]


def evaluations(path: Path) -> dict[int, dict[str, float]]:
    """Metrics of evaluations by step."""
    rows = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return {row.pop("step"): row for row in rows if any(name.startswith("eval/") for name in row)}


@pytest.mark.slow
def test_metrics_equal_those_of_task_eval_after_a_resume_and_on_a_mesh(tmp_path: Path) -> None:
    whole = [*TRAIN, "train.evals.every=4", "checkpoint.keep_best=1", "checkpoint.best_metric=eval/cloze/error"]
    run_ok(*whole, "run.name=whole", "objective=eval/arithmetic/error", cwd=tmp_path)
    found = evaluations(tmp_path / "outputs" / "whole")
    assert {name for name in found[2] if name.count("/") > 1} == set()
    assert {"eval/cloze/acc", "eval/cloze/error", "eval/arithmetic/acc", "eval/loss"} <= found[4].keys()

    command = [*SMALL[:6], *FLOAT32[::2], "task=eval", "checkpoint.load_parameters=outputs/whole", "task.limit=6"]
    command += ["task.tasks=[cloze,arithmetic]", "task.engine.max_context=64", "run.name=after"]
    run_ok(*command, cwd=tmp_path)
    stored = json.loads((tmp_path / "outputs" / "after" / "eval.json").read_text())["4"]
    for task in ("cloze", "arithmetic"):
        for metric, value in stored[task]["metrics"].items():
            assert found[4][f"eval/{task}/{metric}"] == pytest.approx(value, abs=1e-6)

    parts = [*TRAIN, "run.name=parts", "optimizer.schedule.kind=constant"]
    run_ok(*parts, "train.steps=2", cwd=tmp_path)
    run_ok(*parts, cwd=tmp_path)
    run_ok(*TRAIN, "run.name=once", "optimizer.schedule.kind=constant", cwd=tmp_path)
    resumed, once = (evaluations(tmp_path / "outputs" / name) for name in ("parts", "once"))
    assert resumed == once and resumed.keys() == {2, 4}

    mesh = ["mesh=fsdp", "train.per_device_batch_size=4", "optimizer.schedule.kind=constant"]
    run_ok(*TRAIN, *mesh, "run.name=mesh", devices=2, cwd=tmp_path)
    sharded = evaluations(tmp_path / "outputs" / "mesh")
    for name, value in once[4].items():
        assert sharded[4][name] == pytest.approx(value, rel=1e-3), name

    best = run_ok("runs", "best", "eval/cloze/error", cwd=tmp_path)
    assert "whole" in best.stdout


@pytest.mark.slow
def test_early_stopping_by_a_benchmark(tmp_path: Path) -> None:
    stop = ["train.early_stop.metric=eval/plays/bpb", "train.early_stop.patience=1", "train.early_stop.min_delta=100"]
    only = ["train.evals.tasks=[plays]", "train.evals.limit=1", "train.eval_batches=0", "train.steps=9"]
    run_ok(*SMALL, *only, *stop, "train.eval_every=1", "run.name=x", cwd=tmp_path)
    reason = json.loads((tmp_path / "outputs" / "x" / "run.json").read_text())["reason"]
    assert "eval/plays/bpb did not improve" in reason
    assert evaluations(tmp_path / "outputs" / "x").keys() == {1, 2}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.evals.tasks=[x.yaml]"], "train.evals.tasks=x.yaml: names a file"),
        (["train.evals.tasks=[cloze,cloze]"], "train.evals.tasks=[cloze,cloze]: names cloze more than once"),
        (["train.evals.tasks=[cloze]", "train.evals.every=3", "train.eval_every=2"], "multiple of eval_every=2"),
        (["train.evals.tasks=[cloze]", "objective=eval/cloze/acc", "task=reward_model"], "task=reward_model"),
        (["train.evals.limit=3"], "needs train.evals.tasks"),
        (
            ["train.evals.tasks=[cloze]", "train.early_stop.metric=eval/plays/bpb", "train.early_stop.patience=1"],
            "train.early_stop.metric",
        ),
        (["objective=eval/cloze/error"], "objective"),
    ],
)
def test_mistakes_are_reported_before_training(overrides: list[str], message: str, tmp_path: Path) -> None:
    done = run(*SMALL, *overrides, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
