"""Checks that a config describes the model whose weights it loads, if they come from a maxhydra run."""

import json
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.errors import show
from maxhydra.config.serialize import from_yaml
from maxhydra.convert.adapter_lineage import run_folder
from maxhydra.convert.compatibility import KEYS_WITHOUT_EFFECT_ON_WEIGHTS

# Tokenizer keys that change the ids of a text.
TOKENIZER_KEYS = ("kind", "path", "bos", "eos", "add_bos")
# Keys that may differ from the run. Unlike in convert, mtp must match: runs store the MTP layers in their checkpoints.
FREE_KEYS = tuple(pattern for pattern in KEYS_WITHOUT_EFFECT_ON_WEIGHTS if pattern != "mtp.*")
MAX_LISTED = 6


def check_same_model(config: Config, source: str) -> None:
    """Raise ConfigError if `source` is in a run whose model or tokenizer differs from the config's.

    Weights of the same shapes may still belong to a different model (another RoPE, another norm): they would load
    without an error, and the model would generate nonsense.
    """
    run = run_folder(source)
    if run is None:
        return
    trained = from_yaml((run / "config.yaml").read_text(encoding="utf-8"), str(run / "config.yaml"))
    expected, actual = _binding_values(trained), _binding_values(config)
    differing = [key for key in sorted({*expected, *actual}) if expected.get(key) != actual.get(key)]
    if not differing:
        return
    lines = [f"{key} is {show(expected.get(key))}, here {show(actual.get(key))}" for key in differing[:MAX_LISTED]]
    more = f" and {len(differing) - MAX_LISTED} more" if len(differing) > MAX_LISTED else ""
    reason = f"was trained with a different model: {'; '.join(lines)}{more}"
    hint = f"use the settings it was trained with: {' '.join(_overrides(run, expected, config))}"
    raise ConfigError(Problem("checkpoint.load_parameters", reason, value=source, hint=hint))


def model_values(config: Config) -> dict[str, Any]:
    """Return all model settings, and the tokenizer settings that change ids, by dotted key."""
    model = OmegaConf.to_container(OmegaConf.structured(config.model), enum_to_str=True)
    tokenizer = OmegaConf.to_container(OmegaConf.structured(config.data.tokenizer), enum_to_str=True)
    assert isinstance(tokenizer, dict)
    return {**dict(_flatten("model", model)), **{f"data.tokenizer.{key}": tokenizer[key] for key in TOKENIZER_KEYS}}


def _binding_values(config: Config) -> dict[str, Any]:
    """Return the settings that must match those of the run."""
    return {
        key: value
        for key, value in model_values(config).items()
        if not any(fnmatch(key.removeprefix("model."), pattern) for pattern in FREE_KEYS)
    }


def _flatten(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flatten(f"{path}.{key}", item)
    else:
        yield path, value


def _overrides(run: Path, expected: dict[str, Any], config: Config) -> list[str]:
    """Return the command-line overrides that describe the run's model: its option, and keys that differ from it."""
    choices = json.loads((run / "run.json").read_text(encoding="utf-8")).get("choices", {})
    choice = f"model={choices.get('model')}"
    # Imported here: it imports Hydra, which a worker process otherwise does not need.
    from maxhydra.config.compose.composer import compose  # noqa: PLC0415

    try:
        base = _binding_values(compose([choice]).config)
        overrides = [choice]
    except ConfigError:
        # The option comes from a --config-dir, or no longer exists: list every key instead.
        base, overrides = _binding_values(config), []
    # The model option does not set the tokenizer, so its keys are compared with the command's.
    tokenizer = {key: value for key, value in _binding_values(config).items() if key.startswith("data.")}
    base = {**base, **tokenizer}
    return overrides + [f"{key}={_quote(value)}" for key, value in expected.items() if value != base.get(key)]


def _quote(value: Any) -> str:
    text = show(value)
    return text if not isinstance(value, str) or text.replace("/", "").replace(".", "").isalnum() else f"'{text}'"
