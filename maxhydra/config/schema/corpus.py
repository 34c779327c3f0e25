"""Schema of a data source: its location and the type of its records."""

from collections.abc import Iterator
from enum import Enum
from pathlib import Path

from maxhydra.config.declare import Schema, option, schema
from maxhydra.config.errors import Problem, did_you_mean
from maxhydra.config.paths import ACCEPTED, is_remote, matches, nearby_files, parts

# Sources that yield full rows of tokens, without a record type and without packing.
READY_ROWS = ("demo", "text", "synthetic", "olmo")

# Sources that need a name, and what it refers to.
BUILDER = "a builder, such as c4/en:3.0.1"
NAMED = {"tfds": BUILDER, "c4_mlperf": BUILDER, "reasoning_gym": "a task, such as chain_sum"}

# Sources that read files, and sources that need neither files nor a name.
FILES = ("text", "grain", "olmo")
UNNAMED = ("demo", "synthetic", "arithmetic", "mixture")

# Sources that do not use a field which names data. Ignoring it would silently train or evaluate on other data.
UNUSED = {
    "path": (*UNNAMED, *NAMED),
    "eval_path": (*UNNAMED, *NAMED),
    "name": (*UNNAMED, *FILES),
    "eval_name": (*UNNAMED, *FILES, "reasoning_gym"),
    "eval_split": (*UNNAMED, *FILES, "reasoning_gym"),
}

# Operators of source=arithmetic.
OPERATORS = ("+", "-", "*")

# Roles of the columns that a record type reads.
ROLES = {
    "text": ("text",),
    "tokens": ("tokens",),
    "chat": ("messages",),
    "preference": ("prompt", "chosen", "rejected"),
    "prompts": ("prompt", "answer"),
    "teacher": ("tokens", "teacher_ids", "teacher_logits"),
}


class FileFormat(Enum):
    auto = "auto"
    arrayrecord = "arrayrecord"
    parquet = "parquet"
    tfrecord = "tfrecord"
    jsonl = "jsonl"


@schema
class Corpus(Schema):
    """A source of records."""

    source: str = option("demo", one_of="maxhydra.data.sources")
    """demo: plays of Shakespeare, included in the package; text: your own UTF-8 files; grain: files of records; hf:
    Hugging Face datasets; tfds: TensorFlow Datasets builds; c4_mlperf: C4 as MLPerf uses it; olmo: token shards
    with an index; arithmetic: generated problems with answers; reasoning_gym: generated problems of its tasks;
    synthetic: random tokens; mixture: several of these."""
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
    which eval_fraction is held out; null: 100,000."""
    eval_fraction: float = option(0.05, gt=0, lt=1)
    """Fraction at the end that is held out for evaluation, if no eval files or split are given."""
    record_type: str = option("text", one_of="maxhydra.data.record_types")
    """Content of a record: text; tokens; chat (messages, loss on the assistant's turns); preference (chosen, rejected);
    prompts (prompt, answer); teacher (tokens with a teacher's top logits)."""
    columns: dict[str, str] = option({})
    """Column names that differ from the role, such as text: content."""
    formatting: str | None = None
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
        if self.formatting is not None and self.formatting.count(":") != 1:
            yield Problem("formatting", "is not a function", value=self.formatting, accepted="package.module:function")

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
