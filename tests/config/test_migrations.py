"""Renamed keys: errors name the new key, and stored configs and overrides are converted."""

import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.migrations import migrate_config, migrate_key, migrate_overrides, original_names
from maxhydra.config.schema.hardware import RULES
from maxhydra.config.serialize import from_yaml, to_yaml


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("data.shape=chat", "data.shape was renamed to data.record_type"),
        ("+data.sources={a: {source: demo, shape: text}}", "data.sources.a.shape was renamed to"),
        ("quantization.besides.x.kind=int8", "was renamed to quantization.overrides.x.kind"),
        ("model.kernels.rotated_heads=xla", "was renamed to model.kernels.qkv_rope"),
        ("task=tokenizer", "task=tokenizer was renamed to task=train_tokenizer"),
    ],
)
def test_an_old_name_is_an_error_that_gives_the_new_one(override: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=r"no such (key|option)") as caught:
        compose([override])
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("data.shape=chat", "data.record_type=chat"),
        ("~data.shape", "~data.record_type"),
        ("task=tokenizer", "task=train_tokenizer"),
        ("task=tokenize", "task=tokenize"),
        ("data.tokenizer.kind=hf", "data.tokenizer.kind=hf"),
        ("+data.sources={a: {shape: x}, b: {path: 'a{,b'}}", "+data.sources={a: {record_type: x}, b: {path: 'a{,b'}}"),
        ("+quantization.besides={a:{targets:[mlp/]}}", "+quantization.overrides={a:{targets:[mlp/]}}"),
        ("run.notes=data.shape", "run.notes=data.shape"),
    ],
)
def test_overrides(old: str, new: str) -> None:
    assert migrate_overrides([old]) == [new]


def test_plain_values_keep_everything_else() -> None:
    old = {"data": {"shape": "chat", "sources": {"a": {"shape": "text"}}}, "quantization": {"besides": {}}, "n": [1]}
    new = migrate_config(old)
    assert new["data"] == {"record_type": "chat", "sources": {"a": {"record_type": "text"}}}
    assert new["quantization"] == {"overrides": {}} and new["n"] == [1]
    assert original_names(new) == old
    assert migrate_config({"besides": {}}, "quantization") == {"overrides": {}}
    assert migrate_config({"task": "tokenizer", "model": "tiny"}) == {"task": "train_tokenizer", "model": "tiny"}
    assert migrate_key("data.shape") == "data.record_type" and migrate_key("shape") == "shape"


@pytest.mark.slow
def test_a_stored_config_is_read_under_its_current_names() -> None:
    config = compose(["data=arithmetic"]).config
    text = to_yaml(config)
    assert from_yaml(text.replace("record_type:", "shape:").replace("qkv_rope:", "rotated_heads:")) == config


def test_default_rules_of_older_configs_get_the_new_mesh_axes() -> None:
    old = {name: [axis for axis in axes if axis not in ("replica", "stage")] for name, axes in RULES.items()}
    for name in ("act_stream_length", "replicas"):
        del old[name]
    assert migrate_config({"mesh": {"rules": old}})["mesh"]["rules"] == RULES
    changed = {**old, "embed": ["tensor"]}
    assert migrate_config({"mesh": {"rules": changed}})["mesh"]["rules"] == {**RULES, "embed": ["tensor"]}
