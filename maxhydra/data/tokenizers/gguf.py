"""The tokenizer inside a GGUF file, the format of llama.cpp: its vocabulary, merges, ends and chat template.

The file names its way of splitting text rather than describing it; gguf.json says what each name means. A name that
stands not there is refused: text split another way becomes tokens that the model never saw.
"""

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from maxhydra.config.paths import beside
from maxhydra.config.schema.tokenizer import Tokenizer as Config
from maxhydra.data.special_tokens import wrong
from maxhydra.data.tokenizers.hf import ROLES, HuggingFaceTokenizer
from maxhydra.modelfiles import locate, open_gguf

KEY = "data.tokenizer.path"
# Types of token in the file. Marks such as the end of a turn are control tokens.
CONTROL, USER_DEFINED = 3, 4
IDS = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "padding_token_id"}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def build(config: Config) -> HuggingFaceTokenizer:
    assert config.path is not None
    path = locate(KEY, config.path)
    if not path.is_file():
        accepted = "a .gguf file, or package:NAME of an installed package with one"
        raise wrong(config, "path", "no file is there", config.path, accepted=accepted, hint=beside(path))
    values = {
        name.removeprefix("tokenizer."): value
        for name, value in open_gguf(KEY, path).values.items()
        if name.startswith("tokenizer.")
    }
    try:
        return HuggingFaceTokenizer(config, _description(config, values), _settings(values))
    except (KeyError, IndexError, ValueError) as error:
        raise wrong(config, "path", f"has no whole tokenizer: {error!r}", config.path) from None


def _description(config: Config, values: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer as tokenizer.json would hold it."""
    known = json.loads(resources.files(__package__).joinpath("gguf.json").read_text(encoding="utf-8"))
    _known(config, "model", values.get("ggml.model"), dict.fromkeys(known["byte_level_bpe"]))
    steps = _known(config, "pre", values.get("ggml.pre"), known["before_the_regex"])
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


def _known(config: Config, what: str, name: Any, table: Mapping[str, Any]) -> Any:
    if name not in table:
        reason = f"its tokenizer.ggml.{what} is {name}, which is not known"
        hint = "data.tokenizer.kind=hf takes the tokenizer.json of the same model"
        raise wrong(config, "path", reason, config.path, accepted=", ".join(table), hint=hint)
    return table[name]


def _flags(is_special: bool) -> dict[str, bool]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {**plain, "special": is_special}


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Ends and chat template, as tokenizer_config.json would hold them."""
    ids = {role: values.get(f"ggml.{name}") for role, name in IDS.items()}
    ends = {ROLES[role]: values["ggml.tokens"][id] for role, id in ids.items() if id is not None}
    return {**ends, "chat_template": values.get("chat_template")}
