"""Schema of tokenizers."""

from collections.abc import Iterator

from maxhydra.config.declare import Schema, option, schema
from maxhydra.config.errors import Problem


@schema
class Tokenizer(Schema):
    """Text to token ids and back."""

    kind: str = option("byte", one_of="maxhydra.data.tokenizers")
    """byte: UTF-8 bytes plus BOS, EOS and padding tokens; hf: a Hugging Face folder or tokenizer.json; sentencepiece: a
    .model file; tiktoken: a .tiktoken file, with its pattern and special tokens in FILE.json next to it, or the
    name of an encoding; gguf: the tokenizer of a .gguf file."""
    path: str | None = None
    """Folder, file or name of the tokenizer; for gguf also package:NAME of an installed package. byte needs none."""
    add_bos: bool = True
    """Prepend the BOS token to each document, if the tokenizer has one."""
    add_eos: bool = True
    """Append the EOS token to each document, if the tokenizer has one."""
    bos: str | None = None
    """Text of the BOS token. null: as in the tokenizer's files."""
    eos: str | None = None
    """Text of the EOS token. null: as in the tokenizer's files."""
    pad: str | None = None
    """Text of the padding token. null: as in the tokenizer's files, else EOS. Padding is always masked in the loss."""
    chat_template: str | None = None
    """File with a Jinja chat template, or the name of a built-in one: lines, which writes one line per turn and ends
    the assistant's turns with EOS. null: the template in the tokenizer's folder."""

    def check(self) -> Iterator[Problem]:
        if (self.path is None) != (self.kind == "byte"):
            reason = f"is needed by kind={self.kind}" if self.path is None else "is not used by kind=byte"
            yield Problem("path", reason, value=self.path, accepted="a folder, a file or a name")
        for name in ("bos", "eos", "pad"):
            if self.kind == "byte" and getattr(self, name) is not None:
                yield Problem(name, "is not used by kind=byte, which has its own", value=getattr(self, name))
