"""Fields of the tasks that prepare data: task=tokenize, teacher_logits and train_tokenizer."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import option, schema
from maxhydra.config.errors import Problem
from maxhydra.config.schema.run import Task


@schema
class TokenizeTask(Task):
    """Tokenizes a source in advance, so that training does not have to."""

    output: str = option()
    """Output folder for shards and index.json; an incomplete folder is resumed."""
    shards: int = option(8, ge=1)
    """Number of files, with about the same number of records each."""
    workers: int | None = option(None, ge=1)
    """Processes, each writing one shard at a time. null: one per core."""


@schema
class TeacherLogitsTask(Task):
    """Writes the top next-token logits of the model in checkpoint.load_parameters, for task=distill."""

    output: str = option()
    """Output folder for shards and index.json; an incomplete folder is resumed."""
    shards: int = option(8, ge=1)
    """Number of files, with about the same number of records each; an unfinished file is written again."""
    k: int = option(64, ge=1)
    """Most likely tokens that are stored per position, with their log-probabilities in float16."""


class TokenizerModel(Enum):
    bpe = "bpe"
    unigram = "unigram"
    sentencepiece = "sentencepiece"


@schema
class TrainTokenizerTask(Task):
    """Trains a tokenizer on the texts of a source."""

    model: TokenizerModel = TokenizerModel.bpe
    """bpe and unigram work on bytes, so that any text can be encoded, and write a folder for data.tokenizer.kind=hf;
    sentencepiece writes a .model file for data.tokenizer.kind=sentencepiece."""
    vocab_size: int = option(32768, ge=1)
    """Vocabulary size."""
    bos: str | None = "<|bos|>"
    """BOS token. null: none."""
    eos: str | None = "<|eos|>"
    """EOS token. null: none."""
    pad: str | None = "<|pad|>"
    """Padding token. null: none."""
    special: list[str] = option([])
    """Additional special tokens, such as those of a chat template."""
    min_frequency: int = option(2, ge=1)
    """bpe: minimum frequency of a pair to become a token."""
    max_characters: int = option(1_000_000_000, ge=1)
    """Maximum number of characters to train on."""
    output: str | None = None
    """Output folder, which must not exist yet. null: tokenizer in the run's folder."""

    def marks(self) -> list[str]:
        """Return all special tokens in the order of their ids."""
        return [name for name in (self.bos, self.eos, self.pad) if name is not None] + self.special

    def check(self) -> Iterator[Problem]:
        needed = 256 + len(self.marks())
        if self.vocab_size < needed:
            reason = f"is too small for 256 bytes and {len(self.marks())} special tokens"
            yield Problem("vocab_size", reason, value=self.vocab_size, accepted=f"{needed} or more")
        twice = {name for name in self.marks() if self.marks().count(name) > 1}
        for name in sorted(twice):
            yield Problem("special", f"contains {name!r} twice", value=self.special)
