"""The tokenizer inside a GGUF file (llama.cpp): vocabulary, merges, special tokens and chat template.

The file names its pre-tokenizer rather than describing it; gguf.json maps known names to steps. An unknown name is
rejected: text that is split differently becomes tokens that the model never saw.
"""

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.data import Tokenizer as Config
from maxhydra.config.values import nearby_files
from maxhydra.data.tokenizers import wrong
from maxhydra.data.tokenizers.hf import ROLES, HuggingFaceTokenizer
from maxhydra.modelfiles import locate, open_gguf

KEY = "data.tokenizer.path"
# Token types in the file. Special tokens such as the end of a turn are control tokens.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
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
    known = _known()
    _look_up(config, "model", values.get("ggml.model"), dict.fromkeys(known["byte_level_bpe"]))
    steps = _look_up(config, "pre", values.get("ggml.pre"), known["before_the_regex"])
    split = {**BYTE_LEVEL, "use_regex": _uses_regex(steps)}
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
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*steps, split],
        },
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "vocab": {text: id for id, text in enumerate(tokens)},
            "merges": [pair.split(" ", 1) for pair in values["ggml.merges"]],
        },
    }


def _known() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(resources.files(__package__).joinpath("gguf.json").read_text(encoding="utf-8"))
    return content


def _uses_regex(steps: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the regex of GPT-2 splits words; a Split step replaces it."""
    return not any(step["type"] == "Split" for step in steps)


def gguf_metadata(tokenizer: HuggingFaceTokenizer, vocab_size: int) -> dict[str, Any]:
    """The tokenizer as values of a GGUF file, without the prefix `tokenizer.`; the inverse of `build`.

    ConfigError if llama.cpp has no name for its kind. The vocabulary is padded to that of the model.
    """
    description = tokenizer.description
    stage, model = description.get("pre_tokenizer") or {}, description["model"]
    steps = stage["pretokenizers"] if stage.get("type") == "Sequence" else [stage]
    *before, last = steps
    names = [
        name
        for name, known in _known()["before_the_regex"].items()
        if before == known and last.get("type") == "ByteLevel" and last.get("use_regex", True) == _uses_regex(known)
    ]
    if model.get("type") != "BPE" or not names or description.get("normalizer"):
        accepted = f"byte-level BPE that splits words as {', '.join(_known()['before_the_regex'])}"
        hint = "data.tokenizer.kind=byte writes the file without a tokenizer"
        raise ConfigError(Problem(KEY, "has no equivalent in a GGUF file", accepted=accepted, hint=hint))
    tokens = [f"[PAD{id}]" for id in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for text, id in model["vocab"].items():
        tokens[id], types[id] = text, NORMAL
    for added in description.get("added_tokens") or []:
        tokens[added["id"]], types[added["id"]] = added["content"], CONTROL if added["special"] else USER_DEFINED
    ids = {f"ggml.{name}": getattr(tokenizer, role) for role, name in IDS.items()}
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return {
        "ggml.model": _known()["byte_level_bpe"][0],
        "ggml.pre": names[0],
        "ggml.tokens": tokens,
        "ggml.token_type": types,
        "ggml.merges": merges,
        **{name: id for name, id in ids.items() if id is not None},
        **({} if tokenizer.chat_template is None else {"chat_template": tokenizer.chat_template}),
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
