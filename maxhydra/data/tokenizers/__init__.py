"""Tokenizers: text to token ids and back. One module per kind, chosen by data.tokenizer.kind.

Each module has `build(config) -> Tokenizer`, and `input_files(config)` if it reads files. Helpers that the kinds share
are here too: special tokens, chat template source, blocks of text, id dtypes.
"""

import dataclasses
import importlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache, wraps
from itertools import groupby
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.data import Data
from maxhydra.config.schema.data import Tokenizer as Config
from maxhydra.config.values import nearby_files
from maxhydra.data.rows import RowSpec
from maxhydra.modelfiles import local_path, model_path

P = ParamSpec("P")
T = TypeVar("T")
# The largest published vocabularies have 300,000 tokens.
MAX_VOCAB_SIZE = 2**24


class Tokenizer(Protocol):
    """Interface of all tokenizers. Text in, ids out: no bos or eos token is added here."""

    vocab_size: int
    bos: int | None
    eos: int | None
    pad: int
    chat_template: str | None
    """Jinja source of the tokenizer's chat template."""
    special: frozenset[int]
    """Ids of special tokens, such as the end of a turn."""
    special_token_ids: Mapping[str, int]
    """Ids of special tokens by name, as `encode_with_special_tokens` recognizes them in text."""

    @property
    def is_byte_level(self) -> bool:
        """Whether ids decode to their concatenated bytes, so that text after a complete character is independent."""
        ...

    @property
    def max_token_bytes(self) -> int | None:
        """Longest text of one token, in UTF-8 bytes; None if a token can stand for text of any length."""
        ...

    @property
    def token_widths(self) -> np.ndarray:
        """UTF-8 bytes that each id adds to a decoded text, int32 [vocab_size]; 0 for special tokens."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokenize a text; names of special tokens in it are plain text."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Tokenize many texts into int arrays."""
        ...

    def encode_bytes(self, data: bytes) -> np.ndarray:
        """Tokenize a whole file, into the smallest dtype that holds the ids."""
        ...

    def encode_with_special_tokens(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Tokenize a text in which names of special tokens become those tokens; also return character spans [n, 2]."""
        ...

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes of one token in the middle of a text; empty for special tokens and ids without a token."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text; special tokens and ids without a token, which a model may sample, are omitted."""
        ...


def load_tokenizer(data: Data) -> Tokenizer:
    """Load the tokenizer that the config names; cached."""
    return _load(_Key(data.tokenizer))


@dataclasses.dataclass(frozen=True, eq=False)
class _Key:
    """Cache key of a tokenizer config, by value: loading may take a second, and every part of a pipeline needs it."""

    config: Config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.config == other.config

    def __hash__(self) -> int:
        return hash(dataclasses.astuple(self.config))


@lru_cache(maxsize=4)
def _load(key: _Key) -> Tokenizer:
    module = importlib.import_module(f"{__name__}.{key.config.kind}")
    try:
        built: Tokenizer = module.build(key.config)
        if not 0 < built.vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(f"its largest token id is {built.vocab_size - 1}; accepted: 0 to {MAX_VOCAB_SIZE - 1}")
    except BaseException as error:  # a damaged file fails anywhere in our code or in that of the library
        if isinstance(error, ConfigError) or not is_failure(error):
            raise
        reason = f"cannot be read as a tokenizer: {describe(error)}"
        raise ConfigError(Problem("data.tokenizer.path", reason, value=key.config.path)) from None
    return built


class TokenizerError(ConfigError):
    """A text on which the tokenizer's library fails, for example because a regex of the tokenizer backtracks."""


def report_failures(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method that calls a tokenizer library, so that its failures become TokenizerErrors."""

    @wraps(method)
    def reporting(*args: P.args, **options: P.kwargs) -> T:
        try:
            return method(*args, **options)
        except BaseException as error:
            if isinstance(error, ConfigError) or not is_failure(error):
                raise
            reason = f"the tokenizer failed on a text: {describe(error)}"
            raise TokenizerError(Problem("data.tokenizer.path", reason)) from None

    return reporting


def is_failure(error: BaseException) -> bool:
    """Return True for an exception, or a panic of a library in Rust, which is not an Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def describe(error: BaseException) -> str:
    """First line of an error, shortened: it may contain a part of the file."""
    kind = "" if type(error) is Exception else f"{type(error).__name__}: "
    return kind + (str(error).strip().splitlines() or ["no reason given"])[0][:200]


def input_files(config: Config) -> list[Path]:
    """Files that the tokenizer reads, apart from a chat template; none if it is built in."""
    find: Callable[[Config], list[Path]]
    find = getattr(importlib.import_module(f"{__name__}.{config.kind}"), "input_files", lambda config: [])
    return [path for path in find(config) if path.is_file()]


def tokenizer_path(config: Config) -> Path:
    """The local file or folder that data.tokenizer.path names, which may be a URL or a repository."""
    return model_path("data.tokenizer.path", config.path or "", weights=False)


def template_files(config: Config) -> list[Path]:
    """The file of the chat template: named by the config, built in, or next to tokenizer.json."""
    path = tokenizer_path(config)
    default = (path if path.is_dir() else path.parent) / "chat_template.jinja"
    named = config.chat_template
    paths = [default] if named is None else [local_path(TEMPLATE, named), TEMPLATES / f"{named}.jinja"]
    return [found for found in paths if found.is_file() and (named is not None or config.kind == "hf")][:1]


def check_vocabulary(tokenizer: Tokenizer, data: Data, spec: RowSpec) -> None:
    """Raise if the model's vocabulary is smaller than the tokenizer's."""
    if tokenizer.vocab_size > spec.vocab_size:
        reason = f"is smaller than the {tokenizer.vocab_size} tokens of data.tokenizer.kind={data.tokenizer.kind}"
        accepted = f"{tokenizer.vocab_size} or more"
        raise ConfigError(Problem("model.vocab_size", reason, value=spec.vocab_size, accepted=accepted))


TEMPLATE = "data.tokenizer.chat_template"
# Chat templates that ship with the package.
TEMPLATES = Path(__file__).parents[1] / "templates"
BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")
# A file is tokenized in blocks of this many characters: a tokenizer needs a few hundred bytes of memory per character.
BLOCK = 1_000_000


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """Ids of the beginning-of-sequence, end-of-sequence and padding tokens."""

    bos: int | None
    eos: int | None
    pad: int


def find_special_tokens(
    config: Config, files: Mapping[str, str | None], ids: Callable[[str], int | None]
) -> SpecialTokens:
    """Resolve bos, eos and pad: from the config, else from the tokenizer's files; pad falls back to eos, then to 0."""
    found: dict[str, int | None] = {}
    for role in ("bos", "eos", "pad"):
        text = getattr(config, role) or files.get(role)
        found[role] = None if text is None else ids(text)
        if found[role] is None and text is not None:
            raise wrong(config, role, "is not a token of the tokenizer", text)
    pad = found["pad"] if found["pad"] is not None else found["eos"] if found["eos"] is not None else 0
    return SpecialTokens(found["bos"], found["eos"], pad)


def chat_template(config: Config, own: str | None) -> str | None:
    """Return the template source that the config names, else the tokenizer's own."""
    if config.chat_template is None:
        return own
    path = local_path(TEMPLATE, config.chat_template)
    if path.is_file():
        return read_template(path)
    built_in = {template.stem: template for template in TEMPLATES.glob("*.jinja")}
    if config.chat_template not in built_in:
        accepted = f"a file, or {', '.join(sorted(built_in))}"
        raise ConfigError(
            Problem(
                TEMPLATE,
                "no such file or built-in template",
                value=config.chat_template,
                accepted=accepted,
                hint=nearby_files(path),
            )
        )
    return built_in[config.chat_template].read_text(encoding="utf-8")


def read_template(path: Path) -> str:
    """Read a template file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8: byte {error.start} of the file is {error.object[error.start]:#04x}"
        raise ConfigError(Problem(TEMPLATE, reason, value=str(path))) from None


def wrong(config: Config, field: str, reason: str, value: object, *, accepted: str = "", hint: str = "") -> ConfigError:
    """Error for a tokenizer field that does not fit the tokenizer's files."""
    detail = f"{reason} ({config.kind}: {config.path})" if field != "path" else reason
    return ConfigError(Problem(f"data.tokenizer.{field}", detail, value=value, accepted=accepted, hint=hint))


def blocks(text: str, size: int | None = None) -> Iterator[str]:
    """Split a long text at line starts into blocks of at least BLOCK (or `size`) characters.

    Only few tokens differ from those of the whole text.
    """
    start, size = 0, size or BLOCK
    for line in re.finditer(r"\n(?=\S)", text):
        if line.end() - start >= size:
            yield text[start : line.end()]
            start = line.end()
    if start < len(text):
        yield text[start:]


def smallest_id_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """Smallest unsigned dtype that holds every id."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def special_token_pattern(names: Collection[str]) -> re.Pattern[str] | None:
    """Regex that finds the special tokens in a text, the longest first; None if there are none.

    Tokens with a common beginning share it: as plain alternatives, the 256 reserved tokens of Llama 3 would take 256
    attempts at every `<` of a text.
    """
    return re.compile(_prefix_tree(sorted(names))) if names else None


def _prefix_tree(names: Sequence[str]) -> str:
    """Regex of sorted, distinct texts that branches where they differ."""
    if len(names) == 1:
        return re.escape(names[0])
    first, last = names[0], names[-1]
    common = next((index for index, letter in enumerate(first) if letter != last[index : index + 1]), len(first))
    rest = [name[common:] for name in names]
    groups = [list(group) for _, group in groupby(filter(None, rest), key=lambda text: text[0])]
    return f"{re.escape(first[:common])}(?:{'|'.join(map(_prefix_tree, groups))}){'?' if '' in rest else ''}"


def width_of_piece(piece: str) -> int:
    """UTF-8 bytes of the text of a SentencePiece token, in which ▁ is a space and <0x0A> a byte."""
    return 1 if BYTE_PIECE.fullmatch(piece) else len(piece.replace("▁", " ").encode())


def count_token_bytes(tokenizer: Tokenizer, ids: np.ndarray, text_bytes: int) -> np.ndarray:
    """Bytes of a text that each of its tokens stands for, int32 [n]; their sum is `text_bytes`.

    A tokenizer that normalizes text or adds a space has tokens whose own bytes do not sum to those of the text. They
    are scaled, so that bits per byte of whole texts do not depend on the tokenizer.
    """
    widths = tokenizer.token_widths[ids]
    total = int(widths.sum(dtype=np.int64))
    if total == text_bytes:
        return widths
    if total == 0:  # unknown tokens only
        widths, total = np.ones(len(ids), np.int32), max(1, len(ids))
    ends = np.rint(np.cumsum(widths, dtype=np.int64) * (text_bytes / total)).astype(np.int32)
    return np.diff(ends, prepend=np.int32(0))


def character_spans(text: str, widths: np.ndarray) -> np.ndarray:
    """Character span [n, 2] of each token, given its width in UTF-8 bytes; a token may hold part of a character."""
    octets = np.frombuffer(text.encode(), np.uint8)
    character = np.cumsum((octets & 0xC0) != 0x80) - 1
    ends = np.cumsum(widths)
    return np.stack([character[ends - widths], character[ends - 1] + 1], 1).astype(np.int64)
