"""task=grpo as a user runs it: learning from rewards, from nothing to learn, killed, and with bad input."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.tasks.grpo import GrpoTask
from maxhydra.decode.request import Completion, TokenLogprob
from maxhydra.rl.evaluate import majority, pass_at
from maxhydra.rl.reward_pool import RewardResult
from maxhydra.rl.rollout import Group, columns
from maxhydra.rl.setup import check
from tests.support import skips
from tests.support.cli import ROOT, SMALL, facts, finished, losses, parameter_hash, run, silent

# Also the tests that take minutes.
FULL = "MAXHYDRA_FULL" in os.environ
PATHS = f"{ROOT}:{ROOT / 'tests'}"
TASK = ["task=grpo", "data=arithmetic", "data.record_type=prompts", "task.max_tokens=8", "task.group_size=4"]
TASK += [*SMALL, "train.seq_len=20", "train.per_device_batch_size=16", "train.eval_batches=1"]
TASK += ["task.engine.max_batch=16", "task.engine.cache_tokens=1024", "optimizer/schedule=constant"]


def own(name: str) -> list[str]:
    return ["reward=function", f"reward.terms.own.function=reward_functions:{name}"]


def rows(folder: Path, name: str) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


def test_a_run_with_a_reference_learns_and_measures(tmp_path: Path) -> None:
    """The reference is where training began: no divergence at the first step, some after."""
    arguments = [*TASK, *own("vowels"), "train.steps=4", "task.kl.beta=0.01", "task.evaluation.samples=4"]
    arguments += [
        "train.eval_start=true",
        "task.rounds=2",
        "train.eval_batches=4",
        "task.loss=dapo",
        "task.clip.high=0.28",
    ]
    finished(*arguments, "run.name=it", cwd=tmp_path, PYTHONPATH=PATHS)
    folder = tmp_path / "outputs" / "it"
    divergence = rows(folder, "kl")
    assert abs(divergence[0]) < 1e-6 < divergence[-1]
    assert 1 <= max(rows(folder, "sampler_error")) < 1.02
    assert rows(folder, "reward/errors") == [0] * 4
    assert rows(folder, "reward/mean") == rows(folder, "reward/term/own")
    assert all(1 <= drawn <= 2 for drawn in rows(folder, "groups/drawn"))
    assert len(rows(folder, "eval/pass@1")) == 2
    first, last = (np.array(rows(folder, f"eval/pass@{k}")) for k in (1, 4))
    assert (last >= first).all() and last.max() > 0
    np.testing.assert_allclose(rows(folder, "eval/error"), 1 - first)


def test_an_adapter_on_a_mesh_in_bfloat16(tmp_path: Path) -> None:
    """The model without its adapter is the reference; sampler and trainer agree on probabilities."""
    arguments = [*TASK, *own("vowels"), "train.steps=3", "task.kl.beta=0.01", "task.iterations=2", "adapter=lora"]
    arguments += ["mesh=fsdp", "train.per_device_batch_size=4", "model.dtypes.compute=bfloat16", "train.grad_accum=2"]
    arguments += ["task.loss=gspo", "task.importance_cap=2", "train.eval_batches=0"]
    # Answers are written with the weights whole on each device, and learned from with the weights split.
    arguments += ["task.rollout_mesh=['mesh=ddp']"]
    finished(*arguments, "run.name=it", cwd=tmp_path, devices=8, PYTHONPATH=PATHS)
    folder = tmp_path / "outputs" / "it"
    assert abs(rows(folder, "kl")[0]) < 1e-6
    assert 1 <= max(rows(folder, "sampler_error")) < 1.02
    assert rows(folder, "reward/mean")[0] == rows(folder, "reward/mean")[1] != rows(folder, "reward/mean")[2]
    assert facts(folder)["trained_parameters"] < facts(folder)["parameters"] / 2


def test_rewards_that_are_all_equal_change_nothing(tmp_path: Path) -> None:
    """A reward that always raises is such a one; it is named and counted, and the run goes on."""
    arguments = [*TASK, *own("raises"), "train.steps=3", "checkpoint.every=1", "task.kl.beta=0.1", "task.rounds=2"]
    done = finished(*arguments, "optimizer.weight_decay=0.5", "run.name=it", cwd=tmp_path, PYTHONPATH=PATHS)
    folder = tmp_path / "outputs" / "it"
    assert len({parameter_hash(folder, step) for step in (1, 2, 3)}) == 1
    assert rows(folder, "skipped") == [1, 2, 3] and rows(folder, "groups/degenerate") == [1] * 3
    assert rows(folder, "reward/errors") == [32] * 3
    assert "reward.terms.own raised RuntimeError: cannot judge" in done.stderr


KILLED = [*TASK, *own("vowels"), "train.steps=8", "checkpoint.every=3", "task.kl.beta=0.01", "train.eval_every=4"]
KILLED += ["task.iterations=2", "task.off_policy_steps=1", "task.importance_cap=2", "checkpoint.mode=synchronous"]


@pytest.mark.slow
def test_a_killed_run_reaches_the_same_weights(tmp_path: Path) -> None:
    """Answers written ahead, and a batch in the middle of its updates, outlive the process."""
    finished(*KILLED, "run.name=whole", cwd=tmp_path, PYTHONPATH=PATHS)
    whole, folder = (tmp_path / "outputs" / name for name in ("whole", "killed"))
    process = silent(*KILLED, "run.name=killed", cwd=tmp_path, PYTHONPATH=PATHS)
    while process.runs() and not _has_lines(folder / "metrics.jsonl", 4):
        time.sleep(0.01)
    process.kill()
    process.wait()
    done = finished(*KILLED, "run.name=killed", cwd=tmp_path, PYTHONPATH=PATHS)
    assert "going on from step 3" in done.stderr
    assert losses(folder) == losses(whole)
    assert rows(folder, "reward/mean") == rows(whole, "reward/mean")
    assert parameter_hash(folder, 8) == parameter_hash(whole, 8)


def _has_lines(path: Path, count: int) -> bool:
    return path.exists() and path.read_text().count("\n") >= count


def problems(*overrides: str) -> dict[str, Any]:
    config = compose(["task=grpo", *overrides]).config
    with pytest.raises(ConfigError) as caught:
        check(config, config.task, processes=1)
    return {problem.path: problem for problem in caught.value.problems}


def test_what_does_not_fit_together_is_listed_at_once() -> None:
    found = problems("data=arithmetic", "task.max_tokens=32", "train.seq_len=32", "train.ramp.start=1")
    assert set(found) == {"reward.terms", "data.record_type", "task.max_tokens", "train.ramp.start"}
    assert "reward=exact" in found["reward.terms"].hint
    assert found["data.record_type"].accepted == "prompts"
    started = ["reward=exact", "data=arithmetic", "data.record_type=prompts", "task.max_tokens=8"]
    found = problems(*started, "task.kl.beta=0.1", "checkpoint.load_full_state=elsewhere")
    assert set(found) == {"checkpoint.load_full_state"}


def test_rows_of_answers_say_where_padding_begins() -> None:
    """By positions, as the rows of all other shapes do: experts do not count what stands there."""
    answers = [Completion("", ids, tuple(TokenLogprob(id, -0.5, ()) for id in ids), "stop") for ids in ((7, 8), (9,))]
    verdicts = [RewardResult({}, reward, is_right=bool(reward), errors=0) for reward in (1.0, 0.0)]
    made = columns([Group((4, 5, 6), answers, verdicts)], GrpoTask(name="grpo", group_size=2), 6)
    assert made["tokens"].tolist() == [[4, 5, 6, 7, 0, 0], [4, 5, 6, 0, 0, 0]]
    assert made["positions"].tolist() == [[0, 1, 2, 3, 0, 0], [0, 1, 2, 0, 0, 0]]
    assert made["weights"].tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0]]


@pytest.mark.parametrize(("right", "samples", "k"), [(0, 5, 2), (2, 5, 1), (2, 5, 3), (5, 5, 5), (1, 8, 8)])
def test_pass_at_k_is_the_mean_over_all_choices_of_k(right: int, samples: int, k: int) -> None:
    from itertools import combinations

    answers = [True] * right + [False] * (samples - right)
    expected = np.mean([any(chosen) for chosen in combinations(answers, k)])
    assert pass_at(k, right, samples) == pytest.approx(expected)


def test_the_majority_decides_and_ties_are_shared() -> None:
    assert majority(["7", " 7", "8"], [True, True, False]) == 1
    assert majority(["7", "8", "8"], [True, False, False]) == 0
    assert majority(["7", "8", None], [True, False, False]) == 0.5
    assert majority([None, None], [False, False]) == 0


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs before experiment=arithmetic_grpo."""
    folder = tmp_path_factory.mktemp("sums")
    for name in ("arithmetic_pretrain", "arithmetic_sft"):
        patient(f"experiment={name}", "train.eval_batches=0", "train.sample.tokens=0", cwd=folder)
    return folder


def patient(*overrides: str, cwd: Path) -> None:
    """Run to a good end that is minutes away, with programs compiled to be fast."""
    done = run(*overrides, cwd=cwd, timeout=1800, XLA_FLAGS="")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not FULL, reason=skips.FULL)
@pytest.mark.parametrize(("steps", "rise"), [(200, 0.08), (500, 0.2)])
def test_rewards_teach_sums_that_were_held_out(steps: int, rise: float, start: Path) -> None:
    """From the fine-tuned model on: the experiment in part, or as it is."""
    arguments = [f"train.steps={steps}", "train.eval_every=0", f"run.name=grpo_{steps}"]
    patient("experiment=arithmetic_grpo", *arguments, cwd=start)
    first, last = rows(start / "outputs" / f"grpo_{steps}", "eval/pass@1")
    assert first < 0.6 and last >= first + rise
