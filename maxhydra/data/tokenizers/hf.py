"""Hugging Face tokenizers: a folder with tokenizer.json, that file itself, or a folder that transformers can convert.

The files are taken as data and two tokenizers are made of them. In the plain one, special tokens have names that no
text can hold, so that text never becomes a mark; the library's own switch for this leaves unigram and word-level
models, whose vocabulary holds the marks too, unguarded. Neither has a post-processor (it would add tokens of its own
and trim spaces off offsets), truncation or padding.
"""

import json
import secrets
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from maxhydra.config.paths import beside
from maxhydra.config.schema.tokenizer import Tokenizer as Config
from maxhydra.data.optional_packages import need
from maxhydra.data.special_tokens import blocks, chat_template, find_special_tokens, smallest, wrong

ROLES = {"bos": "bos_token", "eos": "eos_token", "pad": "pad_token"}


class HuggingFaceTokenizer:
    """The protocol over the `tokenizers` library, whose encoding is safe to call from several threads."""

    def __init__(self, config: Config, description: dict[str, Any], settings: dict[str, Any]):
        """`description` is tokenizer.json, `settings` what stands beside it."""
        _add_tokens(description, settings)
        names = {role: text_of(settings.get(key)) for role, key in ROLES.items()}
        ids = _vocabulary(description)
        ends = find_special_tokens(config, names, ids.get)
        self.bos, self.eos, self.pad = ends.bos, ends.eos, ends.pad
        _mark(description, {text: id for text, id in ids.items() if id in (ends.bos, ends.eos)})
        self.vocab_size = max(ids.values()) + 1
        self.marks = {token["content"]: token["id"] for token in description["added_tokens"] if token["special"]}
        self.special = frozenset(self.marks.values())
        self.chat_template = chat_template(config, settings.get("chat_template"))
        self._description = {**description, "post_processor": None, "truncation": None, "padding": None}

    @cached_property
    def _plain(self) -> Tokenizer:
        hidden = {text: f"{secrets.token_hex(16)}{id}" for text, id in self.marks.items()}
        made = Tokenizer.from_str(json.dumps(_renamed(self._description, hidden)))
        for text, id in self.marks.items():
            if made.token_to_id(hidden[text]) != id:
                raise ValueError(f"{text} has id {id}, which the tokenizers library does not give it")
        return made

    @cached_property
    def _marked(self) -> Tokenizer:
        return Tokenizer.from_str(json.dumps(self._description))

    def save(self, folder: Path) -> None:
        """Write the files that this kind reads."""
        (folder / "tokenizer.json").write_text(json.dumps(self._description), encoding="utf-8")
        names = {id: text for text, id in self.marks.items()}
        ends = {ROLES[role]: names.get(id) for role, id in (("bos", self.bos), ("eos", self.eos), ("pad", self.pad))}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **ends}
        told = {**settings, "chat_template": self.chat_template}
        content = json.dumps({key: value for key, value in told.items() if value is not None}, indent=1)
        (folder / "tokenizer_config.json").write_text(content, encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        found = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in found]

    def encode_bytes(self, data: bytes) -> np.ndarray:
        kind = smallest(self.vocab_size)
        parts = [ids.astype(kind) for ids in self.encode_batch(list(blocks(data.decode())))]
        return np.concatenate([np.empty(0, kind), *parts])

    def encode_marked(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        found = self._marked.encode(text, add_special_tokens=False)
        # Three times as fast as an array of pairs.
        ends = np.fromiter(chain.from_iterable(found.offsets), np.int64, 2 * len(found))
        return np.array(found.ids, np.int32), ends.reshape(-1, 2)

    def decode(self, ids: Sequence[int]) -> str:
        known = [int(id) for id in ids if id not in self.special]
        text: str = self._plain.decode(known, skip_special_tokens=False)
        return text


def text_of(token: Any) -> str | None:
    """A token as the settings write it: its text, or a mapping with its `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _vocabulary(description: dict[str, Any]) -> dict[str, int]:
    """Every token's id."""
    tokenizer = description["model"]["vocab"]
    ids = dict(tokenizer) if isinstance(tokenizer, dict) else {piece: id for id, (piece, _) in enumerate(tokenizer)}
    return ids | {token["content"]: token["id"] for token in description["added_tokens"]}


def _add_tokens(description: dict[str, Any], settings: dict[str, Any]) -> None:
    """Tokens that only the settings tell of."""
    added = description["added_tokens"]
    known = {token["id"] for token in added}
    for id, token in settings.get("added_tokens_decoder", {}).items():
        if int(id) not in known:
            added.append(_added(int(id), **token))
    added.sort(key=lambda token: token["id"])


def _mark(description: dict[str, Any], names: dict[str, int]) -> None:
    """Begin and end are special, whether the files say so or not."""
    added = description["added_tokens"]
    for text, id in names.items():
        found = [token for token in added if token["content"] == text]
        added += [] if found else [_added(id, text)]
        for token in found:
            token["special"] = True
    added.sort(key=lambda token: token["id"])


def _added(id: int, content: str, **flags: Any) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": id, "content": content, **plain, **{key: value for key, value in flags.items() if key in plain}}


def _renamed(description: dict[str, Any], hidden: dict[str, str]) -> dict[str, Any]:
    """The same tokenizer with other names for some tokens; ids stay."""
    model = dict(description["model"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {hidden.get(word, word): id for word, id in model["vocab"].items()}
    else:
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in model["vocab"]]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = hidden.get(model["unk_token"], model["unk_token"])
    names = (hidden.get(token["content"], token["content"]) for token in description["added_tokens"])
    added = [{**token, "content": name} for token, name in zip(description["added_tokens"], names, strict=True)]
    return {**description, "model": model, "added_tokens": added}


def _settings(folder: Path) -> dict[str, Any]:
    """What stands beside tokenizer.json, the newer files over the older."""
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if path.is_file():
            found |= json.loads(path.read_text(encoding="utf-8"))
    template = folder / "chat_template.jinja"
    if template.is_file():
        found["chat_template"] = template.read_text(encoding="utf-8")
    if isinstance(named := found.get("chat_template"), list):
        found["chat_template"] = next((one["template"] for one in named if one["name"] == "default"), None)
    return found


def _converted(config: Config, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A folder with the files of another library, as transformers converts them; never with code from the folder."""
    transformers = need("transformers", f"data.tokenizer.path={config.path}")
    try:
        made = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises whatever its converters do
        reason = f"has no tokenizer.json, and transformers cannot read it: {str(error).strip().splitlines()[0]}"
        raise wrong(config, "path", reason, config.path, hint=beside(folder)) from None
    if not made.is_fast:
        hint = "use data.tokenizer.kind=sentencepiece or tiktoken with its vocabulary file"
        raise wrong(config, "path", "has a tokenizer without offsets", config.path, hint=hint)
    settings = {key: getattr(made, key) for key in ROLES.values()} | {"chat_template": made.chat_template}
    return json.loads(made.backend_tokenizer.to_str()), settings


def build(config: Config) -> HuggingFaceTokenizer:
    assert config.path is not None
    path = Path(config.path).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        accepted = "a folder with tokenizer.json, or that file; nothing is downloaded"
        raise wrong(config, "path", "nothing is there", config.path, accepted=accepted, hint=beside(path))
    if not file.is_file():
        return HuggingFaceTokenizer(config, *_converted(config, path))
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
        settings = _settings(file.parent)
        made = HuggingFaceTokenizer(config, description, settings)
        made.encode("")
    except (ValueError, KeyError, TypeError) as error:
        raise wrong(config, "path", f"cannot be read as a tokenizer: {error!r}", str(file)) from None
    return made
