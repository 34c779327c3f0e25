"""Objects of the user: found by path, with options that are merged, validated, stored and compared like ours."""

import subprocess
import sys
from pathlib import Path

import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import Composer, compose, find_composer
from maxhydra.config.declare import Options
from maxhydra.config.option_types import option_types, plug_in_fields, used_objects
from maxhydra.config.resume import config_changes, fixed_problems, unknown_keys
from maxhydra.config.serialize import from_yaml, to_yaml, with_overrides
from maxhydra.layers import DenseCacheSpec
from maxhydra.model import build

OBJECTS = "tests.support.plug_ins"
SOURCE = f"data.source={OBJECTS}:counting"
MIXTURE = f"+data.sources={{a: {{source: '{OBJECTS}:counting', options: {{records: 9}}}}, b: {{source: synthetic}}}}"
ROOT = Path(__file__).parents[2]


def problems_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(list(overrides))
    return str(caught.value)


def test_options_have_the_defaults_and_types_of_the_object() -> None:
    options = compose([SOURCE, "data.options.records=7"]).config.data.options
    assert vars(options) == {"records": 7, "word": "one", "step": 1}


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["data.options.record=7"], ["data.options.record=7: no such key", "did you mean 'data.options.records'?"]),
        (["data.options.records=2"], ["data.options.records=2: is out of range", "4 or more"]),
        (["data.options.records=many"], ["is not an integer"]),
        (["data.options.step=99"], ["data.options.step=99: is not under records=64"]),
    ],
)
def test_wrong_options_are_reported_like_our_own(overrides: list[str], parts: list[str]) -> None:
    message = problems_of(SOURCE, *overrides)
    assert all(part in message for part in parts), message


BAD_PATHS = {
    f"{OBJECTS}:countin": "did you mean 'counting'?",
    "nowhere.at_all:thing": "the module nowhere is not installed",
    f"{OBJECTS}:ROOT": "has no 'ROOT'",
    f"{OBJECTS}:json": "is not a function or class",
    "a b:c": "is not the path of an object",
    "text:": "is not the path of an object",
    "tests.config.test_plug_ins:wrong_annotation": "whose annotation is not a class of settings",
}
KEYS = ("data.source", "task.name", "train.loss.function", "optimizer.function")


@pytest.mark.slow
@pytest.mark.default_cases(
    *(f"{KEYS[0]}-{path}-{reason}" for path, reason in BAD_PATHS.items()),
    *(f"{key}-{OBJECTS}:countin-did you mean 'counting'?" for key in KEYS[1:]),
)
@pytest.mark.parametrize(("path", "reason"), BAD_PATHS.items())
@pytest.mark.parametrize("key", KEYS)
def test_a_bad_path_is_one_clear_problem(key: str, path: str, reason: str) -> None:
    message = problems_of(f"{key}='{path}'", *(["optimizer=function"] if "optimizer" in key else []))
    assert reason in message and message.count(key) >= 1, message
    assert "package.module:object" in message or f"{key}={path}" in message


def wrong_annotation(options: int) -> None:
    """An object whose options are not a schema class."""


def test_an_object_that_fails_to_import_names_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "cannot be imported: ZeroDivisionError" in problems_of("data.source=broken_module:x")


def test_options_of_objects_in_a_mapping_are_typed() -> None:
    config = compose(["data=mixture", MIXTURE, "+data.weights={a: 1, b: 1}"]).config
    assert config.data.sources["a"].options.records == 9 and type(config.data.sources["b"].options) is Options
    assert "data.sources.a.options.record" in problems_of("data=mixture", MIXTURE.replace("records", "record"))


def test_hydra_composes_the_same_values() -> None:
    overrides = ["data=mixture", MIXTURE, "+data.weights={a: 1, b: 1}", "optimizer=function"]
    overrides += [f"optimizer.function={OBJECTS}:scale_by_sign", "optimizer.options.decay=0.5"]
    checked = find_composer().check_overrides([*overrides, "hydra.mode=RUN"])
    assert checked.composed().config == compose(overrides).config


@pytest.mark.slow
def test_options_come_from_files_and_the_command_line_overrides_them(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "counts.yaml").write_text(f"source: {OBJECTS}:counting\noptions:\n  records: 8\n  word: two\n")
    composed = Composer(str(tmp_path)).check_overrides(["data=counts", "data.options.word=six"]).composed()
    assert vars(composed.config.data.options) == {"records": 8, "word": "six", "step": 1}
    assert composed.origin("data.options.records").endswith("counts.yaml:3")
    (tmp_path / "data" / "counts.yaml").write_text(f"source: {OBJECTS}:counting\noptions:\n  record: 8\n")
    problem = Composer(str(tmp_path)).check_overrides(["data=counts"]).problems[0]
    assert problem.path == "data.options.record" and problem.source.endswith("counts.yaml:3")


@pytest.mark.slow
def test_a_stored_config_is_read_back_and_changed() -> None:
    config = compose([SOURCE, "data.options.records=7"]).config
    assert from_yaml(to_yaml(config), is_run=True) == config
    assert with_overrides(config, ["data.options.records=8"]).data.options.records == 8


@pytest.mark.slow
def test_a_run_whose_object_is_not_installed_can_be_read_but_not_run() -> None:
    stored = to_yaml(compose([SOURCE]).config).replace("tests.support.plug_ins:counting", "gone.away:counting")
    assert type(from_yaml(stored).data.options) is Options
    with pytest.raises(ConfigError, match="the module gone is not installed"):
        from_yaml(stored, is_run=True)


def test_options_are_compared_when_a_run_resumes() -> None:
    before, now = (compose([SOURCE, f"data.options.records={records}"]).config for records in (7, 8))
    changes = config_changes(to_yaml(before), now, hidden="***")
    assert [change.key for change in changes] == ["data.options.records"]
    assert "cannot change when a run resumes" in str(next(fixed_problems(changes, [])))
    assert not list(fixed_problems(changes, ["data.options.records"]))
    assert not list(unknown_keys(["data.options.records"], now))


def test_every_key_that_names_an_object_has_options_next_to_it() -> None:
    named = {path.rpartition(".")[0] for path in plug_in_fields() if not path.endswith(".formatting")}
    assert {"data", "data.sources.*", "task", "optimizer", "tracker", "train.loss", "train.callbacks.*"} <= named
    assert {"reward.terms.*", "environment", "model.kinds.*.own_mixer", "model.kinds.*.own_feed_forward"} <= named


def test_code_of_worker_processes_is_imported_only_for_its_options() -> None:
    term = {"kind": "function", "function": "not.installed:reward"}
    assert option_types([{"reward": {"terms": {"own": term}}}]) == {}
    assert [*option_types([{"reward": {"terms": {"own": {**term, "options": {"x": 1}}}}}])] == [
        "reward.terms.own.options"
    ]
    overrides = ["task=grpo", "reward=function", f"reward.terms.own.function={OBJECTS}:near_length"]
    overrides += ["data=arithmetic", "data.record_type=prompts", "reward.terms.own.options.target=2"]
    config = compose(overrides).config
    assert config.reward.terms["own"].options.target == 2
    assert ("reward.terms.own.function", f"{OBJECTS}:near_length") in [*used_objects(config)]


def test_a_loss_needs_a_task_that_uses_it() -> None:
    message = problems_of("task=grpo", f"train.loss.function={OBJECTS}:smooth_loss")
    assert "train.loss.function" in message and "task=pretrain" in message


def test_two_trackers_of_the_user_are_rejected() -> None:
    message = problems_of(f"tracker.backends=[{OBJECTS}:FileTracker,{OBJECTS}:EventLog]")
    assert "several trackers of yours" in message


@pytest.mark.slow
def test_composing_does_not_import_jax_for_objects_without_it(tmp_path: Path) -> None:
    (tmp_path / "light.py").write_text("def source(corpus, data, spec): ...\n")
    code = "import sys, maxhydra; maxhydra.compose(['data.source=light:source']); print('jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    )
    assert done.stdout.strip() == "False", done.stderr


def test_a_mixer_without_a_cache_does_not_decode() -> None:
    function = "model.kinds.layer.own_mixer.function=tests.support.plug_ins:mean_mixer"
    model = build(compose(["model=micro", "model.kinds.layer.mixer=own_mixer", function]).config.model)
    with pytest.raises(ConfigError, match=r"own_mixer.function: has no method empty_cache"):
        model.empty_cache(DenseCacheSpec(1, 8))
