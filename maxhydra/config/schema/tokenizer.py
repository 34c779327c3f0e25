"""Text to token ids and back."""

from collections.abc import Iterator

from maxhydra.config.declare import Schema, option, schema
from maxhydra.config.errors import Problem


@schema
class Tokenizer(Schema):
    """Text to token ids and back."""

    kind: str = option("byte", one_of="maxhydra.data.tokenizers")
    """byte: UTF-8 bytes plus begin, end and padding; hf: a folder or tokenizer.json of Hugging Face; sentencepiece: a
    .model file; tiktoken: a .tiktoken file, with its pattern and special tokens in FILE.json beside it, or an
    encoding's name; gguf: the one inside a .gguf file."""
    path: str | None = None
    """Folder, file or name that the kind needs, for gguf also package:NAME of an installed package; byte needs none."""
    add_bos: bool = True
    """Begin each document with the begin token, where the tokenizer has one."""
    add_eos: bool = True
    """End each document with the end token, where the tokenizer has one."""
    bos: str | None = None
    """Begin token by its text. null: the one that the tokenizer's files name."""
    eos: str | None = None
    """End token by its text. null: the one that the tokenizer's files name."""
    pad: str | None = None
    """Padding token by its text. null: the one that the files name, else the end token; padding never decides what is
    learned."""
    chat_template: str | None = None
    """File with a Jinja chat template, or the name of one that ships with the package: lines, a line for each turn but
    the assistant's, which end with the end token. null: the one in the tokenizer's folder."""

    def check(self) -> Iterator[Problem]:
        if (self.path is None) != (self.kind == "byte"):
            reason = f"is needed by kind={self.kind}" if self.path is None else "is not used by kind=byte"
            yield Problem("path", reason, value=self.path, accepted="a folder, a file or a name")
        for name in ("bos", "eos", "pad"):
            if self.kind == "byte" and getattr(self, name) is not None:
                yield Problem(name, "is not used by kind=byte, which has its own", value=getattr(self, name))
