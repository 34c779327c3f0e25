"""task=grpo end to end: learning from rewards, uninformative rewards, kills, and invalid configs."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.tasks.training import GrpoTask
from maxhydra.rl.episodes import Episode
from maxhydra.rl.evaluate import majority, pass_at
from maxhydra.rl.reward_pool import RewardResult
from maxhydra.rl.rollout import Group, columns
from maxhydra.rl.setup import check, split_rollout_devices
from tests.support import callbacks
from tests.support.cli import ROOT, SMALL, facts, losses, parameter_hash, rewind, run, run_ok

PATHS = f"{ROOT}:{ROOT / 'tests/support'}"
TASK = ["task=grpo", "data=arithmetic", "data.record_type=prompts", "task.max_tokens=8", "task.group_size=4"]
TASK += [*SMALL, "train.seq_len=20", "train.per_device_batch_size=16", "train.eval_batches=1"]
TASK += ["task.engine.max_batch=16", "task.engine.cache_tokens=1024", "optimizer/schedule=constant"]


def function_reward(name: str) -> list[str]:
    return ["reward=function", f"reward.terms.own.function=reward_functions:{name}"]


def rows(folder: Path, name: str) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


@pytest.mark.slow
def test_a_run_with_a_reference_trains_and_evaluates(tmp_path: Path) -> None:
    """The reference is the initial weights: KL is 0 at the first step and positive later."""
    arguments = [*TASK, *function_reward("vowels"), "train.steps=4", "task.kl.beta=0.01", "task.evaluation.samples=4"]
    arguments += [
        "train.eval_start=true",
        "task.rounds=2",
        "train.eval_batches=4",
        "task.loss=dapo",
        "task.clip.high=0.28",
    ]
    arguments += ["train.eval_every=1", "checkpoint.every=1", "checkpoint.keep=1"]
    arguments += ["checkpoint.keep_best=1", "checkpoint.best_metric=eval/error", "checkpoint.mode=synchronous"]
    arguments += ["train.sample.tokens=3", "train.sample.prompt='1+1='"]
    run_ok(*arguments, "run.name=it", cwd=tmp_path, PYTHONPATH=PATHS)
    folder = tmp_path / "outputs" / "it"
    divergence = rows(folder, "kl")
    assert abs(divergence[0]) < 1e-6 < divergence[-1]
    assert 1 <= max(rows(folder, "sampler_error")) < 1.02
    assert rows(folder, "reward/errors") == [0] * 4
    assert rows(folder, "reward/mean") == rows(folder, "reward/term/own")
    assert all(1 <= ratio <= 2 for ratio in rows(folder, "groups/drawn"))
    assert len(rows(folder, "eval/pass@1")) == 5
    # The chat template of the prompts puts each message on a line.
    assert facts(folder)["sample"].startswith("1+1=\n")
    # Step 0 has no checkpoint.
    errors = rows(folder, "eval/error")[1:]
    best = max(step for step, error in enumerate(errors, 1) if error == min(errors))
    stored = [int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit()]
    assert sorted(stored) == sorted({best, 4})
    first, last = (np.array(rows(folder, f"eval/pass@{k}")) for k in (1, 4))
    assert (last >= first).all() and last.max() > 0
    np.testing.assert_allclose(rows(folder, "eval/error"), 1 - first)


@pytest.mark.exhaustive
def test_an_adapter_on_a_mesh_in_bfloat16(tmp_path: Path) -> None:
    """The model without its adapter is the reference; engine and trainer agree on probabilities."""
    arguments = [
        *TASK,
        *function_reward("vowels"),
        "train.steps=3",
        "task.kl.beta=0.01",
        "task.iterations=2",
        "adapter=lora",
    ]
    arguments += ["mesh=fsdp", "train.per_device_batch_size=8", "model.dtypes.compute=bfloat16", "train.grad_accum=2"]
    arguments += ["task.loss=gspo", "task.importance_cap=2", "task.importance=token_truncate", "train.eval_batches=0"]
    # Rollouts use replicated weights, training uses sharded ones.
    arguments += ["task.rollout_mesh=['mesh=ddp']"]
    run_ok(*arguments, "run.name=it", cwd=tmp_path, devices=2, PYTHONPATH=PATHS)
    folder = tmp_path / "outputs" / "it"
    assert abs(rows(folder, "kl")[0]) < 1e-6
    assert 1 <= max(rows(folder, "sampler_error")) < 1.02
    assert rows(folder, "reward/mean")[0] == rows(folder, "reward/mean")[1] != rows(folder, "reward/mean")[2]
    assert facts(folder)["trained_parameters"] < facts(folder)["parameters"] / 2


@pytest.mark.exhaustive
def test_rewards_that_are_all_equal_change_nothing(tmp_path: Path) -> None:
    """As with a reward that always raises; the error is logged and counted, and the run continues."""
    arguments = [
        *TASK,
        *function_reward("raises"),
        "train.steps=3",
        "train.allow_no_learning=true",
        "checkpoint.every=1",
        "task.kl.beta=0.1",
        "task.rounds=2",
    ]
    done = run_ok(*arguments, "optimizer.weight_decay=0.5", "run.name=it", cwd=tmp_path, PYTHONPATH=PATHS)
    folder = tmp_path / "outputs" / "it"
    assert len({parameter_hash(folder, step) for step in (1, 2, 3)}) == 1
    assert rows(folder, "skipped") == [1, 2, 3] and rows(folder, "groups/degenerate") == [1] * 3
    assert rows(folder, "reward/errors") == [32] * 3 and rows(folder, "groups/informative") == [0] * 3
    assert "at step 1, all rewards are equal within each group" in done.stderr
    assert "reward.terms.own raised RuntimeError: cannot judge" in done.stderr


KILLED = [
    *TASK,
    *function_reward("vowels"),
    "train.steps=8",
    "checkpoint.every=3",
    "task.kl.beta=0.01",
    "train.eval_every=4",
]
KILLED += ["task.iterations=2", "task.off_policy_steps=1", "task.importance_cap=2", "checkpoint.mode=synchronous"]


@pytest.mark.exhaustive
def test_a_killed_run_reaches_the_same_weights(tmp_path: Path) -> None:
    """Rollouts that were sampled ahead, and a batch with updates left, survive the kill."""
    run_ok(*KILLED, "run.name=whole", cwd=tmp_path, PYTHONPATH=PATHS)
    whole = tmp_path / "outputs" / "whole"
    folder = rewind(whole, 3, "killed")
    done = run_ok(*KILLED, "run.name=killed", cwd=tmp_path, PYTHONPATH=PATHS)
    assert "resuming from step 3" in done.stderr
    assert losses(folder) == losses(whole)
    assert rows(folder, "reward/mean") == rows(whole, "reward/mean")
    assert parameter_hash(folder, 8) == parameter_hash(whole, 8)


PPO = [*TASK, *function_reward("vowels"), "task.baseline=critic", "task.group_size=1", "train.steps=6"]
PPO += ["task.iterations=2", "checkpoint.every=3", "task.kl.beta=0.01", "train.eval_batches=0", "task.critic.weight=1"]


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("ppo")
    run_ok(*PPO, "run.name=whole", cwd=cwd, PYTHONPATH=PATHS)
    return cwd / "outputs" / "whole"


@pytest.mark.exhaustive
def test_ppo_learns_values(ppo: Path) -> None:
    errors, explained = rows(ppo, "value_loss"), rows(ppo, "explained_variance")
    # All values are 0 at first.
    assert abs(explained[0]) < 1e-5 < abs(explained[-1]) and errors[1] < errors[0]


@pytest.mark.exhaustive
def test_ppo_resumes_and_other_runs_load_its_policy(ppo: Path) -> None:
    """They load it without its critic."""
    cwd, folder = ppo.parents[1], rewind(ppo, 3, "killed")
    run_ok(*PPO, "run.name=killed", cwd=cwd, PYTHONPATH=PATHS)
    assert losses(folder) == losses(ppo) and parameter_hash(folder, 6) == parameter_hash(ppo, 6)
    adapter = ["adapter=lora", "checkpoint.load_parameters=outputs/whole", "train.steps=2", "run.name=adapter"]
    run_ok(*PPO, *adapter, cwd=cwd, PYTHONPATH=PATHS)
    values = rows(cwd / "outputs" / "adapter", "value_loss")
    assert values[1] < values[0]
    decode = [*SMALL[:6], "task=decode", "task.prompt=1+1", "task.sampling.max_tokens=2", "data=arithmetic"]
    run_ok(*decode, "checkpoint.load_parameters=outputs/adapter", "run.name=out", cwd=cwd)


ONLINE_DPO = [*TASK, *function_reward("vowels"), "task.loss=dpo", "task.kl.beta=0.1", "train.steps=6"]
ONLINE_DPO += ["task.iterations=2", "checkpoint.every=3", "train.eval_batches=0", "train.grad_accum=2"]
ONLINE_DPO += ["train.per_device_batch_size=8"]


@pytest.fixture(scope="module")
def online_dpo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("online_dpo")
    run_ok(*ONLINE_DPO, "run.name=whole", cwd=cwd, PYTHONPATH=PATHS)
    return cwd / "outputs" / "whole"


@pytest.mark.exhaustive
def test_online_dpo_prefers_the_best_completions(online_dpo: Path) -> None:
    """A batch has a pair of each of its 16 prompts."""
    assert losses(online_dpo)[1] == pytest.approx(np.log(2), abs=1e-5), "the policy is its reference"
    assert rows(online_dpo, "reward_margin")[-1] > 0.1 and rows(online_dpo, "accuracy")[-1] > 0.6
    records = rollout_records(online_dpo)
    assert len(records) == 3 * 16 * 4
    roles = {role: [r["reward"] for r in records if r["role"] == role] for role in ("chosen", "rejected", None)}
    assert len(roles["chosen"]) == len(roles["rejected"]) <= 3 * 16
    assert all(best > worst for best, worst in zip(roles["chosen"], roles["rejected"], strict=True))
    assert all(("sampler_error" in record) == (record["role"] is not None) for record in records)
    assert 1 <= max(record.get("sampler_error", 0) for record in records) < 1.02


@pytest.mark.exhaustive
def test_online_dpo_resumes_between_two_updates_of_a_batch(online_dpo: Path) -> None:
    folder = rewind(online_dpo, 3, "killed")
    run_ok(*ONLINE_DPO, "run.name=killed", cwd=online_dpo.parents[1], PYTHONPATH=PATHS)
    assert losses(folder) == losses(online_dpo) and parameter_hash(folder, 6) == parameter_hash(online_dpo, 6)
    assert rollout_records(folder) == rollout_records(online_dpo)


ENVIRONMENT = [*TASK, "environment=function", "data.tokenizer.chat_template=lines_tools", "train.seq_len=64"]
ENVIRONMENT += ["environment.turn_tokens=3", "environment.max_turns=3", "task.max_tokens=44"]


def environment_of(name: str) -> list[str]:
    return [*ENVIRONMENT, f"environment.function=environment_functions:{name}"]


@pytest.mark.exhaustive
def test_failing_environments_are_counted_and_training_proceeds(tmp_path: Path) -> None:
    """Of 64 environments 4 hang, 4 crash and 4 return invalid messages; the engine is not deterministic."""
    arguments = [*environment_of("TwelveOf64"), "environment.timeout=15", "train.per_device_batch_size=64"]
    arguments += ["train.steps=2", "train.eval_batches=1", "task.engine.cache_tokens=8192", "task.engine.max_batch=64"]
    arguments += ["task.engine.deterministic=false"]
    extra = {"PYTHONPATH": PATHS, "TICKETS": str(tmp_path / "tickets")}
    done = run_ok(*arguments, "run.name=it", cwd=tmp_path, **extra)
    folder = tmp_path / "outputs" / "it"
    for kind in ("hangs", "crashes", "invalid"):
        assert rows(folder, f"environment/{kind}") == [4, 0]
    for reason in ("exceeded environment.timeout=15 s", "crashed its process", "returned None instead of"):
        assert f"the environment {reason}" in done.stderr
    first, second = rows(folder, "environment/turns")
    assert second == 3 and 2.5 < first < 3
    records = [json.loads(line) for line in (folder / "rollouts" / "train-00000.jsonl").read_text().splitlines()]
    failed = [record for record in records if "failure" in record]
    assert len(failed) == 12 and not any(record["is_used"] or record["reward"] for record in failed)
    assert [turn["role"] for turn in records[-1]["turns"]] == ["assistant", "user"] * 3
    assert rows(folder, "grad_norm")[1] > 0 and len(rows(folder, "eval/reward")) == 1


@pytest.mark.exhaustive
def test_a_resumed_run_repeats_its_episodes(tmp_path: Path) -> None:
    arguments = [*environment_of("Echo"), *function_reward("vowels"), "train.steps=2", "checkpoint.every=1"]
    run_ok(*arguments, "run.name=whole", cwd=tmp_path, PYTHONPATH=PATHS)
    whole = tmp_path / "outputs" / "whole"
    folder = rewind(whole, 1, "killed")
    run_ok(*arguments, "run.name=killed", cwd=tmp_path, PYTHONPATH=PATHS)
    assert losses(folder) == losses(whole) and rows(folder, "reward/mean") == rows(whole, "reward/mean")
    assert parameter_hash(folder, 2) == parameter_hash(whole, 2)
    terms = [rows(whole, f"reward/term/{name}") for name in ("own", "environment")]
    np.testing.assert_allclose(rows(whole, "reward/mean"), np.sum(terms, axis=0))
    assert rows(whole, "environment/turns") == [3] * 2


ASYNCHRONOUS = ["task.max_staleness=2", "task.engine.deterministic=false", "train.steps=8", "run.name=it"]


SEPARATE = [*TASK, *function_reward("vowels"), *ASYNCHRONOUS, "task.rollout_devices=1", "checkpoint.every=3"]
SEPARATE += ["train.per_device_batch_size=8", "train.eval_every=4", "checkpoint.mode=synchronous"]


def rollout_records(folder: Path) -> list[dict[str, Any]]:
    lines = [line for path in sorted(folder.glob("rollouts/train-*.jsonl")) for line in path.open()]
    return [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.default_cases("whole")
@pytest.mark.parametrize("is_killed", [False, True], ids=["whole", "killed"])
def test_asynchronous_rollouts_are_trained_on_exactly_once(is_killed: bool, tmp_path: Path) -> None:
    """Without a kill, and whatever was being sampled when the run was killed."""
    folder = tmp_path / "outputs" / "it"
    if is_killed:
        kill = callbacks.override("SignalItself", signal="SIGKILL", at=5)
        assert run(*SEPARATE, kill, cwd=tmp_path, devices=3, PYTHONPATH=PATHS).returncode == -signal.SIGKILL
        assert max(record["step"] for record in rollout_records(folder)) >= 4
    done = run_ok(*SEPARATE, cwd=tmp_path, devices=3, PYTHONPATH=PATHS)
    assert ("resuming from step 3" in done.stderr) == is_killed
    records = records_of_every_step(folder)
    assert len(losses(folder)) == 8 and max(rows(folder, "rollout/max_staleness")) == 2
    # A step's metric is the mean over the tokens that are trained on; it is 0 without any.
    for step, metric in enumerate(rows(folder, "sampler_error"), 1):
        used = [record for record in records if record["step"] == step and record["is_used"]]
        total = sum(record["sampler_error"] * record["tokens"] for record in used)
        assert total / max(sum(record["tokens"] for record in used), 1) == pytest.approx(metric, rel=1e-4)
    assert all(("sampler_error" in record) == record["is_used"] for record in records)
    assert max(record["staleness"] for record in records) == 2
    assert all(speed > 0 for speed in rows(folder, "tokens_per_second"))
    assert max(rows(folder, "rollout/tokens_per_second")) > 0 and max(rows(folder, "rollout/queue")) <= 2


def records_of_every_step(folder: Path) -> list[dict[str, Any]]:
    """The records of a complete asynchronous run, in which no completion is missing or there twice."""
    records = rollout_records(folder)
    assert [record["step"] for record in records] == [step for step in range(1, 9) for _ in range(16)]
    seen = [(record["prompt_number"], record["sample"]) for record in records]
    assert sorted(seen) == [(prompt, sample) for prompt in range(32) for sample in range(4)]
    return records


@pytest.mark.exhaustive
def test_an_asynchronous_run_survives_several_kills(tmp_path: Path) -> None:
    """Before its first checkpoint, while it saves one, after one, and again: no completion is lost or there twice."""
    folder = tmp_path / "outputs" / "it"
    kills = [("SignalItself", {"signal": "SIGKILL", "at": 2}, 0), ("KillInSave", {}, 0)]
    kills += [("SignalItself", {"signal": "SIGKILL", "at": at}, start) for at, start in ((5, 0), (7, 3))]
    for name, options, start in kills:
        ended = run(*SEPARATE, callbacks.override(name, **options), cwd=tmp_path, devices=3, PYTHONPATH=PATHS)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        assert not start or f"resuming from step {start}" in ended.stderr
        seen = [(record["step"], record["prompt_number"], record["sample"]) for record in rollout_records(folder)]
        assert len(set(seen)) == len(seen)
    done = run_ok(*SEPARATE, cwd=tmp_path, devices=3, PYTHONPATH=PATHS)
    assert "resuming from step 6" in done.stderr
    records = records_of_every_step(folder)
    assert all(("sampler_error" in record) == record["is_used"] for record in records)
    assert facts(folder)["end_step"] == 8 and len(losses(folder)) == 8


@pytest.mark.exhaustive
def test_one_device_samples_episodes_while_it_trains(tmp_path: Path) -> None:
    arguments = [*environment_of("Echo"), *function_reward("vowels"), *ASYNCHRONOUS, "task.iterations=2"]
    run_ok(*arguments, "environment.concurrency=8", cwd=tmp_path, PYTHONPATH=PATHS)
    folder = tmp_path / "outputs" / "it"
    assert rows(folder, "environment/turns") == [3] * 8
    assert 0 < max(rows(folder, "rollout/max_staleness")) <= 2
    steps = [record["step"] for record in rollout_records(folder)]
    assert steps == [step for step in (1, 3, 5, 7) for _ in range(16)]


@pytest.mark.parametrize(("share", "sizes"), [(0, (8, 0)), (0.25, (6, 2)), (3, (5, 3))])
def test_devices_that_only_sample(share: float, sizes: tuple[int, int]) -> None:
    parts = split_rollout_devices(GrpoTask(name="grpo", rollout_devices=share), list(range(8)))
    assert tuple(map(len, parts)) == sizes


def test_parts_of_the_devices_that_do_not_exist_are_rejected() -> None:
    for task in ({"rollout_devices": 8}, {"rollout_devices": 1.5}, {"rollout_devices": 0.01}, {"max_staleness": 1}):
        with pytest.raises(ConfigError, match=r"task\.rollout_devices") as caught:
            split_rollout_devices(GrpoTask(name="grpo", **task), list(range(8)))
        assert "1 to 7" in (caught.value.problems[0].accepted or "")


def problems(*overrides: str) -> dict[str, Any]:
    config = compose(["task=grpo", *overrides]).config
    with pytest.raises(ConfigError) as caught:
        check(config, config.task, processes=1)
    return {problem.path: problem for problem in caught.value.problems}


def test_keys_that_need_an_eval_loss_are_rejected() -> None:
    overrides = ["train.target_eval_loss=1", "train.early_stop.patience=2", "checkpoint.keep_best=1"]
    with pytest.raises(ConfigError) as caught:
        compose(["task=grpo", *overrides])
    paths = ["checkpoint.best_metric", "train.early_stop.metric", "train.target_eval_loss"]
    assert [problem.path for problem in caught.value.problems] == paths
    assert "eval/error" in (caught.value.problems[0].accepted or "")
    compose(["task=grpo", "checkpoint.keep_best=1", "checkpoint.best_metric=eval/error"])
    compose(["task=grpo", "train.early_stop.patience=2", "train.early_stop.metric=eval/error"])


def test_all_problems_are_reported() -> None:
    unsupported = ["train.ramp.start=1", "train.sample.tokens=1", "train.sample.at_evaluations=true"]
    found = problems("data=arithmetic", "task.max_tokens=32", "train.seq_len=32", *unsupported)
    paths = {"reward.terms", "data.record_type", "task.max_tokens", "train.ramp.start", "train.sample.at_evaluations"}
    assert set(found) == paths
    assert "reward=exact" in found["reward.terms"].hint
    assert found["data.record_type"].accepted == "prompts"
    started = ["reward=exact", "data=arithmetic", "data.record_type=prompts", "task.max_tokens=8"]
    found = problems(*started, "task.kl.beta=0.1", "checkpoint.load_full_state=elsewhere")
    assert set(found) == {"checkpoint.load_full_state"}


def test_padding_of_completions_has_position_0() -> None:
    """As in the rows of all other record types: the router ignores padding by its positions."""
    episodes = [
        Episode((4, 5, 6), tokens=ids, logprobs=[-0.5] * len(ids), is_sampled=[True] * len(ids))
        for ids in ([7, 8], [9])
    ]
    results = [RewardResult({}, reward, is_correct=bool(reward), errors=0) for reward in (1.0, 0.0)]
    arrays = columns([Group(episodes, results)], GrpoTask(name="grpo", group_size=2), 6)
    assert arrays["tokens"].tolist() == [[4, 5, 6, 7, 0, 0], [4, 5, 6, 0, 0, 0]]
    assert arrays["positions"].tolist() == [[0, 1, 2, 3, 0, 0], [0, 1, 2, 0, 0, 0]]
    assert arrays["weights"].tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0]]


@pytest.mark.parametrize(("correct", "samples", "k"), [(0, 5, 2), (2, 5, 1), (2, 5, 3), (5, 5, 5), (1, 8, 8)])
def test_pass_at_k_is_the_mean_over_all_choices_of_k(correct: int, samples: int, k: int) -> None:
    from itertools import combinations

    outcomes = [True] * correct + [False] * (samples - correct)
    expected = np.mean([any(chosen) for chosen in combinations(outcomes, k)])
    assert pass_at(k, correct, samples) == pytest.approx(expected)


def test_the_majority_decides_and_ties_are_shared() -> None:
    assert majority(["7", " 7", "8"], [True, True, False]) == 1
    assert majority(["7", "8", "8"], [True, False, False]) == 0
    assert majority(["7", "8", None], [True, False, False]) == 0.5
    assert majority([None, None], [False, False]) == 0
