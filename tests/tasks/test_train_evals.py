"""train.evals: benchmarks during training, against task=eval of the checkpoint, on a mesh, and after a resume."""

import json
from pathlib import Path

import pytest

from tests.support.cli import SMALL, run, run_ok

EVALS = ["train.evals.tasks=[cloze,arithmetic]", "train.evals.limit=3", "train.evals.shots=0", "train.eval_batches=1"]
FIXED = ["optimizer/schedule=constant", "checkpoint.every=1", "train.eval_every=1"]
TRAIN = [*SMALL, "model.dtypes.compute=float32", *FIXED, *EVALS, "train.steps=2"]


def evaluations(path: Path) -> dict[int, dict[str, float]]:
    """Metrics of evaluations by step."""
    rows = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return {row.pop("step"): row for row in rows if any(name.startswith("eval/") for name in row)}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Outputs with a run of two steps, `whole`."""
    cwd = tmp_path_factory.mktemp("train_evals")
    best = ["checkpoint.keep_best=1", "checkpoint.best_metric=eval/cloze/error", "objective=eval/arithmetic/error"]
    run_ok(*TRAIN, *best, "run.name=whole", cwd=cwd)
    return cwd / "outputs"


@pytest.mark.exhaustive
def test_metrics_equal_those_of_task_eval(outputs: Path) -> None:
    whole = evaluations(outputs / "whole")
    assert {"eval/cloze/acc", "eval/cloze/error", "eval/arithmetic/acc", "eval/loss"} <= whole[1].keys()
    assert whole.keys() == {1, 2}
    command = [*SMALL[:6], "model.dtypes.compute=float32", "task=eval", "checkpoint.load_parameters=outputs/whole"]
    same = ["task.tasks=[cloze,arithmetic]", "task.limit=3", "task.shots=0", "task.engine.max_context=32"]
    run_ok(*command, *same, "run.name=after", cwd=outputs.parent)
    stored = json.loads((outputs / "after" / "eval.json").read_text())["2"]
    for task in ("cloze", "arithmetic"):
        for metric, value in stored[task]["metrics"].items():
            assert whole[2][f"eval/{task}/{metric}"] == pytest.approx(value, abs=1e-6)
    assert "whole" in run_ok("runs", "best", "--metric", "eval/cloze/error", cwd=outputs.parent).stdout


@pytest.mark.exhaustive
def test_metrics_are_the_same_after_a_resume(outputs: Path) -> None:
    run_ok(*TRAIN, "train.steps=1", "run.name=parts", cwd=outputs.parent)
    run_ok(*TRAIN, "run.name=parts", cwd=outputs.parent)
    assert evaluations(outputs / "parts") == evaluations(outputs / "whole")


@pytest.mark.exhaustive
def test_metrics_are_the_same_on_a_mesh(outputs: Path) -> None:
    mesh = ["mesh=fsdp", "train.per_device_batch_size=4", "train.evals.every=2"]
    run_ok(*TRAIN, *mesh, "run.name=mesh", devices=2, cwd=outputs.parent)
    sharded = evaluations(outputs / "mesh")
    assert {name for name in sharded[1] if name.count("/") > 1} == set()
    for name, value in evaluations(outputs / "whole")[2].items():
        assert sharded[2][name] == pytest.approx(value, rel=1e-3), name


@pytest.mark.exhaustive
def test_early_stopping_by_a_benchmark(tmp_path: Path) -> None:
    stop = ["train.early_stop.metric=eval/plays/bpb", "train.early_stop.patience=1", "train.early_stop.min_delta=100"]
    only = ["train.evals.tasks=[plays]", "train.evals.limit=1", "train.eval_batches=0", "train.steps=9"]
    run_ok(*SMALL, *only, *stop, "train.eval_every=1", "run.name=x", cwd=tmp_path)
    reason = json.loads((tmp_path / "outputs" / "x" / "run.json").read_text())["reason"]
    assert "eval/plays/bpb did not improve" in reason
    assert evaluations(tmp_path / "outputs" / "x").keys() == {1, 2}


@pytest.mark.exhaustive
def test_every_training_task_runs_benchmarks(tmp_path: Path) -> None:
    evals = ["train.evals.tasks=[cloze]", "train.evals.limit=2", "train.eval_batches=0", "train.steps=1"]
    sizes = [size for size in SMALL if size.startswith("model.")]
    pairs = [{"prompt": "2+2=", "chosen": f"{number}", "rejected": "no"} for number in range(30)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    commands = {
        "pretrain": [],
        "distill": [
            "task.teacher.weights=outputs/pretrain",
            "task.teacher.model=tiny",
            f"task.teacher.overrides={sizes}",
        ],
        "dpo": ["data=grain", "data.path=pairs.jsonl", "data.record_type=preference", "adapter=lora"],
        "grpo": [
            "data=arithmetic",
            "data.record_type=prompts",
            "task.max_tokens=8",
            "task.group_size=4",
            "reward=exact",
        ],
    }
    given = ["train.allow_no_learning=true", "train.per_device_batch_size=4"]
    for task, overrides in commands.items():
        run_ok(f"task={task}", *SMALL, *evals, *given, *overrides, f"run.name={task}", cwd=tmp_path)
        (metrics,) = evaluations(tmp_path / "outputs" / task).values()
        assert {"eval/cloze/acc", "eval/cloze/error"} <= metrics.keys(), task


@pytest.mark.slow
@pytest.mark.default_cases("file", "task", "name", "metric")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.evals.tasks=[x.yaml]"], "train.evals.tasks=x.yaml: names a file"),
        (["train.evals.tasks=[cloze,cloze]"], "train.evals.tasks=[cloze,cloze]: names cloze more than once"),
        (["train.evals.tasks=[cloze]", "train.evals.every=3", "train.eval_every=2"], "multiple of eval_every=2"),
        (["train.evals.tasks=[cloze]", "objective=eval/cloze/acc", "task=reward_model"], "task=reward_model"),
        (["train.evals.limit=3"], "needs train.evals.tasks"),
        (
            ["train.evals.tasks=[plays]", "+data.eval_sets={plays:{source:demo}}"],
            "has the name of the held-out set plays",
        ),
        (
            ["train.evals.tasks=[cloze]", "train.evals.every=2", "train.eval_every=1", "train.eval_batches=0"],
            "is not used without held-out batches",
        ),
        (
            ["train.evals.tasks=[cloze]", "train.early_stop.metric=eval/plays/bpb", "train.early_stop.patience=1"],
            "train.early_stop.metric",
        ),
        (["objective=eval/cloze/error"], "objective"),
    ],
    ids=["file", "twice", "every", "task", "limit", "name", "held_out", "metric", "objective"],
)
def test_mistakes_are_reported_before_training(overrides: list[str], message: str, tmp_path: Path) -> None:
    done = run(*SMALL, *overrides, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
