"""Schema of data: sources, mixing, tokenizer, packing, loading."""

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


class Fingerprint(Enum):
    sampled = "sampled"
    full = "full"


class Overlong(Enum):
    split = "split"
    truncate = "truncate"
    drop = "drop"


@schema
class Packing(Schema):
    """Packing of documents into sequences of train.seq_len tokens."""

    method: PackingMethod = PackingMethod.auto
    """best_fit and first_fit keep documents whole; concat_then_split cuts them at the end of a sequence; none puts each
    document into its own sequence; auto is best_fit if the record type can be packed."""
    window: int = option(128, ge=1)
    """Size of the packing buffer in sequences; larger wastes less padding but makes resuming slower."""
    max_segments: int | None = option(None, ge=1)
    """Maximum number of documents per sequence. null: unlimited."""
    overlong: Overlong = Overlong.split
    """Documents longer than a sequence: split, truncate or drop (concat_then_split always splits)."""


@schema
class Data(Corpus):
    """A data source or a mixture of sources, as batches of sequences of train.seq_len tokens."""

    sources: dict[str, Corpus] = option({})
    """mixture: sources by a name of your choice."""
    weights: dict[str, float] = option({})
    """mixture: sampling weight of each source; they need not sum to 1. Empty: by temperature."""
    temperature: float = option(1.0, gt=0)
    """mixture without weights: the weight of a source is its number of records to the power 1 / temperature."""
    tokenizer: Tokenizer = section(Tokenizer)
    packing: Packing = section(Packing)
    shuffle: bool = True
    """Shuffle records in a new order each epoch, seeded by run.seed; false keeps their order."""
    streams: int | None = option(None, ge=1)
    """Number of streams into which records are split for reading; fixed when a run resumes on other hosts. null: one
    per process at the start of the run."""
    workers: int = option(0, ge=0)
    """Worker processes that read and tokenize; 0 uses threads of the training process."""
    on_error: OnError = OnError["raise"]
    """Invalid records: raise stops the run and names the record, skip logs and counts it."""
    max_characters: int = option(5_000_000, ge=1)
    """Maximum length of a document. A longer one is an error, because tokenizing it can exhaust memory."""
    cache: str = "~/.cache/maxhydra/data"
    """Cache folder for remote files."""
    fingerprint: Fingerprint = Fingerprint.sampled
    """How files are compared when a run resumes. sampled: sizes, and the content of 64 MiB per source; full: all of the
    content, which reads every file at each start."""
    overfit_batches: int | None = option(None, ge=1)
    """Train and evaluate repeatedly on the first N batches, for debugging. null: on all data."""
    prefetch: int = option(2, ge=0)
    """Batches that are prefetched."""

    def corpora(self) -> dict[str, Corpus]:
        """Return the sources by name; a single source has an empty name."""
        return dict(self.sources) if self.source == "mixture" else {"": self}

    def other_shapes(self, accepted: str, *, task: str, hint: str) -> Iterator[Problem]:
        """Yield problems of sources with a record type that a task does not train on; paths start at the config
        root."""
        for name, corpus in self.corpora().items():
            if corpus.record_type != accepted:
                path = f"data.sources.{name}.record_type" if name else "data.record_type"
                reason = f"is not supported by task={task}"
                yield Problem(path, reason, value=corpus.record_type, accepted=accepted, hint=hint)

    def check(self) -> Iterator[Problem]:
        yield from super().check()
        is_mixture = self.source == "mixture"
        if is_mixture != bool(self.sources):
            reason = "is needed by source=mixture" if is_mixture else f"is not used by source={self.source}"
            yield Problem("sources", reason, value=sorted(self.sources) or None, accepted="one or more sources by name")
        yield from self._check_weights()
        for name, corpus in self.sources.items():
            if corpus.source == "mixture":
                yield Problem(f"sources.{name}.source", "mixtures cannot be nested", value="mixture")
        if self.source in READY_ROWS and self.packing.method is not PackingMethod.auto:
            reason = f"is not used: source={self.source} yields full sequences"
            yield Problem("packing.method", reason, value=self.packing.method, accepted="auto")

    def _check_weights(self) -> Iterator[Problem]:
        for name in self.weights:
            if name not in self.sources:
                yield Problem(
                    f"weights.{name}",
                    "is not a source of data.sources",
                    value=self.weights[name],
                    accepted=", ".join(self.sources) or "none, because there are no sources",
                    hint=did_you_mean(name, self.sources),
                )
            elif not 0 < self.weights[name] < math.inf:
                yield Problem(
                    f"weights.{name}", "is not a positive number", value=self.weights[name], accepted="over 0"
                )
        if missing := [name for name in self.sources if self.weights and name not in self.weights]:
            hint = "set weights for all sources or for none"
            yield Problem("weights", f"has no weight for {', '.join(missing)}", value=self.weights, hint=hint)
