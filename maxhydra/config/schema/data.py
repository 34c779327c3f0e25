"""Where the tokens come from, and how they become batches."""

import math
from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Schema, option, schema, section
from maxhydra.config.errors import Problem, did_you_mean
from maxhydra.config.schema.corpus import READY_ROWS, Corpus
from maxhydra.config.schema.tokenizer import Tokenizer

OnError = Enum("OnError", ["raise", "skip"])


class PackingMethod(Enum):
    auto = "auto"
    none = "none"
    first_fit = "first_fit"
    best_fit = "best_fit"
    concat_then_split = "concat_then_split"


class Overlong(Enum):
    split = "split"
    truncate = "truncate"
    drop = "drop"


@schema
class Packing(Schema):
    """How documents of any length become sequences of train.seq_len tokens."""

    method: PackingMethod = PackingMethod.auto
    """best_fit and first_fit keep documents whole; concat_then_split cuts them at the sequence's end; none gives each
    its own sequence; auto is best_fit where the shape can be packed."""
    window: int = option(128, ge=1)
    """Sequences' worth of tokens that are packed together; more fills better, and costs more to resume."""
    max_segments: int | None = option(None, ge=1)
    """Documents in a sequence at most."""
    overlong: Overlong = Overlong.split
    """A document over the sequence: split into pieces, truncate its end, or drop it (concat_then_split always
    splits)."""


@schema
class Data(Corpus):
    """A source, or a mixture of them, as batches of sequences of train.seq_len tokens."""

    sources: dict[str, Corpus] = option({})
    """mixture: the sources by a name of your choice."""
    weights: dict[str, float] = option({})
    """mixture: share of the sequences by source; they need not sum to 1. Empty: by temperature."""
    temperature: float = option(1.0, gt=0)
    """mixture without weights: a source's share goes with its number of records to the power 1 / temperature."""
    tokenizer: Tokenizer = section(Tokenizer)
    packing: Packing = section(Packing)
    shuffle: bool = True
    """Visit the records in a new random order each epoch, drawn from run.seed; false keeps their order."""
    streams: int | None = option(None, ge=1)
    """Shares into which records are split for reading, kept when a run resumes on other hosts. null: one per process
    at the run's start."""
    workers: int = option(0, ge=0)
    """Processes that read and tokenize; 0 does it in threads of the training process."""
    on_error: OnError = OnError["raise"]
    """A record that cannot be used: raise stops the run and says which, skip counts and logs it."""
    max_characters: int = option(5_000_000, ge=1)
    """Longest document; one over it is an error, since tokenizing it can take all memory."""
    cache: str = "~/.cache/maxhydra/data"
    """Folder for copies of remote files."""
    overfit_batches: int | None = option(None, ge=1)
    """Train and evaluate on the first so many batches again and again. null: on all of them."""
    prefetch: int = option(2, ge=0)
    """Batches prepared ahead of the step."""

    def corpora(self) -> dict[str, Corpus]:
        """The sources by name; the name of one that is no mixture is empty."""
        return dict(self.sources) if self.source == "mixture" else {"": self}

    def other_shapes(self, accepted: str, *, task: str, hint: str) -> Iterator[Problem]:
        """Sources, seen from the root of the config, whose records do not mean what a task learns from."""
        for name, corpus in self.corpora().items():
            if corpus.record_type != accepted:
                path = f"data.sources.{name}.record_type" if name else "data.record_type"
                reason = f"is not what task={task} learns from"
                yield Problem(path, reason, value=corpus.record_type, accepted=accepted, hint=hint)

    def check(self) -> Iterator[Problem]:
        yield from super().check()
        is_mixture = self.source == "mixture"
        if is_mixture != bool(self.sources):
            reason = "is needed by source=mixture" if is_mixture else f"is not used by source={self.source}"
            yield Problem("sources", reason, value=self.sources or None, accepted="a source or more, by name")
        yield from self._check_weights()
        for name, corpus in self.sources.items():
            if corpus.source == "mixture":
                yield Problem(f"sources.{name}.source", "is within a mixture already", value="mixture")
        if self.source in READY_ROWS and self.packing.method is not PackingMethod.auto:
            reason = f"has no use: source={self.source} gives whole sequences"
            yield Problem("packing.method", reason, value=self.packing.method, accepted="auto")

    def _check_weights(self) -> Iterator[Problem]:
        for name in self.weights:
            if name not in self.sources:
                yield Problem(
                    f"weights.{name}",
                    "names no source of data.sources",
                    value=self.weights[name],
                    accepted=", ".join(self.sources) or "none: there are no sources",
                    hint=did_you_mean(name, self.sources),
                )
            elif not 0 < self.weights[name] < math.inf:
                yield Problem(f"weights.{name}", "is no number above 0", value=self.weights[name], accepted="above 0")
        if left_out := [name for name in self.sources if self.weights and name not in self.weights]:
            hint = "give every source a weight, or none"
            yield Problem("weights", f"leaves out {', '.join(left_out)}", value=self.weights, hint=hint)
