"""What every kind of tokenizer with files has to find out: begin, end, padding, chat template, a file's place."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.paths import beside
from maxhydra.config.schema.tokenizer import Tokenizer as Config

# Chat templates that ship with the package.
TEMPLATES = Path(__file__).parent / "templates"
# A file is tokenized in blocks, since a tokenizer needs some hundred bytes of memory per character.
BLOCK = 1_000_000


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """The tokens that begin, end and pad."""

    bos: int | None
    eos: int | None
    pad: int


def find_special_tokens(
    config: Config, files: Mapping[str, str | None], ids: Callable[[str], int | None]
) -> SpecialTokens:
    """Begin, end and padding: what the config names, else what the files name, else for padding the end token or 0."""
    found: dict[str, int | None] = {}
    for role in ("bos", "eos", "pad"):
        text = getattr(config, role) or files.get(role)
        found[role] = None if text is None else ids(text)
        if found[role] is None and text is not None:
            raise wrong(config, role, "is no token of the tokenizer", text)
    pad = found["pad"] if found["pad"] is not None else found["eos"] if found["eos"] is not None else 0
    return SpecialTokens(found["bos"], found["eos"], pad)


def chat_template(config: Config, own: str | None) -> str | None:
    """The template that the config names, else the tokenizer's own."""
    if config.chat_template is None:
        return own
    path = Path(config.chat_template).expanduser()
    if path.is_file():
        return path.read_text(encoding="utf-8")
    ours = {template.stem: template for template in TEMPLATES.glob("*.jinja")}
    if config.chat_template not in ours:
        accepted = f"a file, or {', '.join(sorted(ours))}"
        key = "data.tokenizer.chat_template"
        raise ConfigError(
            Problem(key, "no file is there", value=config.chat_template, accepted=accepted, hint=beside(path))
        )
    return ours[config.chat_template].read_text(encoding="utf-8")


def wrong(config: Config, field: str, reason: str, value: object, *, accepted: str = "", hint: str = "") -> ConfigError:
    """A field of the tokenizer that does not fit its files."""
    place = f"{reason} ({config.kind}: {config.path})" if field != "path" else reason
    return ConfigError(Problem(f"data.tokenizer.{field}", place, value=value, accepted=accepted, hint=hint))


def blocks(text: str, size: int | None = None) -> Iterator[str]:
    """A long text in parts of BLOCK characters or a size that each begin a line: few tokens differ from the whole's."""
    start, size = 0, size or BLOCK
    for line in re.finditer(r"\n(?=\S)", text):
        if line.end() - start >= size:
            yield text[start : line.end()]
            start = line.end()
    if start < len(text):
        yield text[start:]


def smallest(vocab_size: int) -> type[np.unsignedinteger]:
    """The smallest type that holds every id."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def special_token_pattern(names: Mapping[str, int]) -> re.Pattern[str] | None:
    """Finds the names of special tokens in a text, the longest first."""
    ordered = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def character_spans(text: str, widths: np.ndarray) -> np.ndarray:
    """[n, 2]: the characters of tokens that are so many bytes of a text each; a token may hold part of a character."""
    octets = np.frombuffer(text.encode(), np.uint8)
    character = np.cumsum((octets & 0xC0) != 0x80) - 1
    ends = np.cumsum(widths)
    return np.stack([character[ends - widths], character[ends - 1] + 1], 1).astype(np.int64)
