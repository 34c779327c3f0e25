"""Stored configs contain no secrets, and resume with the same values."""

from collections.abc import Iterator

import pytest
from omegaconf import OmegaConf

from maxhydra.config import ConfigError, Problem
from maxhydra.config.compose.composer import Composer, compose
from maxhydra.config.resume import config_changes
from maxhydra.config.serialize import from_yaml, stored_secrets, to_job_yaml, to_stored_yaml, to_yaml
from maxhydra.launch.gke.settings import GkeSettings
from maxhydra.launch.slurm.settings import SlurmSettings
from maxhydra.record.redact import HIDDEN

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz012345"
HEX = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.slow
def test_values_of_variables_are_stored_as_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2-xyz")
    overrides = ["run.notes=with ${oc.env:SECRET}", "run.tags=['${oc.env:SECRET}',b]", "tracker.project=${run.notes}"]
    monkeypatch.setenv("FOLDER", "baseline-3")
    config = compose(
        ["tracker=wandb", *overrides, "run.name=${oc.env:FOLDER}", "tracker.entity=${oc.env:FOLDER}"]
    ).config
    assert config.run.notes == config.tracker.project == "with hunter2-xyz"
    text = to_stored_yaml(config)
    assert "notes: with ${oc.env:SECRET}" in text and "project: ${run.notes}" in text and "- ${oc.env:SECRET}" in text
    assert "hunter2" not in text and "entity: ${oc.env:FOLDER}" in text
    # The name of the folder is visible anyway.
    assert "name: baseline-3" in text
    assert from_yaml(text) == from_yaml(text, is_run=True) == config
    assert to_job_yaml(config) == text

    monkeypatch.delenv("SECRET")
    assert from_yaml(text).run.notes == "with ${oc.env:SECRET}"
    with pytest.raises(ConfigError, match="Environment variable 'SECRET' not found"):
        from_yaml(text, is_run=True)


@pytest.mark.slow
def test_secrets_on_the_command_line_are_hidden_and_needed_again() -> None:
    url = "data.path='ftp://me:pw@host/x.jsonl'"
    config = compose(["tracker=wandb", "data=grain", url, f"run.notes={TOKEN}", f"tracker.entity={HEX}"]).config
    text = to_stored_yaml(config)
    assert set(stored_secrets(config)) == {"data.path", "tracker.entity", "run.notes"}
    assert not any(secret in text for secret in (TOKEN, "me:pw", HEX))
    assert from_yaml(text).run.notes == "***"
    with pytest.raises(ConfigError) as caught:
        from_yaml(text, is_run=True)
    assert {problem.path for problem in caught.value.problems} == set(stored_secrets(config))
    with pytest.raises(ConfigError, match=r"run.notes.*looks like a secret(.|\n)*run.notes='\$\{oc.env:NAME\}'"):
        to_job_yaml(config)


@pytest.mark.slow
@pytest.mark.default_cases("overrides1", "overrides2")
@pytest.mark.parametrize(
    "overrides",
    [[], ["task=grpo", "model=deepseek3-tiny"], ["adapter=lora", "run.tags=[a,'1','1e-3',y,'0x1F','a: b']"]],
)
def test_yaml_is_that_of_omegaconf(overrides: list[str]) -> None:
    config = Composer().check_overrides(overrides, with_hydra=False).composed().config
    assert to_yaml(config) == OmegaConf.to_yaml(OmegaConf.structured(config))


@pytest.mark.parametrize("text", ["a\x1b[2J", "a\x07", "a\u202eb"])
def test_tags_and_notes_with_control_characters_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([f"run.tags=['{text}']", f"run.notes='{text}'"])
    assert {problem.path for problem in caught.value.problems} == {"run.tags", "run.notes"}
    assert text not in str(caught.value)


def pod_problems(env: dict[str, str]) -> Iterator[Problem]:
    settings = GkeSettings(image="example.com/a/b:1", outputs="gs://bucket/folder", env=env)
    return (problem for problem in settings.problems() if ".env" in problem.path)


@pytest.mark.parametrize(("name", "value"), [("MYVAR", TOKEN), ("HF_TOKEN", "x"), ("X", HEX), ("URL", "http://a:b@c/")])
def test_secrets_in_the_environment_of_pods_are_rejected(name: str, value: str) -> None:
    paths = [problem.path for problem in pod_problems({name: value})]
    assert paths == [f"hydra.launcher.env.{name}"]
    assert not list(pod_problems({"GIT_SHA": HEX, "MODE": "fast"}))


def test_secrets_in_batch_scripts_are_rejected() -> None:
    (problem,) = SlurmSettings(setup=(f"export WANDB_API_KEY={HEX}", "export HF_TOKEN=$(cat ~/.hf)")).problems()
    assert problem.path == "hydra.launcher.setup" and HEX not in str(problem)


def test_a_resume_compares_references_and_hidden_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2-xyz")
    config = compose(["tracker=wandb", "tracker.project=${oc.env:SECRET}", f"run.notes={TOKEN}", "run.seed=1"]).config
    text = to_stored_yaml(config)
    assert not config_changes(text, config, hidden=HIDDEN)
    (change,) = config_changes(text.replace("seed: 1", "seed: 2"), config, hidden=HIDDEN)
    assert change.key == "run.seed"
