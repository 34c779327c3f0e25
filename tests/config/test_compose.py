"""Composition agrees with Hydra's own, every option composes, origins are right, and YAML round trips."""

import dataclasses
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.types import RunMode
from omegaconf import OmegaConf

import maxhydra.convert  # noqa: F401  registers model=from_hf
from maxhydra.config import Config, ConfigError
from maxhydra.config.compose.composer import CONFIG_NAME, Composed, Composer, compose, register
from maxhydra.config.compose.hydra_loader import LONGEST, PACKAGED, job_folder
from maxhydra.config.compose.overrides import parse
from maxhydra.config.compose.validate import instantiate
from maxhydra.config.errors import quoted, unquoted
from maxhydra.config.fields import walk
from maxhydra.config.options import model_option, model_options
from maxhydra.config.registry import CONF, description, groups, is_overlay
from maxhydra.config.schema.tasks.analysis import Format, InspectTask
from maxhydra.config.serialize import from_yaml, to_yaml
from tests.support.sampled_cases import sample_cases

OPTIONS = [(group, path.stem) for group, paths in groups().items() for path in paths]
# Models that are composed in every way; the others differ only in sizes.
MODELS = sample_cases(list(model_options()), 12)


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


def by_hydra(overrides: list[str]) -> Config:
    """The reference: Hydra's public API and OmegaConf's own instantiation."""
    register()
    with hydra.initialize_config_module(PACKAGED, version_base="1.3"):
        node = hydra.compose(CONFIG_NAME, overrides)
    config = OmegaConf.to_object(node)
    assert isinstance(config, Config)
    return config


def check_against_hydra(composer: Composer, overrides: list[str]) -> Composed:
    """Compose, and compare with Hydra's merge of all files, its own section included, and with the merge alone."""
    composed = composer.check_overrides(overrides).composed()
    reference = composer.loader.load_configuration(composer.config_name, overrides, RunMode.RUN)
    assert OmegaConf.to_yaml(composed.node) == OmegaConf.to_yaml(reference)
    assert composed.config == instantiate(reference)
    assert composed.config == composer.check_overrides(overrides, with_hydra=False).composed().config
    return composed


# Values that an option requires and does not set.
NEEDS = {
    ("data", "grain"): ["data.path=."],
    ("data", "shapes"): ["model=micro-vision"],
    ("data", "tones"): ["model=micro-audio"],
    ("data", "hf"): ["data.name=someone/dataset"],
    ("data", "mixture"): ["+data.sources={one: {source: demo}}"],
    ("data", "olmo"): ["data.path=pyproject.toml"],
    ("data", "tfds"): ["data.name=c4/en"],
    ("data", "reasoning_gym"): ["data.name=chain_sum"],
    ("model", "from_hf"): [f"model.path={Path(__file__).parents[1] / 'parity' / 'golden' / 'llama'}"],
    ("model", "from_hf_vision"): [f"model.path={Path(__file__).parent / 'gemma3_vision'}"],
    ("model", "from_hf_audio"): [f"model.path={Path(__file__).parent / 'omni_audio'}"],
    ("model", "from_hf_media"): [f"model.path={Path(__file__).parent / 'omni_media'}"],
    ("model", "from_hf_speech"): [f"model.path={Path(__file__).parent / 'omni_speech'}"],
    ("environment", "openenv"): ["environment.url=http://localhost:8000"],
    ("environment", "verifiers"): ["environment.function=math:sqrt"],
    ("optimizer/schedule", "wsd_s"): ["optimizer.schedule.restarts=[150]", "optimizer.schedule.decay_steps=50"],
    ("task", "eval"): ["task.tasks=[arithmetic]"],
    ("environment", "function"): ["environment.function=math:sqrt"],
    ("optimizer", "function"): ["optimizer.function=math:sqrt"],
    ("reward", "function"): ["reward.terms.own.function=math:sqrt"],
    ("reward", "judge"): ["reward.terms.judge.judge.url=http://localhost/v1", "reward.terms.judge.judge.model=name"],
    ("reward", "model"): ["reward.terms.model.weights=outputs/name"],
    ("task", "reward_model"): ["model.head=score"],
    ("reward", "length"): ["reward.terms.length.target=100"],
    ("task", "convert"): ["task.output=folder"],
    ("task", "score"): ["task.input=ids.npz", "task.output=scores.npz"],
    ("task", "teacher_logits"): ["task.output=logits"],
    ("task", "tokenize"): ["task.output=tokens"],
    ("experiment", "llama3.2-1b_continue"): ["data.sources.domain.path=.", "data.sources.general.path=."],
}
GRAIN = ("llama3.1-8b_dpo", "llama3.1-8b_lora", "llama3.2-1b_distill", "llama3.2-1b_pretrain")
NEEDS |= {("experiment", name): ["data.path=."] for name in GRAIN}
# Groups that are not in the defaults list.
ADDED = ("sweep",)


def choose(group: str, option: str, text: Path) -> list[str]:
    """An option alone, with the path that `data=text` cannot do without."""
    raw = (CONF / group / f"{option}.yaml").read_text()
    needs_text = (group, option) == ("data", "text") or "override /data: text" in raw
    chosen = f"+{group}={option}" if group in ADDED else f"{group}={option}"
    return [chosen, *NEEDS.get((group, option), []), *([f"data.path={text}"] if needs_text else [])]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text("to be or not to be\n")
    return path


# Groups whose options set different sections, so that Hydra can compose one option of each at a time.
INDEPENDENT = (
    *("mesh", "data", "optimizer", "optimizer/schedule", "quantization"),
    *("hardware", "checkpoint", "tracker", "reward", "environment"),
)
COMPOSED = [each for each in OPTIONS if each[0] not in INDEPENDENT]
OTHERS = [each for each in COMPOSED if each[0] != "model"]
SAMPLED_MODELS = [each for each in COMPOSED if each[0] == "model" and each[1] in MODELS]


@pytest.mark.slow
# tests/model/test_model_sizes.py reads every model option.
@pytest.mark.default_cases(*("-".join(each) for each in [*SAMPLED_MODELS[::2], *OTHERS[::2]]))
@pytest.mark.parametrize(("group", "option"), COMPOSED, ids=str)
def test_every_option_composes(group: str, option: str, text: Path, composer: Composer) -> None:
    overrides = choose(group, option, text)
    composed = composer.check_overrides(overrides, with_hydra=False).composed()
    assert composed.choices[group] == option
    if group == "model" and option in MODELS:
        assert composed.config.model == model_option(option), "the same without a run around it"


COMPARED = [(group, option) for group, option in COMPOSED if group != "model" or option in MODELS]


@pytest.mark.slow
@pytest.mark.default_cases(*("-".join(each) for each in COMPARED[::40]))
@pytest.mark.parametrize(("group", "option"), COMPARED, ids=str)
def test_every_option_composes_as_in_hydra(group: str, option: str, text: Path, composer: Composer) -> None:
    config = check_against_hydra(composer, choose(group, option, text)).config
    assert from_yaml(to_yaml(config)) == config


OPTIONS_OF = {group: [path.stem for path in groups()[group]] for group in INDEPENDENT}


@pytest.mark.slow
@pytest.mark.default_cases("1")
@pytest.mark.parametrize("number", range(max(map(len, OPTIONS_OF.values()))))
def test_independent_options_compose_as_in_hydra(number: int, text: Path, composer: Composer) -> None:
    chosen = {group: options[number % len(options)] for group, options in OPTIONS_OF.items()}
    overrides = [override for group, option in chosen.items() for override in choose(group, option, text)]
    # A task that accepts the keys of all others.
    overrides.append("task=inspect")
    composed = check_against_hydra(composer, overrides)
    assert composed.choices.items() >= chosen.items()
    assert from_yaml(to_yaml(composed.config)) == composed.config


def test_every_option_has_a_description() -> None:
    for group, option in OPTIONS:
        path = CONF / group / f"{option}.yaml"
        assert path.read_text().startswith("#") and description(path), path
        assert is_overlay(path) == (group in ("experiment", "debug", "recipe", "local", "sweep")), path


@pytest.mark.slow
@pytest.mark.default_cases("model.pattern.0=other", "run.notes=steps ${train.steps}")
@pytest.mark.parametrize(
    "overrides",
    [
        ["train.steps=77", "optimizer.b1=null", "optimizer=sgd"],
        ["model.pattern.0=other", "+model.kinds={other:{attention:{window:8}}}"],
        ["~mesh.rules.embed", "mesh.rules={vocab:[fsdp,tensor]}"],
        ["~mesh.rules.embed", "+mesh.rules.embed=[fsdp]"],
        ["run.notes=steps ${train.steps}", "train.seq_len=${train.steps}", "train.steps=64"],
        [
            "++optimizer.weight_decay=0",
            "run.tags=[a,b]",
            "run.name='1'",
            "hardware=cpu",
            "hardware.simulated_devices=4",
        ],
        ["task=inspect", "task.devices=8", "task.format=json", "debug=one_step", "experiment=shakespeare"],
        ["model.remat={policy:custom,save:[query]}", "model.dtypes.compute=float32", "+hardware.peak_tflops.int8=1"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_overrides_compose_as_in_hydra(overrides: list[str], composer: Composer) -> None:
    config = check_against_hydra(composer, overrides).config
    assert config == by_hydra(overrides)
    assert from_yaml(to_yaml(config)) == config


# Files that Hydra has to merge: values before the schema, an interpolation in place of a section, a number as a key.
MERGED_BY_HYDRA = {
    "late": "defaults: [_self_, config]\ntrain: {steps: 3}",
    "section": "defaults: [config, _self_]\ntrain: {sample: '${train.sample}'}",
    "number": "defaults: [config, _self_]\nmesh: {rules: {1: [fsdp]}}",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MERGED_BY_HYDRA)
def test_files_that_hydra_merges_differently(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.yaml").write_text(MERGED_BY_HYDRA[name])
    checked = Composer(str(tmp_path), name).check_overrides([])
    assert not checked.merge.is_exact


@pytest.mark.slow
def test_option_files_set_the_section_of_hydra(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ntrain: {steps: 3}\nhydra: {job: {env_set: {NAME: value}}, sweeper: {params: {a: 1}}}"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    node = check_against_hydra(Composer(str(tmp_path)), ["experiment=mine", "hydra/launcher=local"]).node
    assert (node.train.steps, node.hydra.job.env_set, node.hydra.sweeper.params) == (3, {"NAME": "value"}, {"a": "1"})


@pytest.mark.slow
def test_task_has_its_own_fields() -> None:
    config = compose(["task=inspect", "task.devices=8", "task.format=json"]).config
    assert config.task == InspectTask(name="inspect", devices=8, slices=1, format=Format.json)
    assert type(from_yaml(to_yaml(config)).task) is InspectTask


def test_config_is_final() -> None:
    config = compose([]).config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.steps = 3


@pytest.mark.slow
def test_recipe_stays_with_its_model(tmp_path: Path) -> None:
    """The values of the tiny default must not follow to another model, nor overrule an option's own."""
    tiny = compose([]).config
    assert (tiny.train.steps, tiny.train.seq_len, tiny.optimizer.learning_rate) == (300, 128, 3e-3)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "derived.yaml").write_text("defaults: [tiny]\ncontext_length: 4096\n")
    derived = compose(["model=derived"], config_dir=str(tmp_path)).config
    assert (derived.train.steps, derived.model.context_length) == (300, 4096), "a derived model keeps the recipe"
    (tmp_path / "model" / "other.yaml").write_text("defaults: [llama2-tiny]\ncontext_length: 4096\n")
    other = compose(["model=other"], config_dir=str(tmp_path))
    general = Config().train
    assert (other.config.train.steps, other.config.train.seq_len) == (general.steps, general.seq_len)
    assert other.config.optimizer.learning_rate == 3e-4 and "recipe" not in other.choices
    again = compose(["model=other", "recipe=tiny"], config_dir=str(tmp_path))
    assert again.config.train.steps == 300 and again.choices["recipe"] == "tiny"
    assert compose(["optimizer=sgd"]).config.optimizer.learning_rate == 0.1


def test_short_run_needs_no_other_change() -> None:
    assert compose(["train.steps=5"]).config.optimizer.schedule.warmup_steps == 5
    assert compose([]).config.optimizer.schedule.warmup_steps == 20


def test_origins(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrain:\n  steps: 50\n  seq_len: 64\n")
    composed = compose(["experiment=mine", "train.steps=60", "run.tags=[a]"], config_dir=str(tmp_path))
    assert composed.origin("train.steps") == "the command line"
    assert composed.origin("run.tags.0") == "the command line"
    assert composed.origin("train.seq_len").endswith("experiment/mine.yaml:4")
    assert composed.origin("model.num_layers").partition(":")[0].endswith("conf/model/tiny.yaml")
    assert composed.origin("train.z_loss") == "the schema's default"


def test_every_origin_holds_the_value(composer: Composer) -> None:
    """The line that is named sets the key that is asked for; what no line sets has the schema's default."""
    composed = composer.check_overrides(["experiment=shakespeare"]).composed()
    for path, field in walk(Config):
        if field.spec.is_section or "*" in path:
            continue
        file, _, line = composed.origin(path).rpartition(":")
        value: Any = composed.config
        for name in path.split("."):
            value = getattr(value, name)
        if file:
            assert Path(file).read_text().splitlines()[int(line) - 1].strip().startswith(f"{field.name}:")
        else:
            assert value == field.default


@pytest.mark.slow
def test_from_yaml_checks() -> None:
    lines = to_yaml(compose([]).config).replace("num_layers:", "num_layer:").replace("seed: 0", "seed: -1")
    with pytest.raises(ConfigError) as error:
        from_yaml(lines, source="outputs/x/config.yaml")
    found = {problem.path: problem.source.partition(":")[0] for problem in error.value.problems}
    assert found["model.num_layer"] == found["run.seed"] == "outputs/x/config.yaml"
    assert "model.num_layers" in found


def test_folder_of_options(tmp_path: Path) -> None:
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "mine.yaml").write_text("defaults: [adamw]\nb2: 0.99\n")
    composed = compose(["optimizer=mine"], config_dir=str(tmp_path))
    assert (composed.config.optimizer.b1, composed.config.optimizer.b2) == (0.9, 0.99)
    assert composed.origin("optimizer.b2").endswith("optimizer/mine.yaml:2")


def test_a_defaults_list_can_refer_to_a_choice(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ndefaults: [{/extra: '${experiment}'}]\n")
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "mine.yaml").write_text("# @package _global_\ntrain:\n  steps: 7\n")
    assert compose(["experiment=mine"], config_dir=str(tmp_path)).config.train.steps == 7


@pytest.mark.parametrize(
    "text",
    ["..", "outputs", "/a/b-c_d.e", "null", "True", "1e3", "", "a=1,b", "a b", "it's", "a\\", "a\\'b", "~/x", "${x}"],
)
def test_quoted_text_is_one_value_for_hydra(text: str) -> None:
    (override,) = parse([f"run.outputs={quoted(text)}"], loader=None).overrides
    assert override.value() == text and not override.is_sweep_override() and unquoted(quoted(text)) == text


def test_job_folder() -> None:
    overrides = ["optimizer.learning_rate=0.01", "run.notes=a b", "data.path=/some/where", "+optimizer/schedule=wsd"]
    assert job_folder(3, overrides, ["run.notes"]) == "3_learning_rate=0.01,path=_some_where,schedule=wsd"
    assert job_folder(0, overrides, [line.lstrip("+").partition("=")[0] for line in overrides]) == "0"
    assert job_folder(1, ["a.x=1", "b.x=2"], []) == "1_a.x=1,b.x=2"
    assert job_folder(0, ["rate=0.004430375245218269", "n=0.30000000000000004"], []) == "0_rate=0.00443,n=0.3"
    assert job_folder(0, ["rate=-1.2345678e-05", "seed=12345678"], []) == "0_rate=-1.23e-05,seed=12345678"
    long = [job_folder(7, [f"run.notes={'x' * 300}{end}"], []) for end in "ab"]
    assert all(len(name) <= LONGEST for name in long) and long[0] != long[1]


def test_a_local_overlay_is_used_if_it_exists(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "default.yaml").write_text("# @package _global_\nrun:\n  outputs: /scratch\n")
    composed = compose(["run.name=x"], config_dir=str(tmp_path))
    assert composed.config.run.outputs == "/scratch" and composed.choices["local"] == "default"
