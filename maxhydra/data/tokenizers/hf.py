"""Hugging Face tokenizers: a folder with tokenizer.json, that file itself, or a folder that transformers can convert.

The files are read as data, and two tokenizers are built from them. In the plain one, special tokens have random names
that no text can contain, so text never becomes a special token; the library's own switch for this does not protect
unigram and word-level models, whose vocabulary includes the special tokens. Neither has a post-processor (it would add
tokens and trim spaces from offsets), truncation or padding.
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
from tokenizers.pre_tokenizers import ByteLevel

from maxhydra.config.schema.data import Tokenizer as Config
from maxhydra.config.values import nearby_files
from maxhydra.data.records import need
from maxhydra.data.tokenizers import (
    blocks,
    chat_template,
    describe,
    find_special_tokens,
    read_template,
    report_failures,
    smallest_id_dtype,
    tokenizer_path,
    width_of_piece,
    wrong,
)

# A space as a visible character, as in tokenizers converted from SentencePiece.
_NEUTRAL_STEPS = (
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    {"type": "Prepend", "prepend": "▁"},
)
# Settings next to tokenizer.json; the later file overrides the earlier.
SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")
# Endings of files in a model's folder that are not part of its tokenizer.
WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf", ".jinja")
# GPT-2's letters of a byte-level vocabulary: visible Latin-1 characters for themselves, the others from U+0100 on.
VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
HIDDEN = [byte for byte in range(256) if byte not in VISIBLE]
BYTE_OF_LETTER = {chr(byte): byte for byte in VISIBLE} | {chr(256 + n): byte for n, byte in enumerate(HIDDEN)}
ROLES = {"bos": "bos_token", "eos": "eos_token", "pad": "pad_token"}


class HuggingFaceTokenizer:
    """Tokenizer over the `tokenizers` library, whose encoding is thread-safe."""

    def __init__(self, config: Config, description: dict[str, Any], settings: dict[str, Any]):
        """`description` is the content of tokenizer.json, `settings` that of the files next to it."""
        _add_tokens(description, settings)
        names = {role: text_of(settings.get(key)) for role, key in ROLES.items()}
        ids = _vocabulary(description)
        special_tokens = find_special_tokens(config, names, ids.get)
        self.bos, self.eos, self.pad = special_tokens.bos, special_tokens.eos, special_tokens.pad
        _make_special(
            description, {text: id for text, id in ids.items() if id in (special_tokens.bos, special_tokens.eos)}
        )
        self.vocab_size = max(ids.values()) + 1
        self.special_token_ids = {
            token["content"]: token["id"] for token in description["added_tokens"] if token["special"]
        }
        self.special = frozenset(self.special_token_ids.values())
        self.is_byte_level = (description.get("decoder") or {}).get("type") == "ByteLevel"
        self.chat_template = chat_template(config, settings.get("chat_template"))
        self._description = {**description, "post_processor": None, "truncation": None, "padding": None}
        self._plain = self._make_plain()

    def _make_plain(self) -> Tokenizer:
        random_names = {text: f"{secrets.token_hex(16)}{id}" for text, id in self.special_token_ids.items()}
        plain = Tokenizer.from_str(json.dumps(_rename_tokens(self._description, random_names)))
        for text, id in self.special_token_ids.items():
            if plain.token_to_id(random_names[text]) != id:
                raise ValueError(f"{text} has id {id} in the file, but another one in the tokenizers library")
        return plain

    @cached_property
    def _with_special_tokens(self) -> Tokenizer:
        return Tokenizer.from_str(json.dumps(self._description))

    @cached_property
    def max_token_bytes(self) -> int | None:
        tokens = _vocabulary(self._description)
        return max(len(text.encode()) for text in tokens) if _covers_all_text(self._description) else None

    @cached_property
    def token_widths(self) -> np.ndarray:
        is_byte_level = any(step.get("type") == "ByteLevel" for step in _steps(self._description))
        added = {token["id"]: token["content"] for token in self._description["added_tokens"]}
        widths = np.zeros(self.vocab_size, np.int32)
        for text, id in _vocabulary(self._description).items():
            if id in added:
                widths[id] = 0 if id in self.special else len(added[id].encode())
            else:
                # A letter of the byte-level alphabet is one byte.
                widths[id] = len(text) if is_byte_level else width_of_piece(text)
        return widths

    @property
    def description(self) -> dict[str, Any]:
        """The tokenizer in the format of tokenizer.json."""
        return self._description

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json."""
        (folder / "tokenizer.json").write_text(json.dumps(self._description), encoding="utf-8")
        names = {id: text for text, id in self.special_token_ids.items()}
        special_tokens = {
            ROLES[role]: names.get(id) for role, id in (("bos", self.bos), ("eos", self.eos), ("pad", self.pad))
        }
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **special_tokens,
        }
        settings["chat_template"] = self.chat_template
        content = json.dumps({key: value for key, value in settings.items() if value is not None}, indent=1)
        (folder / "tokenizer_config.json").write_text(content, encoding="utf-8")

    @report_failures
    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    @report_failures
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def encode_bytes(self, data: bytes) -> np.ndarray:
        dtype = smallest_id_dtype(self.vocab_size)
        parts = [ids.astype(dtype) for ids in self.encode_batch(list(blocks(data.decode())))]
        return np.concatenate([np.empty(0, dtype), *parts])

    @report_failures
    def encode_with_special_tokens(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        encoding = self._with_special_tokens.encode(text, add_special_tokens=False)
        # Three times as fast as np.array of a list of pairs.
        spans = np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * len(encoding))
        return np.array(encoding.ids, np.int32), spans.reshape(-1, 2)

    def token_bytes(self, id: int) -> bytes:
        return self._token_bytes.get(id, b"")

    @cached_property
    def _token_bytes(self) -> dict[int, bytes]:
        """Bytes of all tokens except special ones: byte-level letters, or text with visible spaces and byte tokens."""
        added = {token["id"]: token["content"].encode() for token in self._description["added_tokens"]}
        decode = _letters_to_bytes if _is_byte_level(self._description) else _piece_to_bytes
        tokens = {id: decode(text) for text, id in _vocabulary(self._description).items() if id not in added}
        return {id: content for id, content in (tokens | added).items() if id not in self.special}

    @report_failures
    def decode(self, ids: Sequence[int]) -> str:
        known = list(ids) if self.special.isdisjoint(ids) else [id for id in ids if id not in self.special]
        text: str = self._plain.decode(known, skip_special_tokens=False)
        return text


def _is_byte_level(description: dict[str, Any]) -> bool:
    return '"ByteLevel"' in json.dumps([description.get("pre_tokenizer"), description.get("decoder")])


def _letters_to_bytes(text: str) -> bytes:
    """Bytes of a byte-level token, in which every byte is a visible letter."""
    return b"".join(bytes([BYTE_OF_LETTER[letter]]) if letter in BYTE_OF_LETTER else letter.encode() for letter in text)


def _piece_to_bytes(text: str) -> bytes:
    """Bytes of a SentencePiece token: <0x0A> is a byte, and a visible space a space."""
    is_byte = len(text) == 6 and text.startswith("<0x") and text.endswith(">")
    return bytes([int(text[3:5], 16)]) if is_byte else text.replace("▁", " ").encode()


def text_of(token: Any) -> str | None:
    """Text of a token in the settings: a string, or a mapping with its `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _vocabulary(description: dict[str, Any]) -> dict[str, int]:
    """Ids of all tokens."""
    vocab = description["model"]["vocab"]
    ids = dict(vocab) if isinstance(vocab, dict) else {piece: id for id, (piece, _) in enumerate(vocab)}
    return ids | {token["content"]: token["id"] for token in description["added_tokens"]}


def _add_tokens(description: dict[str, Any], settings: dict[str, Any]) -> None:
    """Add tokens that only the settings list."""
    added = description["added_tokens"]
    known = {token["id"] for token in added}
    listed = settings.get("added_tokens_decoder", {})
    if not isinstance(listed, dict) or not all(isinstance(token, dict) for token in listed.values()):
        raise ValueError("added_tokens_decoder does not map ids to objects")
    for id, token in listed.items():
        if int(id) not in known:
            added.append(_added_token(int(id), **token))
    added.sort(key=lambda token: token["id"])


def _make_special(description: dict[str, Any], names: dict[str, int]) -> None:
    """Make bos and eos special tokens even if the files do not."""
    added = description["added_tokens"]
    for text, id in names.items():
        matches = [token for token in added if token["content"] == text]
        added += [] if matches else [_added_token(id, text)]
        for token in matches:
            token["special"] = True
    added.sort(key=lambda token: token["id"])


def _added_token(id: int, content: str, **flags: Any) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": id, "content": content, **plain, **{key: value for key, value in flags.items() if key in plain}}


def _rename_tokens(description: dict[str, Any], new_names: dict[str, str]) -> dict[str, Any]:
    """Rename some tokens of a tokenizer; ids stay."""
    model = dict(description["model"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {new_names.get(word, word): id for word, id in model["vocab"].items()}
    else:
        model["vocab"] = [[new_names.get(piece, piece), score] for piece, score in model["vocab"]]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = new_names.get(model["unk_token"], model["unk_token"])
    names = (new_names.get(token["content"], token["content"]) for token in description["added_tokens"])
    added = [{**token, "content": name} for token, name in zip(description["added_tokens"], names, strict=True)]
    return {**description, "model": model, "added_tokens": added}


def _covers_all_text(description: dict[str, Any]) -> bool:
    """Return True if every character of a text is part of a token: no step removes any, and none is unknown."""
    model = description["model"]
    kinds = {str(step.get("type")) for step in _steps(description)}
    removes = any(step.get("behavior") == "Removed" for step in _steps(description))
    strips = any(token.get("lstrip") or token.get("rstrip") for token in description["added_tokens"])
    if model.get("type") != "BPE" or removes or strips or not kinds <= {"ByteLevel", "Split", "Digits", "Metaspace"}:
        return False
    if "ByteLevel" not in kinds and model.get("byte_fallback") is not True:
        return False
    letters = ByteLevel.alphabet() if "ByteLevel" in kinds else [f"<0x{byte:02X}>" for byte in range(256)]
    return all(name in model["vocab"] for name in letters)


def _steps(description: dict[str, Any]) -> list[dict[str, Any]]:
    """Normalizers and pre-tokenizers, without those that replace characters of a text by as many others."""
    found: list[dict[str, Any]] = []
    steps = [description.get("normalizer"), description.get("pre_tokenizer")]
    while steps:
        step = steps.pop()
        if isinstance(step, dict) and step.get("type") == "Sequence":
            inner = step.get("normalizers") or step.get("pretokenizers")
            steps += inner if isinstance(inner, list) else []
        elif isinstance(step, dict) and step not in _NEUTRAL_STEPS:
            found.append(step)
    return found


def _read_object(config: Config, path: Path) -> dict[str, Any]:
    """Read a JSON file with an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise wrong(config, "path", f"cannot be read as a tokenizer: {describe(error)}", str(path)) from None
    if not isinstance(value, dict):
        raise wrong(
            config, "path", f"cannot be read as a tokenizer: found a {type(value).__name__}, not an object", str(path)
        )
    return value


def _settings(config: Config, folder: Path) -> dict[str, Any]:
    """Read the settings files next to tokenizer.json; newer formats override older ones."""
    settings: dict[str, Any] = {}
    for name in SETTINGS:
        path = folder / name
        if path.is_file():
            settings |= _read_object(config, path)
    template = folder / "chat_template.jinja"
    if template.is_file():
        settings["chat_template"] = read_template(template)
    if isinstance(templates := settings.get("chat_template"), list):
        default = (entry["template"] for entry in templates if entry["name"] == "default")
        settings["chat_template"] = next(default, None)
    if not isinstance(settings.get("chat_template"), str | None):
        reason = f"chat_template must be a text, found a value of type {type(settings['chat_template']).__name__}"
        raise wrong(config, "path", reason, str(folder / "tokenizer_config.json"))
    return settings


def _convert(config: Config, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert a folder in another library's format with transformers, never running code from the folder."""
    transformers = need("transformers", f"data.tokenizer.path={config.path}")
    try:
        converted = transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # its converters may raise anything
        reason = f"has no tokenizer.json, and transformers cannot convert it: {str(error).strip().splitlines()[0]}"
        raise wrong(config, "path", reason, config.path, hint=nearby_files(folder)) from None
    if not converted.is_fast:
        hint = "use data.tokenizer.kind=sentencepiece or tiktoken with its vocabulary file"
        raise wrong(config, "path", "has a slow tokenizer, which gives no offsets", config.path, hint=hint)
    settings = {key: getattr(converted, key) for key in ROLES.values()} | {"chat_template": converted.chat_template}
    return json.loads(converted.backend_tokenizer.to_str()), settings


def input_files(config: Config) -> list[Path]:
    """tokenizer.json and the settings next to it; without it, all files of the folder except weights."""
    path = tokenizer_path(config)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        return [file, *(file.parent / name for name in SETTINGS)]
    return sorted(found for found in path.glob("*") if found.suffix not in WEIGHTS)


def build(config: Config) -> HuggingFaceTokenizer:
    assert config.path is not None
    path = tokenizer_path(config)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        accepted = "a folder with tokenizer.json, or that file; it is not downloaded"
        raise wrong(config, "path", "no such file or folder", config.path, accepted=accepted, hint=nearby_files(path))
    if not file.is_file():
        return HuggingFaceTokenizer(config, *_convert(config, path))
    return HuggingFaceTokenizer(config, _read_object(config, file), _settings(config, file.parent))
