"""Conversions of data and tokenizer."""

import json
from pathlib import Path
from typing import Any

from maxhydra.cli.maxtext.translation import Translation
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.schema.data import ROLES

SOURCES = {
    "synthetic": "synthetic",
    "hf": "hf",
    "grain": "grain",
    "tfds": "tfds",
    "c4_mlperf": "c4_mlperf",
    "olmo_grain": "olmo",
}
RECORD_TYPES = {"sft": "chat", "dpo": "preference", "grpo": "prompts"}
# Builders of Hugging Face datasets that read files.
FILE_BUILDERS = ("arrow", "csv", "json", "parquet", "text")
TOKENIZERS = {"sentencepiece": "sentencepiece", "huggingface": "hf", "tiktoken": "tiktoken"}


def data(t: Translation) -> None:
    """Choose the source and set its keys, the record type, columns and packing."""
    s, kind = t.settings, t.settings["dataset_type"]
    if t.task in ("decode", "serve"):
        return
    if kind not in SOURCES:
        raise ConfigError(Problem("dataset_type", "is not a source", value=kind, accepted=", ".join(SOURCES)))
    # Reinforcement learning takes dataset_name from the Hugging Face hub.
    source = "hf" if t.task == "grpo" and not s.given("dataset_type") else SOURCES[kind]
    t.choose("data", source)
    {"hf": _hf, "grain": _grain, "tfds": _tfds, "c4_mlperf": _c4_mlperf, "olmo": _olmo}.get(source, _nothing)(t)
    if source != "synthetic":
        _records(t)
        _packing(t)
    if s["reuse_example_batch"]:
        t.set("data.overfit_batches", 1, from_keys=("reuse_example_batch",))
    if (workers := s.count("grain_worker_count")) >= 0 and s.given("grain_worker_count"):
        t.set("data.workers", workers, from_keys=("grain_worker_count",))
    elif workers < 0:
        t.unsupported("grain_worker_count", "the number of workers is not chosen automatically; set data.workers")


def _nothing(t: Translation) -> None:
    """Random tokens have no settings."""


def _evaluates(t: Translation) -> bool:
    return t.settings.count("eval_interval") > 0


def _copy(t: Translation, *pairs: tuple[str, str]) -> None:
    for key, path in pairs:
        if t.settings[key]:
            t.set(f"data.{path}", t.settings[key], from_keys=(key,))


def _hf(t: Translation) -> None:
    s = t.settings
    if s["hf_train_files"]:
        t.set("data.path", _files(s["hf_train_files"]), from_keys=("hf_train_files",))
        if _evaluates(t) and s["hf_eval_files"]:
            t.set("data.eval_path", _files(s["hf_eval_files"]), from_keys=("hf_eval_files",))
        if s["hf_path"] and s["hf_path"] not in FILE_BUILDERS:
            t.mention("hf_path", "data.path has the files")
        return
    name = "hf_path" if s["hf_path"] else "dataset_name"
    t.set("data.name", s[name], from_keys=(name,))
    # MaxText streams datasets of the hub.
    t.set("data.streaming", True, from_keys=(name,))
    _copy(t, ("hf_name", "config"), ("hf_subset", "config"), ("hf_data_dir", "data_dir"), ("train_split", "split"))
    if _evaluates(t):
        split = "hf_eval_split" if s["hf_eval_split"] else "eval_split"
        t.set("data.eval_split", s[split], from_keys=(split,))


def _files(value: Any) -> str:
    return ";".join(value) if isinstance(value, list) else str(value)


def _tfds(t: Translation) -> None:
    _copy(t, ("dataset_name", "name"), ("dataset_path", "data_dir"), ("train_split", "split"))
    if _evaluates(t):
        _copy(t, ("eval_dataset_name", "eval_name"), ("eval_split", "eval_split"))


def _c4_mlperf(t: Translation) -> None:
    _copy(t, ("dataset_path", "data_dir"))


def _olmo(t: Translation) -> None:
    _copy(t, ("olmo_index_path", "path"))


def _grain(t: Translation) -> None:
    s, keys = t.settings, ("grain_train_files", "grain_train_mixture_config_path")
    parts = _mixture(t) or [part for part in str(s["grain_train_files"] or "").split(";") if part]
    weights = {name: float(weight) for name, _, weight in (part.rpartition(",") for part in parts) if name}
    if len(weights) < 2:
        t.set("data.path", ";".join(weights or parts), from_keys=keys)
        _copy(t, ("grain_file_type", "format"))
    else:
        t.choose("data", "mixture")
        corpus = {"source": "grain", "format": s["grain_file_type"], "record_type": _record_type(t)}
        names = {f"source{number}": path for number, path in enumerate(weights)}
        t.set("+data.sources", {name: corpus | {"path": path} for name, path in names.items()}, from_keys=keys)
        t.set("+data.weights", {name: weights[path] for name, path in names.items()}, from_keys=keys)
    if _evaluates(t):
        _copy(t, ("grain_eval_files", "eval_path"))


def _mixture(t: Translation) -> list[str]:
    """Return the parts of a mixture file as `path,weight`, the notation of grain_train_files."""
    key = "grain_train_mixture_config_path"
    if not t.settings[key]:
        return []
    try:
        content = json.loads(Path(t.settings[key]).read_text(encoding="utf-8"))
        return [f"{entry['path']},{entry['weight']}" for entry in content.values()]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        reason = "cannot be read as a mapping of names to path and weight"
        raise ConfigError(Problem(key, f"{reason}: {error}", value=t.settings[key])) from None


def _record_type(t: Translation) -> str:
    default = "text" if t.settings["tokenize_train_data"] else "tokens"
    return RECORD_TYPES.get(t.task, default)


def _records(t: Translation) -> None:
    s, kind = t.settings, _record_type(t)
    if t.choices["data"] in ("c4_mlperf", "olmo", "mixture"):
        return
    if "data.record_type" not in t.values:
        t.set("data.record_type", kind, from_keys=("tokenize_train_data", "use_sft", "use_dpo"))
    names = [name for name in s["train_data_columns"] or [] if name not in ROLES[kind]]
    if kind in ("text", "tokens", "chat") and len(names) == 1 and s.given("train_data_columns"):
        t.set("+data.columns", {ROLES[kind][0]: names[0]}, from_keys=("train_data_columns",))
    elif kind == "preference" and names == ["input"]:
        t.set("+data.columns", {"prompt": "input"}, from_keys=("train_data_columns",))
    elif names and (s.given("train_data_columns") or kind == "prompts"):
        accepted = ", ".join(ROLES[kind])
        t.mention("train_data_columns", f"set data.columns or data.formatting: records of this task have {accepted}")
    if function := s["formatting_func_path"]:
        module, _, name = str(function).rpartition(".")
        t.set("data.formatting", f"{module}:{name}", from_keys=("formatting_func_path",))
    if t.task == "sft":
        only = "sft_train_on_completion_only"
        t.set("data.loss_on", "assistant" if s[only] else "all", from_keys=(only, "use_sft"))


def _packing(t: Translation) -> None:
    s = t.settings
    method = s["grain_packing_type"] if s["packing"] else "none"
    t.set("data.packing.method", method, from_keys=("packing", "grain_packing_type"))
    if (segments := s.count("max_segments_per_seq")) > 0:
        t.set("data.packing.max_segments", segments, from_keys=("max_segments_per_seq",))
    t.set("data.packing.overlong", "truncate" if s["use_truncation"] else "split", from_keys=("use_truncation",))


def tokenizer(t: Translation) -> None:
    """Set the tokenizer; sources of Hugging Face use its tokenizers whatever the type is."""
    s, path = t.settings, t.settings["tokenizer_path"]
    if path:
        kind = "huggingface" if t.choices.get("data") == "hf" else s["tokenizer_type"]
        t.set("data.tokenizer.kind", TOKENIZERS[kind], from_keys=("tokenizer_path",))
        t.set("data.tokenizer.path", path, from_keys=("tokenizer_path",))
    elif t.choices.get("data") not in ("synthetic", "olmo"):
        t.mention("tokenizer_path", "is not set: the command has bytes as tokens; add data.tokenizer.kind and path")
    if s["chat_template_path"]:
        t.set("data.tokenizer.chat_template", s["chat_template_path"], from_keys=("chat_template_path",))
        if str(s["chat_template_path"]).endswith(".json"):
            t.unsupported("chat_template_path", "must be a file with a Jinja template alone, not JSON")
    if s["use_chat_template"] and t.task == "decode":
        t.set("task.chat", "on", from_keys=("use_chat_template",))
