"""Helpers shared by the tokenizer kinds: special tokens, chat template source, blocks of text, id dtypes."""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.paths import nearby_files
from maxhydra.config.schema.tokenizer import Tokenizer as Config

# Chat templates that ship with the package.
TEMPLATES = Path(__file__).parent / "templates"
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
    path = Path(config.chat_template).expanduser()
    if path.is_file():
        return read_template(path)
    built_in = {template.stem: template for template in TEMPLATES.glob("*.jinja")}
    if config.chat_template not in built_in:
        accepted = f"a file, or {', '.join(sorted(built_in))}"
        key = "data.tokenizer.chat_template"
        raise ConfigError(
            Problem(
                key,
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
        raise ConfigError(Problem("data.tokenizer.chat_template", reason, value=str(path))) from None


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


def character_spans(text: str, widths: np.ndarray) -> np.ndarray:
    """Character span [n, 2] of each token, given its width in UTF-8 bytes; a token may hold part of a character."""
    octets = np.frombuffer(text.encode(), np.uint8)
    character = np.cumsum((octets & 0xC0) != 0x80) - 1
    ends = np.cumsum(widths)
    return np.stack([character[ends - widths], character[ends - 1] + 1], 1).astype(np.int64)
