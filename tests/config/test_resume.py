"""Keys that may change when a run resumes: every key is classified, and changes are found in stored configs."""

from fnmatch import fnmatch

import pytest

from maxhydra.config.compose.composer import compose
from maxhydra.config.fields import walk
from maxhydra.config.registry import task_schemas
from maxhydra.config.resume import (
    FIXED_KEYS,
    FREE_KEYS,
    INPUT_KEYS,
    config_changes,
    fixed_problems,
    matches_key,
    model_changes,
    unknown_keys,
)
from maxhydra.config.schema.config import Config
from maxhydra.config.serialize import to_yaml
from maxhydra.record.redact import HIDDEN

TRAINING = ("dpo", "reward_model", "grpo", "distill")
TABLES = {"free": FREE_KEYS, "input": INPUT_KEYS, "fixed": FIXED_KEYS}


def training_keys() -> list[str]:
    schemas = [("", Config), *(("task", task_schemas()[name]) for name in TRAINING)]
    return sorted({key for path, cls in schemas for key, field in walk(cls, path) if not field.spec.is_section})


def stored(*overrides: str) -> str:
    return to_yaml(compose(list(overrides)).config)


def composed(*overrides: str) -> Config:
    return compose(list(overrides)).config


def changes(before: str, now: Config) -> dict[str, tuple[object, object]]:
    return {change.key: (change.before, change.now) for change in config_changes(before, now, hidden=HIDDEN)}


def test_every_key_of_a_training_config_is_in_one_table() -> None:
    """A new key must be added to one of the tables of maxhydra/config/resume.py."""
    found = {key: [name for name, table in TABLES.items() if matches_key(key, table)] for key in training_keys()}
    assert {key: tables for key, tables in found.items() if len(tables) != 1} == {}


@pytest.mark.slow
def test_settings_of_videos_count_only_for_models_that_took_them() -> None:
    """An option of a model may take videos since a later version."""
    still, fps = "model.vision.video_id=null", "model.vision.videos.fps=5"
    now = composed("model=qwen3-vl-tiny", fps)
    assert changes(stored("model=qwen3-vl-tiny", still), now) == {}
    assert model_changes(stored("model=qwen3-vl-tiny", still), now.model) == []
    assert changes(stored("model=qwen3-vl-tiny"), now) == {"model.vision.videos.fps": (2.0, 5.0)}


def test_every_pattern_matches_a_key() -> None:
    patterns = [pattern for table in TABLES.values() for pattern in table]
    keys = training_keys()
    assert [pattern for pattern in patterns if not any(fnmatch(key, pattern) for key in keys)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "key", "before", "now"),
    [
        ("model.kinds.layer.mlp.activation=gelu", "model.kinds.layer.mlp.activation", "silu", "gelu"),
        ("run.seed=3", "run.seed", 0, 3),
        ("model.dtypes.weights=bfloat16", "model.dtypes.weights", "float32", "bfloat16"),
        ("data=synthetic", "data.source", "demo", "synthetic"),
        ("optimizer.learning_rate=1", "optimizer.learning_rate", 0.003, 1.0),
        ("train.seq_len=16", "train.seq_len", 64, 16),
    ],
)
def test_a_changed_key_is_rejected_with_both_values(override: str, key: str, before: object, now: object) -> None:
    base = ["model=micro", "train.seq_len=64"]
    found = config_changes(stored(*base), composed(*base, override), hidden=HIDDEN)
    assert {change.key: (change.before, change.now) for change in found}[key] == (before, now)
    (problem,) = (problem for problem in fixed_problems(found, []) if problem.path == key)
    assert str(before) in problem.reason and str(problem.value) == str(now)
    assert f"run.accept_changed_config=[{key}]" in problem.hint
    assert not [problem for problem in fixed_problems(found, [key]) if problem.path == key]
    assert not list(fixed_problems(found, ["model", "run", "data", "optimizer", "train"]))


def test_free_keys_may_change() -> None:
    free = [
        "train.steps=9",
        "train.log_every=3",
        "mesh.fsdp=2",
        "run.notes=x",
        "checkpoint.every=5",
        "tracker.backends=[tensorboard]",
    ]
    found = config_changes(stored(), composed(*free), hidden=HIDDEN)
    keys = {override.partition("=")[0] for override in free}
    assert {change.key for change in found} == {*keys, "optimizer.schedule.warmup_steps"}, (
        "which has train.steps as limit"
    )
    assert not list(fixed_problems(found, []))


def test_entries_of_mappings() -> None:
    mixture = "+data.sources={a: {source: synthetic}, b: {source: arithmetic}}"
    one = "+data.sources={a: {source: synthetic, digits: 3}}"
    found = changes(stored("data=mixture", mixture), composed("data=mixture", one))
    assert found.keys() == {"data.sources.a.digits", "data.sources.b"} and found["data.sources.b"][1] is None


def test_a_key_that_an_older_version_did_not_store_has_its_default() -> None:
    older = "\n".join(line for line in stored().splitlines() if "fingerprint" not in line and "seed:" not in line)
    assert changes(older, composed()) == {}
    assert changes(older, composed("run.seed=4")) == {"run.seed": (0, 4)}


def test_renamed_keys_and_hidden_values_are_no_changes() -> None:
    config = composed("data=arithmetic", "tracker=wandb", "tracker.project=abc")
    before = to_yaml(config)
    assert changes(before.replace("record_type:", "shape:"), config) == {}
    assert changes(before.replace("project: abc", f"project: '{HIDDEN}'"), config) == {}


@pytest.mark.slow
def test_another_task() -> None:
    assert "task.name" in changes(stored("task=dpo"), composed("task=grpo"))
    assert changes(stored("task=dpo"), composed("task=dpo", "task.beta=0.5")) == {"task.beta": (0.1, 0.5)}


def test_changes_of_the_model_alone() -> None:
    found = model_changes(stored("model=micro"), composed("model=micro", "model.norm_eps=1e-3", "run.seed=1").model)
    assert [change.key for change in found] == ["model.norm_eps"]


def test_unknown_keys_are_rejected() -> None:
    config = compose(["task=dpo"]).config
    assert not list(unknown_keys(["model.kinds.layer.mlp", "task.beta", "run.seed", "data.sources.x.path"], config))
    (problem,) = unknown_keys(["model.normeps"], config)
    assert problem.value == "model.normeps" and "model.norm_eps" in problem.hint
