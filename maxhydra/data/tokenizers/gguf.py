"""The tokenizer inside a GGUF file (llama.cpp): vocabulary, merges, special tokens and chat template.

The file names its pre-tokenizer rather than describing it; gguf.json maps known names to steps. An unknown name is
rejected: text that is split differently becomes tokens that the model never saw.
"""

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from maxhydra.config.schema.data import Tokenizer as Config
from maxhydra.config.values import nearby_files
from maxhydra.data.tokenizers import wrong
from maxhydra.data.tokenizers.hf import ROLES, HuggingFaceTokenizer
from maxhydra.modelfiles import locate, open_gguf

KEY = "data.tokenizer.path"
# Token types in the file. Special tokens such as the end of a turn are control tokens.
CONTROL, USER_DEFINED = 3, 4
IDS = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "padding_token_id"}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def input_files(config: Config) -> list[Path]:
    return [locate(KEY, config.path or "")]


def build(config: Config) -> HuggingFaceTokenizer:
    assert config.path is not None
    path = locate(KEY, config.path)
    if not path.is_file():
        accepted = "a .gguf file, or package:NAME of an installed package with one"
        raise wrong(config, "path", "no such file", config.path, accepted=accepted, hint=nearby_files(path))
    values = {
        name.removeprefix("tokenizer."): value
        for name, value in open_gguf(KEY, path).values.items()
        if name.startswith("tokenizer.")
    }
    try:
        return HuggingFaceTokenizer(config, _description(config, values), _settings(values))
    except (KeyError, IndexError, ValueError) as error:
        raise wrong(config, "path", f"has an incomplete tokenizer: {error!r}", config.path) from None


def _description(config: Config, values: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer in the format of tokenizer.json."""
    known = json.loads(resources.files(__package__).joinpath("gguf.json").read_text(encoding="utf-8"))
    _look_up(config, "model", values.get("ggml.model"), dict.fromkeys(known["byte_level_bpe"]))
    steps = _look_up(config, "pre", values.get("ggml.pre"), known["before_the_regex"])
    tokens, types = values["ggml.tokens"], values["ggml.token_type"]
    added = [
        {**_flags(types[id] == CONTROL), "id": id, "content": text}
        for id, text in enumerate(tokens)
        if types[id] in (CONTROL, USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, BYTE_LEVEL]},
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "vocab": {text: id for id, text in enumerate(tokens)},
            "merges": [pair.split(" ", 1) for pair in values["ggml.merges"]],
        },
    }


def _look_up(config: Config, field: str, name: Any, table: Mapping[str, Any]) -> Any:
    if name not in table:
        reason = f"has the unsupported tokenizer.ggml.{field} {name}"
        hint = "use data.tokenizer.kind=hf with the tokenizer.json of the same model"
        raise wrong(config, "path", reason, config.path, accepted=", ".join(table), hint=hint)
    return table[name]


def _flags(is_special: bool) -> dict[str, bool]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {**plain, "special": is_special}


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Special tokens and chat template in the format of tokenizer_config.json."""
    ids = {role: values.get(f"ggml.{name}") for role, name in IDS.items()}
    special_tokens = {ROLES[role]: values["ggml.tokens"][id] for role, id in ids.items() if id is not None}
    return {**special_tokens, "chat_template": values.get("chat_template")}
