"""Opens an engine: the tokenizer first, then the weights on the mesh, then the engine itself.

This order reports mistakes early: the tokenizer takes a second to load, the weights take minutes. If the weights come
from a maxhydra run, the config is first checked to describe that run's model.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from omegaconf import OmegaConf

from maxhydra import model
from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.errors import show
from maxhydra.config.schema.decode import Engine as EngineConfig
from maxhydra.config.schema.model import Kind, Model
from maxhydra.config.schema.quantization import STORED_KINDS, TRAINING_KINDS, Quantization
from maxhydra.config.schema.tasks.inference import ServeTask
from maxhydra.config.serialize import from_yaml, read_run_facts
from maxhydra.config.yaml_files import read_yaml_text
from maxhydra.convert.adapter_lineage import ACCEPTED, run_folder
from maxhydra.convert.compatibility import KEYS_WITHOUT_EFFECT_ON_WEIGHTS
from maxhydra.convert.load import load_weights, stored_format
from maxhydra.convert.peft import is_peft_folder
from maxhydra.decode.adapters import AdapterLimits, AdapterReader
from maxhydra.decode.engine import Engine
from maxhydra.decode.open_draft import open_draft_model
from maxhydra.decode.sampling_params import PromptEncoder
from maxhydra.model import ModelDef
from maxhydra.modelfiles import locate
from maxhydra.runtime.profiler import Profiler
from maxhydra.sharding import Sharder, build_mesh

Tree = Any
# Tokenizer keys that change the ids of a text.
TOKENIZER_KEYS = ("kind", "path", "bos", "eos", "add_bos")
# Keys that may differ from the run. Unlike in convert, mtp must match: runs store the MTP layers in their checkpoints.
# So must diffusion, which decides how the weights are decoded.
FREE_KEYS = tuple(pattern for pattern in KEYS_WITHOUT_EFFECT_ON_WEIGHTS if pattern not in ("mtp.*", "diffusion.*"))
MAX_LISTED = 6


def check_same_model(config: Config, source: str, *, key: str = "checkpoint.load_parameters") -> None:
    """Raise ConfigError if `source` is in a run whose model or tokenizer differs from the config's.

    Weights of the same shapes may still belong to a different model (another RoPE, another norm): they would load
    without an error, and the model would generate nonsense.
    """
    run = run_folder(source)
    if run is None:
        return
    trained = from_yaml(read_yaml_text(run / "config.yaml"), str(run / "config.yaml"))
    expected, actual = _binding_values(trained), _binding_values(config)
    differing = [key for key in sorted({*expected, *actual}) if expected.get(key) != actual.get(key)]
    if not differing:
        return
    lines = [f"{key} is {show(expected.get(key))}, here {show(actual.get(key))}" for key in differing[:MAX_LISTED]]
    more = f" and {len(differing) - MAX_LISTED} more" if len(differing) > MAX_LISTED else ""
    reason = f"was trained with a different model: {'; '.join(lines)}{more}"
    hint = f"use the settings it was trained with: {' '.join(_overrides(run, expected, config))}"
    raise ConfigError(Problem(key, reason, value=source, hint=hint))


def model_values(config: Config) -> dict[str, Any]:
    """Return all model settings, and the tokenizer settings that change ids, by dotted key."""
    model = OmegaConf.to_container(OmegaConf.structured(config.model), enum_to_str=True)
    tokenizer = OmegaConf.to_container(OmegaConf.structured(config.data.tokenizer), enum_to_str=True)
    assert isinstance(tokenizer, dict)
    return {**dict(_flatten("model", model)), **{f"data.tokenizer.{key}": tokenizer[key] for key in TOKENIZER_KEYS}}


def model_defaults() -> dict[str, Any]:
    """Return the default of every model setting by dotted key; layer kinds are named `*`."""
    model = OmegaConf.to_container(OmegaConf.structured(Model), enum_to_str=True)
    kind = OmegaConf.to_container(OmegaConf.structured(Kind), enum_to_str=True)
    return {**dict(_flatten("model", model)), **dict(_flatten("model.kinds.*", kind))}


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
    # Imported here: it imports Hydra, which a worker process otherwise does not need.
    from maxhydra.config.compose.composer import compose  # noqa: PLC0415

    try:
        choice = f"model={(read_run_facts(run).get('choices') or {}).get('model')}"
        base = _binding_values(compose([choice]).config)
        overrides = [choice]
    except ConfigError:
        # run.json is damaged, or the option comes from a --config-dir or no longer exists: list every key instead.
        base, overrides = _binding_values(config), []
    # The model option does not set the tokenizer, so its keys are compared with the command's.
    tokenizer = {key: value for key, value in _binding_values(config).items() if key.startswith("data.")}
    base = {**base, **tokenizer}
    return overrides + [f"{key}={_quote(value)}" for key, value in expected.items() if value != base.get(key)]


def _quote(value: Any) -> str:
    text = show(value)
    return text if not isinstance(value, str) or text.replace("/", "").replace(".", "").isalnum() else f"'{text}'"


log = logging.getLogger("maxhydra")


def open_prompts(config: Config) -> PromptEncoder:
    """Check everything that needs no weights, then load the tokenizer."""
    check_weights_source(config)
    model = config.model
    return PromptEncoder(config.data, vocab_size=model.vocab_size, vision=model.vision, audio=model.audio)


def check_weights_source(config: Config) -> None:
    """Raise ConfigError if no weights are configured, or if they belong to a different model."""
    if config.checkpoint.load_parameters is None:
        reason = f"is required: task={config.task.name} needs trained weights"
        raise ConfigError(Problem("checkpoint.load_parameters", reason, value=None, accepted=ACCEPTED))
    check_same_model(config, config.checkpoint.load_parameters)


def weight_quantization(config: Config) -> Quantization:
    """Return the storage format of the weights: as configured, otherwise as stored in the checkpoint."""
    quantization = config.quantization
    if training_kinds := sorted(kind.value for kind in quantization.kinds if kind in TRAINING_KINDS):
        accepted = ", ".join(kind.value for kind in STORED_KINDS)
        hint = "remove quantization to use the format of the checkpoint"
        reason = f"is only supported for training ({', '.join(training_kinds)})"
        raise ConfigError(Problem("quantization.kind", reason, value=quantization.kind, accepted=accepted, hint=hint))
    source = config.checkpoint.load_parameters
    stored = None if source is None else stored_format("checkpoint.load_parameters", source)
    if stored is None or quantization.kinds:
        return quantization
    log.info("%s is quantized to %s; the weights are used in that format", source, stored.kind.value)
    return stored


def build_model(config: Config, devices: Sequence[jax.Device] | None = None) -> tuple[ModelDef, Sharder]:
    """Build the model with quantized weights if configured, and the sharder of its mesh, by default of all devices."""
    sharder = Sharder.from_config(config.mesh, build_mesh(config.mesh, devices))
    decoder = model.build(config.model, quantization=weight_quantization(config))
    decoder.check_mesh(sharder)
    reject_stages(sharder, "mesh.stage")
    return decoder, sharder


def reject_stages(sharder: Sharder, path: str) -> None:
    """Raise ConfigError for a mesh with pipeline stages: decoding runs all layers for every token."""
    if sharder.stages > 1:
        reason, accepted = "pipeline parallelism is for training", "1; shard weights over fsdp, expert or tensor"
        raise ConfigError(Problem(path, reason, value=sharder.stages, accepted=accepted))


def load_params(config: Config, decoder: ModelDef, sharder: Sharder) -> Any:
    """Load the weights of checkpoint.load_parameters.

    They are stored in the compute dtype, to which every matmul would cast them anyway, or quantized if configured.
    """
    assert config.checkpoint.load_parameters is not None
    return load_weights(
        config.checkpoint.load_parameters,
        decoder,
        shardings=sharder.tree(decoder.base.axes),
        dtype=jnp.dtype(config.model.dtypes.compute.value),
    )


def open_engine(
    config: Config,
    engine: EngineConfig,
    prompts: PromptEncoder,
    *,
    profiler: Profiler | None = None,
    adapters: AdapterLimits | None = None,
    keep_params: Callable[[ModelDef, Tree], None] | None = None,
) -> Engine:
    """Load the weights and start the engine; `adapters`: of the adapters that requests may name.

    `keep_params`: called with the model and its weights, before the engine rearranges them.
    """
    decode_devices, prefill_devices = split_devices(engine)
    try:
        decoder, sharder = build_model(config, decode_devices)
        prefill_sharder = build_model(config, prefill_devices)[1] if prefill_devices else None
    except ConfigError as error:
        if not prefill_devices:
            raise
        sizes = f"the {len(prefill_devices)} devices that prefill and the {len(decode_devices)} that decode"
        hint = f"task.engine.prefill_devices={len(prefill_devices)}: the section mesh describes both {sizes}"
        raise ConfigError([dataclasses.replace(problem, hint=hint) for problem in error.problems]) from None
    draft_model = open_draft_model(config, engine, sharder)
    params = load_params(config, decoder, sharder)
    if keep_params is not None:
        keep_params(decoder, params)
    return Engine(
        decoder.without_speech,
        {name: weights for name, weights in params.items() if name != model.SPEECH},
        prompts.tokenizer,
        engine,
        sharder=sharder,
        eos=prompts.eos_ids,
        prefill_sharder=prefill_sharder,
        profiler=profiler,
        adapters=adapters,
        draft_model=draft_model,
    )


def open_adapters(config: Config) -> AdapterReader | None:
    """The reader of adapters that task.lora describes; None if requests have no adapters."""
    task = config.task
    if not isinstance(task, ServeTask) or not task.has_adapters:
        return None
    limits = AdapterLimits(task.lora.slots, task.lora.max_rank, tuple(task.lora.targets))
    base = model.build(config.model)
    try:
        _ = limits.model(base).shapes
    except ConfigError as error:
        problems = [dataclasses.replace(problem, path="task.lora.targets") for problem in error.problems]
        raise ConfigError(problems) from None
    return AdapterReader(base, limits)


def read_adapter_weights(config: Config, reader: AdapterReader, key: str, location: str) -> Tree:
    """The weights of an adapter for `Engine.load_adapter`; ConfigError if it does not belong to the model."""
    if not is_peft_folder(locate(key, location)):
        check_same_model(config, location, key=key)
    return reader.read(key, location)


def split_devices(engine: EngineConfig) -> tuple[list[jax.Device], list[jax.Device]]:
    """Return the devices that decode, and those that only prefill prompts; ConfigError if one group would be empty."""
    devices, count = jax.devices(), engine.prefill_devices
    if count is None:
        return devices, []
    if jax.process_count() > 1:
        reason = "is not supported with several processes"
        raise ConfigError(Problem("task.engine.prefill_devices", reason, value=count, accepted="null"))
    if count >= len(devices):
        reason = f"leaves no device for decoding, of {len(devices)} in all"
        accepted = f"1 to {len(devices) - 1}, or null" if len(devices) > 1 else "null"
        raise ConfigError(Problem("task.engine.prefill_devices", reason, value=count, accepted=accepted))
    return devices[:-count], devices[-count:]
