"""Whether a command describes the model whose weights it loads, where a run of ours left a config beside them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.errors import show
from maxhydra.config.migrations import original_names
from maxhydra.config.schema.tasks.decode import DecodeTask
from maxhydra.config.serialize import from_yaml
from maxhydra.convert.adapter_lineage import run_folder
from maxhydra.convert.orbax_io import steps_in
from maxhydra.decode.offline_files import fingerprint

# Keys that change how a model is trained or laid out, and not what it computes.
FREE = (
    "model.path",
    "model.remat",
    "model.dropout",
    "model.init_scale",
    "model.scan_unroll",
    "model.kernels",
    "model.dtypes",
)
# A tokenizer's keys that change which ids a text has.
BINDING = ("kind", "path", "bos", "eos", "add_bos")
SHOWN = 6


def check_origin(config: Config, source: str) -> None:
    """ConfigError where `source` lies in a run whose model or tokenizer differs from those of the config.

    Weights of the same shapes may still belong to another model (another rope, another norm): loading them would
    succeed, and the model would write nonsense.
    """
    run = run_folder(source)
    if run is None:
        return
    theirs = from_yaml((run / "config.yaml").read_text(encoding="utf-8"), str(run / "config.yaml"))
    wanted, given = _binding(theirs), _binding(config)
    differing = [key for key in sorted({*wanted, *given}) if wanted.get(key) != given.get(key)]
    if not differing:
        return
    lines = [f"{key} is {show(wanted.get(key))}, here {show(given.get(key))}" for key in differing[:SHOWN]]
    more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
    reason = f"was trained as another model: {'; '.join(lines)}{more}"
    hint = f"give what it was trained with: {' '.join(_overrides(run, wanted, config))}"
    raise ConfigError(Problem("checkpoint.load_parameters", reason, value=source, hint=hint))


def settings_name(config: Config) -> str:
    """A short name for all that an answer of task=decode depends on besides its prompt."""
    task = config.task
    assert isinstance(task, DecodeTask)
    chosen = {
        **_binding(config),
        "weights": config.checkpoint.load_parameters,
        **_step(config.checkpoint.load_parameters),
        "template": config.data.tokenizer.chat_template,
        "compute": config.model.dtypes.compute,
        "quantization": OmegaConf.to_container(OmegaConf.structured(config.quantization)),
        "cache": task.engine.cache_dtype,
        "sampling": OmegaConf.to_container(OmegaConf.structured(task.sampling)),
        "chat": [task.chat, task.system, task.samples, task.logprobs, config.run.seed],
    }
    return fingerprint(original_names(chosen))


def _step(source: str | None) -> dict[str, int]:
    """Of a run, which may go on, the checkpoint that is its last now."""
    root = Path(source or "").expanduser()
    steps = source and (steps_in(root / "checkpoints") or steps_in(root))
    return {"step": steps[-1]} if steps else {}


def _binding(config: Config) -> dict[str, Any]:
    """Key -> value of all that decides what the model computes, and which ids a text has."""
    model = OmegaConf.to_container(OmegaConf.structured(config.model), enum_to_str=True)
    words = OmegaConf.to_container(OmegaConf.structured(config.data.tokenizer), enum_to_str=True)
    assert isinstance(words, dict)
    values = {**dict(_flat("model", model)), **{f"data.tokenizer.{key}": words[key] for key in BINDING}}
    return {key: value for key, value in values.items() if not key.startswith(FREE)}


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(f"{path}.{key}", item)
    else:
        yield path, value


def _overrides(run: Path, wanted: dict[str, Any], config: Config) -> list[str]:
    """What to write on the command line: the run's model option, and what it was given besides."""
    choices = json.loads((run / "run.json").read_text(encoding="utf-8")).get("choices", {})
    choice = f"model={choices.get('model')}"
    # Hydra, which a worker does without unless it comes to this.
    from maxhydra.config.compose.composer import compose  # noqa: PLC0415

    try:
        base = _binding(compose([choice]).config)
        start = [choice]
    except ConfigError:
        # An option of a folder of the user's (--config-dir), or one that is gone: name every key instead.
        base, start = _binding(config), []
    # The tokenizer is no part of the model's option, which would bring its keys along.
    given = {**base, **{key: value for key, value in _binding(config).items() if key.startswith("data.")}}
    return start + [f"{key}={_quoted(value)}" for key, value in wanted.items() if value != given.get(key)]


def _quoted(value: Any) -> str:
    text = show(value)
    return text if not isinstance(value, str) or text.replace("/", "").replace(".", "").isalnum() else f"'{text}'"
