"""Fields of task=train_tokenizer."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import option, schema
from maxhydra.config.errors import Problem
from maxhydra.config.schema.run import Task


class TokenizerModel(Enum):
    bpe = "bpe"
    unigram = "unigram"
    sentencepiece = "sentencepiece"


@schema
class TrainTokenizerTask(Task):
    """Trains a tokenizer on the texts of a source."""

    model: TokenizerModel = TokenizerModel.bpe
    """bpe and unigram work on bytes, so that any text has tokens, and write a folder for data.tokenizer.kind=hf;
    sentencepiece writes a .model file for data.tokenizer.kind=sentencepiece."""
    vocab_size: int = option(32768, ge=1)
    """Tokens in all."""
    bos: str | None = "<|bos|>"
    """Begin token. null: none."""
    eos: str | None = "<|eos|>"
    """End token. null: none."""
    pad: str | None = "<|pad|>"
    """Padding token. null: none."""
    special: list[str] = option([])
    """More special tokens, such as the marks of a chat template."""
    min_frequency: int = option(2, ge=1)
    """bpe: how often a pair must be seen to become a token."""
    max_characters: int = option(1_000_000_000, ge=1)
    """Characters of text to learn from, at most."""
    output: str | None = None
    """Folder to write, which must not be there yet. null: tokenizer, in the run's folder."""

    def marks(self) -> list[str]:
        """Every special token, in the order of their ids."""
        return [name for name in (self.bos, self.eos, self.pad) if name is not None] + self.special

    def check(self) -> Iterator[Problem]:
        needed = 256 + len(self.marks())
        if self.vocab_size < needed:
            reason = f"is under the 256 bytes and {len(self.marks())} special tokens"
            yield Problem("vocab_size", reason, value=self.vocab_size, accepted=f"{needed} or more")
        twice = {name for name in self.marks() if self.marks().count(name) > 1}
        for name in sorted(twice):
            yield Problem("special", f"names {name!r} a second time", value=self.special)
