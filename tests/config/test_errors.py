"""Every problem is reported with path, value, accepted values and a hint, and all of them at once."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.errors import Problem, did_you_mean, options_shown
from maxhydra.config.schema.optimizer import LARGEST_DECAY


def problems(*overrides: str, config_dir: Path | None = None) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as error:
        compose(list(overrides), config_dir=str(config_dir) if config_dir else None)
    found = {problem.path: problem for problem in error.value.problems}
    assert len(found) == len(error.value.problems)
    return found


def test_near_names_do_not_depend_on_the_order_of_the_known_ones() -> None:
    """Such as that of a set, which differs from process to process. Several names are equally near."""
    known = [f"llama{number}-tiny" for number in range(1, 30)]
    shown = {options_shown("model", names, near="llama-tiny") for names in (known, known[::-1])}
    assert len(shown) == 1 and len({did_you_mean("llama-tiny", names) for names in (known, known[::-1])}) == 1


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "path", "said"),
    [
        ("model.num_layer=3", "model.num_layer", ["=3", "did you mean 'model.num_layers'?", "emb_dim"]),
        ("learning_rate=3", "learning_rate", ["did you mean 'optimizer.learning_rate'?"]),
        ("+modle.x=1", "modle.x", ["=1", "did you mean 'model'?", "optimizer"]),
        ("modle=tiny", "modle", ["=tiny", "did you mean 'model'?"]),
        ("model=tny", "model", ["=tny", "no such option", "accepted: tiny, ", "more: `maxhydra models`", "'tiny'?"]),
        ("optimizer/shedule=cosine", "optimizer/shedule", ["no such group", "did you mean 'optimizer/schedule'?"]),
        ("train.steps=abc", "train.steps", ["=abc", "is not an integer", "an integer, 1 or more"]),
        ("profile.steps=[3]", "profile.steps", ["is not a range of steps", "[FIRST,LAST]"]),
        ("profile.steps=[0,3]", "profile.steps", ["is not a range of steps"]),
        ("profile.steps=[5,9999]", "profile.steps", ["ends after the last step"]),
        ("profile.every=5", "profile.length", ["is not less than profile.every=5", "accepted: 1 to 4"]),
        ("train.checks=[nan,inf]", "train.checks", ["contains 'inf'", "index, nan, div"]),
        ("alerts.events=[nann]", "alerts.events", ["unknown event", "did you mean 'nan'?"]),
        ("statistics.every=0", "statistics.every", ["is out of range", "1 or more"]),
        ("profile.processes=[-1]", "profile.processes", ["contains a negative number"]),
        ("train.steps=1.5", "train.steps", ["=1.5", "is not an integer"]),
        ("train.steps=-5", "train.steps", ["=-5", "is out of range", "1 or more"]),
        ("train.steps=2147483648", "train.steps", ["is out of range", "1 or more and at most 2147483647"]),
        ("run.seed=4294967296", "run.seed", ["is out of range", "0 or more and at most 4294967295"]),
        ("train.steps=null", "train.steps", ["=null", "cannot be null"]),
        ("data.eval_fraction=1", "data.eval_fraction", ["over 0 and under 1"]),
        ("data.shuffle=maybe", "data.shuffle", ["true or false"]),
        ("optimizer.learning_rate=???", "optimizer.learning_rate", ["=???", "a value is needed", "a number, over 0"]),
        ("optimizer.kind=adam", "optimizer.kind", ["adamw, adafactor, sgd, muon, lion", "did you mean 'adamw'?"]),
        ("train.loss_chunk=48", "train.loss_chunk", ["does not divide seq_len=128", "1, 2, 4, 8, 16, 32, 64"]),
        ("data.source=dmo", "data.source", ["demo", "did you mean 'demo'?"]),
        ("tracker.backends=[wandb,tensorbord]", "tracker.backends", ["the item tensorbord", "tensorboard"]),
        ("optimizer.no_decay=norm", "optimizer.no_decay", ["is not a list"]),
        ("train=3", "train", ["is a section", "seq_len"]),
        ("task.devices=8", "task.devices", ["task=inspect, plan have this key"]),
        ("optimizer.b1=0.9,0.8", "optimizer.b1", ["several values for a single run", "add -m"]),
        ("experiment=null", "experiment", ["remove the group with ~experiment"]),
        ("+optimizer.b1=0.8", "optimizer.b1", ["already exists", "drop the plus sign: optimizer.b1=0.8"]),
        ("+model=tiny", "model", ["is chosen twice"]),
        ("~optimizer.b1", "optimizer.b1", ["cannot be deleted"]),
        ("mesh.rules.embd=[fsdp]", "mesh.rules.embd", ["has no 'embd'", "did you mean 'embed'?"]),
        ("mesh.rules.new=[fsdp]", "mesh.rules.new", ["+mesh.rules.new=... "[:-1]]),
        ("model.kinds.layer.mla.indexer_of=layer", "model.kinds.layer.mla.indexer_of", ["have an indexer"]),
        ("+model.kinds.new.attention.window=4", "model.kinds.new.attention.window", ["+model.kinds={new:{"]),
        ("model.pattern.5=layer", "model.pattern.5", ["has 1 items"]),
        ("run.name=a(b", "run.name", ["=a(b", "cannot be parsed", "quote a value"]),
        ("hello", "hello", ["is not an override", "key=value"]),
        ("run.notes=${run.nam}", "run.notes", ["${run.nam}", "'run.nam' not found"]),
        ("train.log_every=${run.outputs}", "train.log_every", ["an integer, 1 or more"]),
        ("optimizer.learning_rate=inf", "optimizer.learning_rate", ["=inf: is not finite", "a number, over 0"]),
        ("optimizer.weight_decay=nan", "optimizer.weight_decay", ["=nan: is not finite"]),
        ("hydra.nonsense=1", "hydra.nonsense", ["nonsense"]),
        ("hydra/launcher=nonsense", "hydra/launcher", ["no such option", "basic"]),
    ],
)
def test_one_mistake(override: str, path: str, said: list[str]) -> None:
    found = problems(override)
    assert list(found) == [path]
    for text in said:
        assert text in str(found[path])


def test_check_between_fields() -> None:
    found = problems("model.num_heads=6", "model.num_kv_heads=4")
    text = str(found["model.num_kv_heads"])
    assert "model.num_kv_heads=4" in text and "num_heads=6" in text
    assert "accepted: 1, 2, 3, 6" in text and "the command line" in text


BFLOAT16 = "model.dtypes.weights=bfloat16"


@pytest.mark.parametrize(
    ("given", "path", "way_out"),
    [
        ([BFLOAT16, "optimizer.b2=0.999"], "optimizer.b2", "model.dtypes.weights=float32"),
        ([BFLOAT16, "optimizer=lion", "optimizer.b2=0.999"], "optimizer.b2", "optimizer.mu_dtype=float32"),
        (["optimizer.mu_dtype=bfloat16", "optimizer.b1=0.999"], "optimizer.b1", "optimizer.mu_dtype=float32"),
        ([BFLOAT16, "optimizer=sgd", "optimizer.momentum=0.999"], "optimizer.momentum", "optimizer.mu_dtype=float32"),
        ([BFLOAT16, "optimizer.b2=0.995"], None, ""),
        (["optimizer.b2=0.999"], None, ""),
        ([BFLOAT16, "adapter=lora", "optimizer.b2=0.999"], None, ""),
        ([BFLOAT16, "optimizer=lion", "optimizer.b1=0.999"], None, ""),
        ([BFLOAT16, "optimizer.mu_dtype=float32", "optimizer.b1=0.999"], None, ""),
    ],
)
def test_a_decay_that_bfloat16_moments_cannot_represent(given: list[str], path: str | None, way_out: str) -> None:
    if path is None:
        compose(given)
        return
    found = problems(*given)
    assert list(found) == [path]
    assert "at most 0.995" in str(found[path]) and way_out in str(found[path])


def test_small_updates_round_to_zero_in_bfloat16() -> None:
    numbers = np.arange(128, 256).astype(jnp.bfloat16)
    assert not np.any((numbers * np.float32(0.999)).astype(jnp.bfloat16) < numbers)
    assert np.all((numbers * np.float32(LARGEST_DECAY)).astype(jnp.bfloat16) < numbers)


def test_dataset_path_that_does_not_exist() -> None:
    text = str(problems("data=text", "data.path=/nope")["data.path"])
    assert "data.path=/nope: no such file" in text and "accepted: a file" in text


def test_all_mistakes_at_once() -> None:
    """Also a check of a section whose own values are sound, while others are not."""
    found = problems(
        "train.steps=-5",
        "model=tny",
        "optimizer.learning_rat=1",
        "+nonsense=1",
        "data=text",
        "data.path=/nope",
        "run.seed=x",
        "checkpoint.mode=never",
        "x(=",
    )
    expected = {
        "train.steps",
        "model",
        "optimizer.learning_rat",
        "nonsense",
        "data.path",
        "run.seed",
        "checkpoint.mode",
    }
    assert set(found) == {*expected, "x("}


def test_unknown_key_does_not_hide_the_checks_of_its_section() -> None:
    found = problems("model.num_layer=3", "model.num_heads=6", "model.num_kv_heads=4")
    assert set(found) == {"model.num_layer", "model.num_kv_heads"}


def test_wrong_option_is_the_only_problem_of_its_section() -> None:
    """Values for an option that does not exist are not validated against the default option."""
    assert set(problems("model=tny", "model.num_heads=7", "task=inspct", "task.devices=4")) == {"model", "task"}


def test_wrong_overlay_says_nothing_about_values_it_may_set() -> None:
    assert set(problems("experiment=shakespear", "train.steps=0")) == {"experiment", "train.steps"}


def test_yaml_typos_name_file_and_line(tmp_path: Path) -> None:
    text = """\
# @package _global_
# An experiment with mistakes.
train:
  steps: many
  seq_length: 32
optimizer:
  schedule: {warmup_stps: 3}
checkpoint:
  mode: off
run.name: dotted
tracker:
data:
  eval_fraction: ???
"""
    folder = write(tmp_path, "experiment/typos", text)
    found = problems("experiment=typos", config_dir=folder)
    lines = {path: problem.source.rpartition(":")[2] for path, problem in found.items()}
    assert lines == {
        "train.steps": "4",
        "train.seq_length": "5",
        "optimizer.schedule.warmup_stps": "7",
        "checkpoint.mode": "9",
        "run.name": "10",
        "tracker": "11",
        "data.eval_fraction": "13",
    }
    assert all("experiment/typos.yaml" in problem.source for problem in found.values())
    assert "did you mean 'train.seq_len'?" in str(found["train.seq_length"])
    assert "quotes" in found["checkpoint.mode"].hint


def test_an_invalid_value_in_yaml_is_reported_with_its_line(tmp_path: Path) -> None:
    folder = write(tmp_path, "experiment/heads", "# @package _global_\nmodel:\n  num_heads: 6\n  num_kv_heads: 4\n")
    assert problems("experiment=heads", config_dir=folder)["model.num_kv_heads"].source.endswith("heads.yaml:4")


def test_overlay_without_package_line(tmp_path: Path) -> None:
    folder = write(tmp_path, "experiment/plain", "train:\n  steps: 5\n")
    assert "# @package _global_" in problems("experiment=plain", config_dir=folder)["experiment"].hint


def test_wrong_option_in_a_defaults_list(tmp_path: Path) -> None:
    folder = write(tmp_path, "experiment/choice", "# @package _global_\ndefaults:\n  - override /model: tny\n")
    problem = problems("experiment=choice", config_dir=folder)["model"]
    assert problem.value == "tny" and "tiny" in problem.accepted and problem.source.endswith("choice.yaml:3")


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("train:\n  steps: [\n", "3", "is not YAML"),
        ("train:\n  steps: 1\n  steps: 2\n", "3", "duplicate key steps"),
    ],
)
def test_malformed_yaml(tmp_path: Path, text: str, line: str, reason: str) -> None:
    folder = write(tmp_path, "data/broken", text)
    ((path, problem),) = problems("data=broken", config_dir=folder).items()
    assert path.endswith(f"data/broken.yaml:{line}") and reason in problem.reason


def test_list_instead_of_keys(tmp_path: Path) -> None:
    ((path, _),) = problems("data=listed", config_dir=write(tmp_path, "data/listed", "- a\n- b\n")).items()
    assert path.endswith("data/listed.yaml")


def test_folder_of_options_that_does_not_exist() -> None:
    assert "no such folder" in str(problems(config_dir=Path("/nope"))["--config-dir"])


@pytest.mark.slow
def test_a_required_value_may_be_set_by_a_later_layer(tmp_path: Path) -> None:
    folder = write(tmp_path, "experiment/asks", "# @package _global_\ntrain:\n  steps: ???\n")
    assert compose(["experiment=asks", "train.steps=77"], config_dir=str(folder)).config.train.steps == 77
    assert "a value is needed" in str(problems("experiment=asks", config_dir=folder)["train.steps"])
