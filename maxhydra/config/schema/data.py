"""Schema of data: sources and the type of their records, mixing, tokenizer, packing, loading."""

import dataclasses
import math
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from maxhydra.config.declare import Options, PlugInUse, Schema, option, schema, section
from maxhydra.config.errors import Problem, did_you_mean
from maxhydra.config.values import ACCEPTED, matches, nearby_files, parts
from maxhydra.record.storage import is_remote


@schema
class Tokenizer(Schema):
    """Text to token ids and back."""

    kind: str = option("byte", one_of="maxhydra.data.tokenizers")
    """byte: UTF-8 bytes plus BOS, EOS and padding tokens; hf: a Hugging Face folder or tokenizer.json; sentencepiece: a
    .model file; tiktoken: a .tiktoken file, with its pattern and special tokens in FILE.json next to it, or the
    name of an encoding; gguf: the tokenizer of a .gguf file."""
    path: str | None = None
    """Folder, file or name of the tokenizer; for hf also a repository ORG/NAME[@REVISION] on the Hugging Face hub, for
    gguf package:NAME of an installed package. byte needs none."""
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


# Sources that yield full rows of tokens, without a record type and without packing.
READY_ROWS = ("demo", "text", "synthetic", "olmo")

# Sources and record types whose evaluation data has text, so that its bytes can be counted.
TEXT_FILES, TEXT_RECORDS = ("demo", "text"), ("text", "chat")

# Sources that need a name, and what it refers to.
BUILDER = "a builder, such as c4/en:3.0.1"
NAMED = {"tfds": BUILDER, "c4_mlperf": BUILDER, "reasoning_gym": "a task, such as chain_sum"}

# Sources that read files, and sources that need neither files nor a name.
FILES = ("text", "grain", "olmo")
UNNAMED = ("demo", "synthetic", "arithmetic", "shapes", "tones", "mixture")

# Sources that do not use a field which names data. Ignoring it would silently train or evaluate on other data.
UNUSED = {
    "path": (*UNNAMED, *NAMED),
    "eval_path": (*UNNAMED, *NAMED),
    "name": (*UNNAMED, *FILES),
    "eval_name": (*UNNAMED, *FILES, "reasoning_gym"),
    "eval_split": (*UNNAMED, *FILES, "reasoning_gym"),
}

# Names of data.eval_sets, which are part of metric names.
SET_NAME = re.compile(r"[\w.-]+")

# Operators of source=arithmetic.
OPERATORS = ("+", "-", "*")

# Roles of the columns that a record type reads.
ROLES = {
    "text": ("text",),
    "tokens": ("tokens",),
    "chat": ("messages", "tools"),
    "image_chat": ("messages", "images", "videos"),
    "audio_chat": ("messages", "audios"),
    "preference": ("prompt", "chosen", "rejected", "margin"),
    "image_preference": ("prompt", "chosen", "rejected", "margin", "images"),
    "labeled": ("prompt", "completion", "label"),
    "scored": ("prompt", "completion", "score"),
    "prompts": ("prompt", "answer"),
    "teacher": ("tokens", "teacher_ids", "teacher_logits"),
}

# Record types whose rows have images, those whose rows have audio, and those that are conversations.
IMAGE_TYPES, AUDIO_TYPES = ("image_chat", "image_preference"), ("audio_chat",)
CHAT_TYPES = ("chat", "image_chat", "audio_chat")


class FileFormat(Enum):
    auto = "auto"
    arrayrecord = "arrayrecord"
    parquet = "parquet"
    tfrecord = "tfrecord"
    jsonl = "jsonl"


@schema
class Corpus(Schema):
    """A source of records."""

    source: str = option("demo", one_of="maxhydra.data.sources", plug_in=PlugInUse.here)
    """demo: plays of Shakespeare, included in the package; text: your own UTF-8 files; grain: files of records; hf:
    Hugging Face datasets; tfds: TensorFlow Datasets builds; c4_mlperf: C4 as MLPerf uses it; olmo: token shards
    with an index; arithmetic: generated problems with solutions; reasoning_gym: generated problems of its tasks;
    shapes, tones: generated images or tones with questions; synthetic: random tokens; mixture: several of these;
    package.module:function: a source of yours, called as function(corpus, data, spec) with its options."""
    options: Options = section(Options)
    path: str | None = None
    """text, grain, hf, olmo (index): a file, folder or glob pattern, several separated by `;`, local or any fsspec
    URL such as gs://bucket/x-*.array_record."""
    eval_path: str | None = None
    """Files to evaluate on. null: eval_fraction of the data in path."""
    format: FileFormat = FileFormat.auto
    """grain: file format; auto decides by the file extension."""
    name: str | None = None
    """hf: dataset on the hub or folder of a saved one; tfds: builder, such as c4/en:3.0.1;
    reasoning_gym: task, such as chain_sum."""
    config: str | None = None
    """hf: configuration of the dataset."""
    split: str = "train"
    """hf, tfds: split to train on."""
    eval_split: str | None = None
    """hf, tfds: split to evaluate on. null: eval_fraction of split."""
    eval_name: str | None = None
    """hf, tfds: dataset or builder of eval_split. null: name."""
    data_dir: str | None = None
    """hf: subfolder of the dataset; tfds: folder of the prepared datasets."""
    streaming: bool = False
    """hf: stream over the network during training instead of downloading first."""
    remap_from: str | None = None
    """olmo: prefix of the paths in the index to replace, such as gs://bucket/."""
    remap_to: str | None = None
    """olmo: replacement for remap_from, such as /mnt/bucket/."""
    repetition_filter: bool = True
    """olmo: exclude sequences from the loss in which an n-gram of 1 to 13 tokens repeats 32 times or more in a row."""
    digits: int = option(2, ge=1, le=9)
    """arithmetic: maximum digits of the numbers."""
    operators: list[str] = option(["+"])
    """arithmetic: a subset of + - *."""
    problems: int | None = option(None, ge=2)
    """arithmetic: problems to train on; null: all except the held-out ones. reasoning_gym: problems to generate, of
    which eval_fraction is held out; null: 100,000. shapes, tones: examples to generate, likewise; null: 20,000."""
    eval_fraction: float = option(0.05, gt=0, lt=1)
    """Fraction at the end that is held out for evaluation, if no eval files or split are given."""
    record_type: str = option("text", one_of="maxhydra.data.record_types")
    """Content of a record: text; tokens; chat (messages, loss on the assistant's turns); image_chat and audio_chat
    (messages with images or audio); preference (chosen, rejected); image_preference (the same with images); labeled
    (prompt, completion, label); prompts (prompt, answer); teacher (tokens with a teacher's top logits)."""
    columns: dict[str, str] = option({})
    """Column names that differ from the role, such as text: content."""
    formatting: str | None = option(None, plug_in=PlugInUse.worker)
    """Function `package.module:function` that converts a record (dict) to one of record_type."""

    def check(self) -> Iterator[Problem]:
        yield from self._check_record_type()
        needs_path = self.source in FILES
        if needs_path and self.path is None:
            accepted = "a file, a folder or a glob pattern"
            yield Problem("path", f"is needed by source={self.source}", value=None, accepted=accepted)
        if needs_path:
            yield from self._check_exists("path")
            yield from self._check_exists("eval_path")
        yield from self._check_unused()
        if self.source == "hf" and self.path is None and self.name is None:
            yield Problem("name", "or path is needed by source=hf", value=None, accepted="a dataset's name or folder")
        if self.source in NAMED and self.name is None:
            yield Problem("name", f"is needed by source={self.source}", value=None, accepted=NAMED[self.source])
        if not self.operators or len({*self.operators} & {*OPERATORS}) < len(self.operators):
            accepted = f"a subset of {' '.join(OPERATORS)}"
            yield Problem("operators", "is not a set of supported operators", value=self.operators, accepted=accepted)
        if (self.remap_from is None) != (self.remap_to is None):
            missing = "remap_from" if self.remap_from is None else "remap_to"
            yield Problem(missing, "is needed, because the other one is set", value=None)

    @property
    def has_text(self) -> bool:
        """Whether the evaluation data has text rather than only tokens."""
        is_record = self.source not in (*READY_ROWS, "c4_mlperf", "mixture")
        return self.source in TEXT_FILES or (is_record and self.record_type in TEXT_RECORDS)

    def _check_unused(self) -> Iterator[Problem]:
        for field, sources in UNUSED.items():
            value = getattr(self, field)
            if self.source in sources and value is not None:
                others = "data=text or data=grain to read your own files" if "path" in field else "data=hf or data=tfds"
                yield Problem(field, f"is not used by source={self.source}", value=value, hint=f"use {others}")

    def _check_exists(self, field: str) -> Iterator[Problem]:
        """Yield problems of local paths that do not exist; contents and remote files are checked when opened."""
        for name in parts(getattr(self, field) or ""):
            if not is_remote(name) and not matches(name):
                hint = nearby_files(Path(name).expanduser())
                yield Problem(field, "no such file", value=name, accepted=ACCEPTED, hint=hint)

    def _check_record_type(self) -> Iterator[Problem]:
        if self.source in READY_ROWS and self.record_type != "text":
            reason = f"is not supported by source={self.source}"
            yield Problem("record_type", reason, value=self.record_type, accepted="text")
        for role in self.columns:
            if role not in ROLES[self.record_type]:
                yield Problem(
                    f"columns.{role}",
                    f"is not a role of record_type={self.record_type}",
                    value=self.columns[role],
                    accepted=", ".join(ROLES[self.record_type]),
                    hint=did_you_mean(role, ROLES[self.record_type]),
                )


OnError = Enum("OnError", ["raise", "skip"])


class PackingMethod(Enum):
    auto = "auto"
    none = "none"
    first_fit = "first_fit"
    best_fit = "best_fit"
    concat_then_split = "concat_then_split"


class LossOn(Enum):
    assistant = "assistant"
    last_turn = "last_turn"
    all = "all"


class Thinking(Enum):
    keep = "keep"
    drop = "drop"
    mask = "mask"


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
    document into its own sequence; auto is best_fit if the record type can be packed and has no images."""
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
    loss_on: LossOn = LossOn.assistant
    """Conversations: turns with loss: all of the assistant's, only its last one, or the whole conversation."""
    thinking: Thinking = Thinking.keep
    """Conversations: reasoning of the assistant, in <think> </think> or a separate field of its messages: keep trains
    on it, mask keeps it without loss, drop removes it."""
    max_images: int = option(1, ge=1, le=1024)
    """Record types with images: most images of a sequence, packed or not; records with more are invalid."""
    max_clips: int = option(1, ge=1, le=1024)
    """record_type=audio_chat: audio clips of a sequence, as data.max_images; image_chat: videos with audio."""
    max_seconds: float = option(30.0, gt=0, le=3600)
    """As max_clips: length of a clip; shorter ones are padded, records with longer ones are invalid."""
    shuffle: bool = True
    """Shuffle records in a new order each epoch, seeded by run.data_seed or run.seed; false keeps their order."""
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

    eval_sets: dict[str, Corpus] = option({})
    """Additional data to evaluate on, by a name of your choice, as eval/NAME/loss and eval/NAME/bpb. All records of
    path or split are evaluated, of a generated source its held-out ones."""

    def held_out_sets(self) -> dict[str, "Data"]:
        """Data to evaluate on by name: this data (an empty name), or each source of a mixture; then eval_sets."""
        if self.overfit_batches is not None:
            sets = {"": self}
        else:
            sets = {name: self._only(corpus) for name, corpus in self.corpora().items()}
        for name, corpus in self.eval_sets.items():
            whole = {"eval_path": corpus.eval_path or corpus.path, "eval_split": corpus.eval_split or corpus.split}
            used: dict[str, Any] = {key: value for key, value in whole.items() if corpus.source not in UNUSED[key]}
            sets[name] = dataclasses.replace(self._only(corpus), **used, overfit_batches=None)
        return sets

    def _only(self, corpus: Corpus) -> "Data":
        """The same settings for a single source."""
        fields = {field.name: getattr(corpus, field.name) for field in dataclasses.fields(Corpus)}
        return dataclasses.replace(self, **fields, sources={}, weights={}, eval_sets={})

    @property
    def counts_bytes(self) -> bool:
        """Whether evaluations know the bytes of the text, and so report bits per byte."""
        return self.overfit_batches is None and all(corpus.has_text for corpus in self.corpora().values())

    def corpora(self) -> dict[str, Corpus]:
        """Return the sources by name; a single source has an empty name."""
        return dict(self.sources) if self.source == "mixture" else {"": self}

    def other_shapes(self, *accepted: str, task: str, hint: str) -> Iterator[Problem]:
        """Yield problems of sources with a record type that a task does not train on; paths start at the config
        root."""
        for name, corpus in self.corpora().items():
            if corpus.record_type not in accepted:
                path = f"data.sources.{name}.record_type" if name else "data.record_type"
                reason = f"is not supported by task={task}"
                yield Problem(path, reason, value=corpus.record_type, accepted=", ".join(accepted), hint=hint)

    def check(self) -> Iterator[Problem]:
        yield from super().check()
        for name in ("loss_on", "thinking"):
            value = getattr(self, name)
            if value != getattr(Data, name) and all(c.record_type not in CHAT_TYPES for c in self.corpora().values()):
                accepted = f"{getattr(Data, name).value}, or record_type={' or '.join(CHAT_TYPES)}"
                yield Problem(name, "is not used without conversations", value=value, accepted=accepted)
        is_mixture = self.source == "mixture"
        if is_mixture != bool(self.sources):
            reason = "is needed by source=mixture" if is_mixture else f"is not used by source={self.source}"
            yield Problem("sources", reason, value=sorted(self.sources) or None, accepted="one or more sources by name")
        yield from self._check_weights()
        yield from self._check_eval_sets()
        for name, corpus in self.sources.items():
            if corpus.source == "mixture":
                yield Problem(f"sources.{name}.source", "mixtures cannot be nested", value="mixture")
        if self.source in READY_ROWS and self.packing.method is not PackingMethod.auto:
            reason = f"is not used: source={self.source} yields full sequences"
            yield Problem("packing.method", reason, value=self.packing.method, accepted="auto")

    def _check_eval_sets(self) -> Iterator[Problem]:
        for name, corpus in self.eval_sets.items():
            if not SET_NAME.fullmatch(name):
                accepted = "letters, digits, _ - and ."
                yield Problem("eval_sets", "has a name that is not part of a metric's name", name, accepted=accepted)
            if name in self.sources:
                reason = "is also the name of a source, whose held-out part is evaluated under this name"
                yield Problem(f"eval_sets.{name}", reason, value=name, hint="choose another name")
            if corpus.source == "mixture":
                yield Problem(f"eval_sets.{name}.source", "mixtures cannot be nested", value="mixture")

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
