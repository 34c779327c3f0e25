"""Folders that an earlier version wrote are listed, resumed and loaded.

tests/stored/runs.tar.xz was written by commit 7cdb491 and is never written again: it holds the config keys, override
strings, parameter names and index files of that commit. tests/stored/make.py shows the commands.
"""

import dataclasses
import json
import platform
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxhydra.config import Config, ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.serialize import from_yaml
from maxhydra.convert.orbax_io import read_parameters
from maxhydra.runs.rerun import rerun_arguments
from tests.stored import make
from tests.support.cli import facts, losses, run_ok

RATES = ("rates/0_learning_rate=0.01", "rates/1_learning_rate=0.001")
SEARCH = (
    "search/0_learning_rate=0.004430375245218269,clip_norm=0.5",
    "search/1_learning_rate=0.004311710058685493,clip_norm=1.0",
)
TRAINED = ("chat", "float8", "float8_whole", "lora", "mixture", "preference", "pretrain", "rewards", "whole")
RUNS = (*TRAINED, "tokenizer", *RATES, *SEARCH)
# Keys and options by their names in this version.
RECORD_TYPE = "data.record_type"
DETERMINISTIC = "task.engine.deterministic"
# Defaults of the archive's commit that changed since; config.yaml records every value, run.json the overrides alone.
OLD_DEFAULTS = {
    "mixture": ["model.scan_unroll=1"],
    "rewards": ["task.engine.prefill_chunk=256", "task.loss=grpo", "task.importance_cap=null"],
}
TOKENIZE = ["task=tokenize", *make.TEXTS, f"{RECORD_TYPE}=text", "task.output=shards/tokens", "task.shards=2"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive, for tests that add to it and change nothing in it."""
    return make.unpack(tmp_path_factory.mktemp("stored"))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The archive, for a test that changes it."""
    return make.unpack(tmp_path)


def answer(*words: str, cwd: Path) -> Any:
    """The JSON that a command prints. No fault of a stored file is reported."""
    done = run_ok(*words, "--json", cwd=cwd)
    assert not done.stderr, done.stderr
    return json.loads(done.stdout)


def scores(path: Path) -> list[float]:
    return [value for line in path.read_text().splitlines() for value in json.loads(line)["logprobs"]]


def is_same_machine(folder: Path) -> bool:
    """Whether losses must be equal to the last bit: same system and compiler."""
    before = facts(folder)
    return before["platform"] == platform.platform() and before["packages"]["jaxlib"] == metadata.version("jaxlib")


def assert_continues(folder: Path, whole: Path, steps: int) -> None:
    """The losses of a resumed run are those of the run that was not interrupted."""
    found, expected = losses(folder), losses(whole)
    assert list(found) == list(expected) == list(range(1, steps + 1))
    if is_same_machine(whole):
        assert found == expected
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-4)


def test_the_archive_holds_the_names_of_its_commit(stored: Path) -> None:
    """An archive that a later version wrote would test nothing."""
    outputs = stored / "outputs"
    names = {
        outputs / "mixture/checkpoints/3/params/_METADATA": "'beside'",
        outputs / "mixture/config.yaml": "beside: moe",
        outputs / "mixture/run.json": "model.kinds.local.beside=moe",
        outputs / "float8/checkpoints/3/rest/_METADATA": "'history'",
        outputs / "float8/run.json": "+quantization.besides=",
        outputs / "preference/config.yaml": "shape: preference",
        outputs / "rewards/run.json": "task.engine.steady=true",
        outputs / "tokenizer/run.json": '"task=tokenizer"',
        stored / "exported/int4/quantization.yaml": "besides:",
        stored / "shards/tokens/index.json": '"data.shape"',
        stored / "jobs/decode.yaml": "steady: true",
    }
    assert [path for path, text in names.items() if text not in path.read_text()] == []
    assert {facts(outputs / name)["git"]["sha"][:7] for name in RUNS} == {"7cdb491"}


# Commands that read


@pytest.mark.slow
def test_every_run_is_listed(stored: Path) -> None:
    found = {run["path"]: run for run in answer("runs", "list", cwd=stored)}
    assert found.keys() >= set(RUNS)
    assert {found[name]["status"] for name in RUNS} == {"finished"}
    assert found["whole"]["tags"] == ["complete"] and found["whole"]["step"] == 8
    assert found["mixture"]["model"] == "gemma4-26b" and found["preference"]["task"] == "dpo"


@pytest.mark.slow
@pytest.mark.default_cases("record_type", "sweep")
@pytest.mark.parametrize(
    ("condition", "names"),
    [
        (f"{RECORD_TYPE}=preference", {"preference"}),
        (f"{RECORD_TYPE}=chat", {"chat"}),
        (f"{DETERMINISTIC}=true", {"rewards"}),
        ("quantization.history=4", {"float8", "float8_whole"}),
        ("sweep=rates", set(RATES)),
    ],
    ids=["record_type", "chat", "deterministic", "history", "sweep"],
)
def test_conditions_select_by_keys_of_this_version(condition: str, names: set[str], stored: Path) -> None:
    assert {run["path"] for run in answer("runs", "list", condition, cwd=stored)} & set(RUNS) == names


@pytest.mark.slow
def test_runs_are_shown_compared_and_reported(stored: Path) -> None:
    shown = run_ok("runs", "show", "mixture", cwd=stored)
    assert "gemma4-26b" in shown.stdout and not shown.stderr
    assert "model.kinds.local.moe.experts" in run_ok("runs", "show", "mixture", "--all", cwd=stored).stdout
    best = run_ok("runs", "best", "sweep=rates", cwd=stored).stdout
    assert "optimizer.learning_rate=0.01" in best
    compared = run_ok("runs", "diff", *RATES, cwd=stored).stdout
    assert "optimizer.learning_rate" in compared
    run_ok("runs", "report", "preference", cwd=stored)
    run_ok("runs", "report", "search", cwd=stored)
    assert (stored / "outputs" / "preference" / "report.html").exists()
    assert (stored / "outputs" / "search" / "sweep.html").exists()


# Configs


def comparable(config: Config) -> Config:
    """Without the place of the run, which `runs rerun` chooses, and the loss chunk, whose default was 0."""
    run = dataclasses.replace(config.run, name=None, outputs="outputs")
    return dataclasses.replace(config, run=run, train=dataclasses.replace(config.train, loss_chunk=None))


@pytest.mark.slow
@pytest.mark.default_cases("mixture", "rewards", "preference", SEARCH[0])
@pytest.mark.parametrize("name", RUNS)
def test_overrides_and_config_of_a_run_give_the_same_config(
    name: str, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`runs rerun` and `runs resume` compose the overrides; decoding and `maxhydra job` read config.yaml."""
    monkeypatch.chdir(stored)
    folder = stored / "outputs" / name
    written = from_yaml((folder / "config.yaml").read_text(), str(folder / "config.yaml"))
    overrides = [*rerun_arguments(facts(folder), None), *OLD_DEFAULTS.get(name, [])]
    assert comparable(compose(overrides).config) == comparable(written)


@pytest.mark.slow
@pytest.mark.default_cases("mixture", SEARCH[0])
@pytest.mark.parametrize("name", ["mixture", "preference", "tokenizer", "rewards", *SEARCH[:1]])
def test_a_run_can_be_run_again(name: str, stored: Path) -> None:
    done = run_ok("runs", "rerun", name, "--anyway", "--dry-run", cwd=stored)
    assert done.stdout.startswith(f"cd {stored} && maxhydra ")


@pytest.mark.slow
@pytest.mark.default_cases("decode", "train_tokenizer")
@pytest.mark.parametrize("name", ["decode", "decode_int4", "train_tokenizer", "score"])
def test_a_config_file_is_executed(name: str, stored: Path) -> None:
    """Also weights in four bits, whose folder has a quantization.yaml."""
    done = run_ok("job", f"jobs/{name}.yaml", cwd=stored)
    if name == "train_tokenizer":
        assert (stored / "tokenizer" / "tokenizer.json").exists()
    elif name == "score":
        np.testing.assert_allclose(scores(stored / "scores.jsonl"), scores(stored / "scores/pretrain.jsonl"), atol=1e-4)
    else:
        assert done.stdout.strip()


# Checkpoints


@pytest.mark.slow
@pytest.mark.default_cases("pretrain")
@pytest.mark.parametrize(
    ("run", "whole", "steps"), [("pretrain", "whole", 8), ("float8", "float8_whole", 5)], ids=["pretrain", "float8"]
)
def test_a_run_resumes_as_if_it_was_never_interrupted(run: str, whole: str, steps: int, own: Path) -> None:
    """With delayed scaling, also the largest values of the last steps are restored."""
    outputs = own / "outputs"
    # The flags of this test suite compile other programs, in half the time, whose losses differ in the last bits.
    is_same = is_same_machine(outputs / whole)
    flags = {"XLA_FLAGS": " ".join(facts(outputs / whole)["xla_flags"])} if is_same else {}
    run_ok("runs", "resume", run, f"train.steps={steps}", cwd=own, **flags)
    assert_continues(outputs / run, outputs / whole, steps)
    assert [session["start_step"] for session in facts(outputs / run)["sessions"]] == [0, 6 if run == "pretrain" else 3]
    assert [run["path"] for run in answer("runs", "list", f"step={steps}", cwd=own)].count(run) == 1


@pytest.mark.exhaustive
def test_an_adapter_resumes(own: Path) -> None:
    run_ok("runs", "resume", "lora", "train.steps=4", cwd=own)
    assert list(losses(own / "outputs" / "lora")) == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.default_cases("peft", "int8")
@pytest.mark.parametrize(
    ("weights", "scored", "tolerance", "more"),
    [
        ("outputs/lora", "lora", 1e-4, []),
        ("peft", "lora", 1e-4, []),
        ("exported/hf", "hf", 1e-4, []),
        ("exported/int8", "pretrain", 0.1, ["quantization=int8_weights"]),
    ],
    ids=["lora", "peft", "hf", "int8"],
)
def test_weights_give_the_stored_scores(
    weights: str, scored: str, tolerance: float, more: list[str], stored: Path, tmp_path: Path
) -> None:
    output = tmp_path / "scores.jsonl"
    if weights == "peft":
        # A PEFT folder is loaded around a Hugging Face folder, and this one names the run that it was trained from.
        shutil.copytree(stored / "exported" / "peft", stored / "peft")
        path = stored / "peft" / "adapter_config.json"
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(stored / "exported/hf")})
        )
    given = [*make.MODEL, "train.seq_len=32", "task=score", "task.input=scored.jsonl", f"task.output={output}", *more]
    run_ok(*given, f"checkpoint.load_parameters={weights}", cwd=stored)
    np.testing.assert_allclose(scores(output), scores(stored / f"scores/{scored}.jsonl"), atol=tolerance)


@pytest.mark.slow
def test_a_mixture_gives_the_stored_scores(stored: Path) -> None:
    changes = ["task=score", "task.input=scored.jsonl", "task.output=mixture.jsonl"]
    run_ok(
        *("runs", "rerun", "mixture", "--anyway", *changes, "checkpoint.load_parameters=outputs/mixture"), cwd=stored
    )
    np.testing.assert_allclose(scores(stored / "mixture.jsonl"), scores(stored / "scores/mixture.jsonl"), atol=1e-4)


@pytest.mark.exhaustive
def test_a_new_run_starts_from_the_weights(stored: Path) -> None:
    """The loss of its first step is not that of fresh weights."""
    name, new = "float8", "after_float8"
    changes = [f"checkpoint.load_parameters=outputs/{name}", "train.steps=1", f"run.name={new}", "checkpoint=none"]
    run_ok("runs", "rerun", name, "--anyway", *changes, cwd=stored)
    (loss,) = losses(stored / "outputs" / new).values()
    assert loss != losses(stored / "outputs" / name)[1]
    checkpoint = stored / "outputs" / name / "checkpoints" / "3"
    assert facts(stored / "outputs" / new)["started_from"] == f"the weights of {checkpoint}"


# Sweeps


@pytest.mark.exhaustive
def test_sweeps_are_resumed(own: Path) -> None:
    shutil.rmtree(own / "outputs" / RATES[1])
    before = facts(own / "outputs" / RATES[0])
    run_ok("sweep", "resume", "rates", cwd=own)
    assert facts(own / "outputs" / RATES[0]) == before
    assert facts(own / "outputs" / RATES[1])["status"] == "finished"
    run_ok("sweep", "resume", "search", "--trials", "3", cwd=own)
    assert len(list((own / "outputs" / "search").glob("*/run.json"))) == 3


@pytest.mark.slow
def test_the_status_of_sweeps_is_shown(stored: Path) -> None:
    for name, runs in (("rates", RATES), ("search", SEARCH)):
        lines = run_ok("sweep", "status", name, cwd=stored).stdout.splitlines()
        assert [line.partition(": ")[0] for line in lines[:2]] == [run.partition("/")[2] for run in runs]
        assert all("finished" in line for line in lines[:2])


# Shards


@pytest.mark.exhaustive
def test_shards_are_complete_and_training_reads_them(stored: Path) -> None:
    """The settings in index.json are those of the same command today: nothing is written again."""
    before = (stored / "shards/tokens/index.json").read_text()
    run_ok(*TOKENIZE, "task.workers=1", cwd=stored)
    assert json.loads((stored / "shards/tokens/index.json").read_text())["shards"] == json.loads(before)["shards"]
    given = ["data=grain", "data.path=shards/tokens", f"{RECORD_TYPE}=tokens", "train.steps=1", "checkpoint=none"]
    run_ok(*make.MODEL, *make.TRAIN, *given, "train.eval_batches=0", "run.name=on_shards", cwd=stored)
    assert list(losses(stored / "outputs" / "on_shards")) == [1]


@pytest.mark.exhaustive
def test_a_student_learns_from_stored_logits(stored: Path) -> None:
    given = ["task=distill", "data=grain", "data.path=shards/logits", f"{RECORD_TYPE}=teacher", "train.steps=1"]
    given += ["checkpoint=none", "train.eval_batches=0", "run.name=student"]
    run_ok(*make.MODEL, *make.TRAIN, *given, cwd=stored)
    assert list(losses(stored / "outputs" / "student")) == [1]


# Checkpoints of 200 and 300 commits before the archive: other names of arrays, other nodes in the optimizer's state


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["back_200", "back_300"])
def test_checkpoints_of_hundreds_of_commits_ago_are_resumed(name: str, tmp_path: Path) -> None:
    for copy in (tmp_path, tmp_path / "whole"):
        make.extract(make.EARLIER_ARCHIVE, copy)
    folder = tmp_path / "outputs" / name
    done = run_ok(*make.EARLIER, f"run.name={name}", cwd=tmp_path)
    assert "resuming from step 6" in done.stderr
    assert f"checkpoint {folder / 'checkpoints/6'} was written before checksums existed, not verified" in done.stderr
    found, expected = losses(folder), losses(tmp_path / "whole/outputs" / name)
    assert list(found) == list(expected) == list(range(1, 9))
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-6)


def test_a_checkpoint_that_does_not_match_names_the_commit_that_wrote_it(tmp_path: Path) -> None:
    make.extract(make.EARLIER_ARCHIVE, tmp_path)
    path = tmp_path / "outputs/back_300/checkpoints/6"
    with pytest.raises(
        ConfigError, match=r"written by commit f58502c\w+ of maxhydra \(2026-11-\d\d\), which can read it"
    ):
        read_parameters("checkpoint.load_parameters", path, {"other": jax.ShapeDtypeStruct((3,), "float32")})
