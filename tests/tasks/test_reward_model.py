"""task=reward_model end to end: it starts at ln 2, learns the preference, resumes, and rewards completions of GRPO."""

import math
from pathlib import Path
from typing import Any

import pytest

from maxhydra.align.reward_model import completion_row
from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.data import Corpus
from maxhydra.data import RowSpec
from maxhydra.data.record_types import Rejected, build_record_type
from maxhydra.rl.reward_models import open_reward_models
from maxhydra.sharding import Sharder
from maxhydra.tasks import Job, reward_model
from tests.rl.test_rewards import make_sample
from tests.support.cli import SMALL, facts, losses, parameter_hash, rewind, run, run_ok
from tests.tasks.test_dpo import write_pairs
from tests.tasks.test_grpo import TASK, rows

RUN = ["task=reward_model", "model.head=score", "data=grain", "data.path=pairs.jsonl", "data.record_type=preference"]
RUN += ["data.eval_fraction=0.094", *SMALL, "train.steps=16", "checkpoint.every=8", "optimizer.learning_rate=3e-3"]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs `base`, a language model, and `it`, a reward model that starts from it."""
    cwd = tmp_path_factory.mktemp("reward_model")
    write_pairs(cwd)
    run_ok("data=arithmetic", "data.record_type=text", *SMALL, "train.steps=1", "run.name=base", cwd=cwd)
    run_ok(*RUN, "checkpoint.load_parameters=outputs/base", "run.name=it", cwd=cwd)
    return cwd


@pytest.mark.exhaustive
def test_it_starts_at_ln_2_and_learns_the_preference(trained: Path) -> None:
    folder = trained / "outputs" / "it"
    assert losses(folder)[1] == pytest.approx(math.log(2), abs=1e-6)
    assert rows(folder, "eval/accuracy")[-1] > 0.9 and rows(folder, "eval/reward_margin")[-1] > 0.3
    assert rows(folder, "eval/tokens")[-1] == 10, "pairs; the rest of the second batch is padding"


@pytest.mark.exhaustive
def test_it_resumes_bit_identically(trained: Path) -> None:
    folder = trained / "outputs" / "it"
    killed = rewind(folder, 8, "killed")
    run_ok(*RUN, "checkpoint.load_parameters=outputs/base", "run.name=killed", cwd=trained)
    assert losses(killed) == losses(folder) and parameter_hash(killed, 16) == parameter_hash(folder, 16)


@pytest.mark.exhaustive
def test_it_ends_early_by_its_eval_loss_and_keeps_its_best_checkpoint(trained: Path) -> None:
    best = ["checkpoint.keep=1", "checkpoint.keep_best=1", "checkpoint.mode=synchronous", "checkpoint.every=1"]
    early = ["train.eval_every=1", "train.early_stop.patience=2", "train.early_stop.min_delta=9"]
    start = ["checkpoint.load_parameters=outputs/base", "train.target_eval_loss=0"]
    run_ok(*RUN, *best, *early, *start, "run.name=stop", cwd=trained)
    folder = trained / "outputs" / "stop"
    errors = rows(folder, "eval/loss")
    assert facts(folder)["end_step"] == len(errors) == 3
    stored = {int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit()}
    assert stored == {1 + errors.index(min(errors)), 3}


@pytest.mark.exhaustive
def test_reward_models_score_completions_of_grpo(trained: Path) -> None:
    """One with full weights, and one with an adapter that was trained on two devices, next to another term."""
    adapter = ["adapter=lora", "mesh=fsdp", "train.per_device_batch_size=4", "train.steps=2", "run.name=adapter"]
    run_ok(*RUN, "checkpoint.load_parameters=outputs/base", *adapter, cwd=trained, devices=2)
    assert facts(trained / "outputs" / "adapter")["trained_parameters"] > 0
    terms = "{full:{kind:model,weights:outputs/it},low:{kind:model,weights:outputs/adapter,weight:0.5},"
    terms += "short:{kind:length,target:4,weight:0.1}}"
    arguments = [*TASK, f"+reward.terms={terms}", "train.steps=2", "task.loss=rloo", "run.name=policy"]
    run_ok(*arguments, cwd=trained)
    folder = trained / "outputs" / "policy"
    full, low, short = (rows(folder, f"reward/term/{name}") for name in ("full", "low", "short"))
    assert all(full) and all(low) and full != low
    for mean, *parts in zip(rows(folder, "reward/mean"), full, low, short, strict=True):
        assert mean == pytest.approx(parts[0] + 0.5 * parts[1] + 0.1 * parts[2], abs=1e-5)
    inputs = facts(folder)["inputs"]["reward"]
    assert inputs["reward.terms.full.weights"]["step"] == 16
    refused = run("task=decode", *SMALL, "model.head=score", "checkpoint.load_parameters=outputs/it", cwd=trained)
    assert refused.returncode and "task=decode needs a language model" in refused.stderr


@pytest.mark.exhaustive
def test_an_exported_reward_model_gives_the_same_scores(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained)
    source = ["model.head=score", "checkpoint.load_parameters=outputs/it", "task.output=classifier"]
    run_ok("task=convert", *[item for item in SMALL if item.startswith("model.")], *source, cwd=trained)
    terms = "{run:{kind:model,weights:outputs/it},folder:{kind:model,weights:classifier}}"
    config = compose([*TASK, f"+reward.terms={terms}"]).config
    models = open_reward_models(config, Sharder.from_config(config.mesh), rows=2)
    samples = [make_sample("", ids=ids) for ids in ((5, 6, 7), (8, 9), (1, 2, 3, 4))]
    scores = {name: score(samples) for name, score in models.items()}
    # The folder is computed in bfloat16, the default of Hugging Face models.
    assert scores["run"] == pytest.approx(scores["folder"], abs=5e-3) and len(set(scores["run"])) == 3
    assert models["run"](samples[1:2]) == pytest.approx(scores["run"][1:2], abs=1e-6), "padding has no effect"


@pytest.mark.exhaustive
def test_unsuitable_reward_models_are_rejected(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained)

    def problem(weights: str, *overrides: str) -> str:
        config = compose([*TASK, "reward=model", f"reward.terms.model.weights={weights}", *overrides]).config
        with pytest.raises(ConfigError) as caught:
            open_reward_models(config, Sharder.single(), rows=2)
        return str(caught.value)

    assert "is a language model, not a reward model" in problem("outputs/base")
    assert "does not exist" in problem("outputs/nothing") or "not a run folder" in problem("outputs/nothing")
    tokenizer = trained / "tokenizer.model"
    tokenizer.write_text("")
    other = [f"data.tokenizer.path={tokenizer}", "data.tokenizer.kind=sentencepiece"]
    assert "has another tokenizer than the policy: data.tokenizer.kind is byte there" in problem("outputs/it", *other)


def test_all_problems_of_a_config_are_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["task=reward_model"])
    assert [problem.path for problem in caught.value.problems] == ["model.head"]
    config = compose(["task=reward_model", "model.head=score", "train.z_loss=0.1", "train.sample.tokens=3"]).config
    with pytest.raises(ConfigError) as caught:
        reward_model.run(Job(config, {}, machine=None, run=None))  # type: ignore[arg-type]
    paths = [problem.path for problem in caught.value.problems]
    assert paths == ["data.record_type", "train.z_loss", "train.sample.tokens"]


def record_type_of(kind: str, **columns: str) -> Any:
    corpus = Corpus(source="grain", path="x", record_type=kind, columns=columns)  # type: ignore[call-arg]
    return build_record_type(corpus, compose([]).config.data, RowSpec(seq_len=16, vocab_size=320, seed=0))


def test_scored_completions_and_margins_are_read() -> None:
    scored = record_type_of("scored")
    example, bad, long = scored.encode(
        [
            {"prompt": "ab", "completion": "cd", "score": 0.25},
            {"prompt": "ab", "completion": "cd", "score": None},
            {"prompt": "ab" * 9, "completion": "cd", "score": 1},
        ]
    )
    row = scored.row(example, 16)
    assert row["score"] == 0.25 and completion_row(row)["last"] == 5, "BOS, four bytes and EOS"
    assert isinstance(bad, Rejected) and "score is None" in bad.reason
    assert isinstance(long, Rejected) and "more than train.seq_len=16" in long.reason
    pairs = record_type_of("preference", margin="gap")
    good, bad = pairs.encode([{"prompt": "a", "chosen": "b", "rejected": "c", "gap": gap} for gap in (2, "much")])
    assert pairs.row(good, 8)["margin"] == 2
    assert isinstance(bad, Rejected) and "margin is 'much'" in bad.reason
