"""One source of records: where it lies and what its records mean."""

from collections.abc import Iterator
from enum import Enum
from pathlib import Path

from maxhydra.config.declare import Schema, option, schema
from maxhydra.config.errors import Problem, did_you_mean
from maxhydra.config.paths import ACCEPTED, beside, is_remote, matches, parts

# Sources that give rows of tokens, which need no shape and no packing.
READY_ROWS = ("demo", "text", "synthetic", "olmo")

# Sources that need a name, and what it is.
BUILDER = "a builder, such as c4/en:3.0.1"
NAMED = {"tfds": BUILDER, "c4_mlperf": BUILDER, "reasoning_gym": "a task, such as chain_sum"}

# Sources of files, and those that hold what no field names.
FILES = ("text", "grain", "olmo")
UNNAMED = ("demo", "synthetic", "arithmetic", "mixture")

# Sources that have no use for a field which names data: to pass over it would be to train or evaluate on other data.
UNUSED = {
    "path": (*UNNAMED, *NAMED),
    "eval_path": (*UNNAMED, *NAMED),
    "name": (*UNNAMED, *FILES),
    "eval_name": (*UNNAMED, *FILES, "reasoning_gym"),
    "eval_split": (*UNNAMED, *FILES, "reasoning_gym"),
}

# Of source=arithmetic.
OPERATORS = ("+", "-", "*")

# Columns that a shape reads, by the role that each plays.
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
    """demo: plays of Shakespeare that ship with the package; text: your own UTF-8 files; grain: files of records; hf:
    Hugging Face datasets; tfds: TensorFlow Datasets builds; c4_mlperf: C4 as MLPerf uses it; olmo: token shards
    with an index; arithmetic: made problems with answers; reasoning_gym: problems of its tasks; synthetic: made
    tokens; mixture: several of these."""
    path: str | None = None
    """Files of text, grain, hf and olmo (its index): a file, a folder or a glob pattern, several separated by `;`,
    local or any fsspec URL such as gs://bucket/x-*.array_record."""
    eval_path: str | None = None
    """Files to evaluate on. null: eval_fraction of those in path."""
    format: FileFormat = FileFormat.auto
    """grain: what the files hold; auto goes by the name's ending."""
    name: str | None = None
    """hf: dataset on the hub or folder of a saved one; tfds: builder, such as c4/en:3.0.1;
    reasoning_gym: task, such as chain_sum."""
    config: str | None = None
    """hf: configuration of the dataset."""
    split: str = "train"
    """hf, tfds: split to train on."""
    eval_split: str | None = None
    """hf, tfds: split to evaluate on. null: eval_fraction of the other."""
    eval_name: str | None = None
    """hf, tfds: dataset or builder of eval_split, where it is another than name."""
    data_dir: str | None = None
    """hf: sub-folder of the dataset; tfds: folder that holds the builds."""
    streaming: bool = False
    """hf: read over the network as training goes, instead of downloading first."""
    remap_from: str | None = None
    """olmo: beginning of the paths in the index that lies elsewhere here, such as gs://bucket/."""
    remap_to: str | None = None
    """olmo: what to read instead of remap_from, such as /mnt/bucket/."""
    repetition_filter: bool = True
    """olmo: sequences in which 1 to 13 tokens repeat 32 times or more, one after another, count for nothing."""
    digits: int = option(2, ge=1, le=9)
    """arithmetic: digits of the numbers at most."""
    operators: list[str] = option(["+"])
    """arithmetic: some of + - *."""
    problems: int | None = option(None, ge=2)
    """arithmetic: problems to train on; null: all but those held out. reasoning_gym: problems to make, of which
    eval_fraction is held out; null: 100,000."""
    eval_fraction: float = option(0.05, gt=0, lt=1)
    """Share at the end that is held out for evaluation, where no files or split are."""
    record_type: str = option("text", one_of="maxhydra.data.record_types")
    """What a record is: text; tokens; chat (messages, loss on the assistant's turns); preference (chosen, rejected);
    prompts (prompt, answer); teacher (tokens with a teacher's top logits)."""
    columns: dict[str, str] = option({})
    """Columns that go by another name than their role, such as text: content."""
    formatting: str | None = None
    """Function `package.module:function` that turns a record, a dict, into one that the shape reads."""

    def check(self) -> Iterator[Problem]:
        yield from self._check_shape()
        needs_path = self.source in FILES
        if needs_path and self.path is None:
            accepted = "a file, a folder or a glob pattern"
            yield Problem("path", f"is needed by source={self.source}", value=None, accepted=accepted)
        if needs_path:
            yield from self._check_there("path")
            yield from self._check_there("eval_path")
        yield from self._check_unused()
        if self.source == "hf" and self.path is None and self.name is None:
            yield Problem("name", "or path is needed by source=hf", value=None, accepted="a dataset's name or folder")
        if self.source in NAMED and self.name is None:
            yield Problem("name", f"is needed by source={self.source}", value=None, accepted=NAMED[self.source])
        if not self.operators or len({*self.operators} & {*OPERATORS}) < len(self.operators):
            accepted = f"some of {' '.join(OPERATORS)}, each once"
            yield Problem("operators", "are not operators of arithmetic", value=self.operators, accepted=accepted)
        if (self.remap_from is None) != (self.remap_to is None):
            missing = "remap_from" if self.remap_from is None else "remap_to"
            yield Problem(missing, "is needed, since the other of the two is set", value=None)
        if self.formatting is not None and self.formatting.count(":") != 1:
            yield Problem("formatting", "names no function", value=self.formatting, accepted="package.module:function")

    def _check_unused(self) -> Iterator[Problem]:
        for field, sources in UNUSED.items():
            value = getattr(self, field)
            if self.source in sources and value is not None:
                others = "data=text or data=grain to read your own files" if "path" in field else "data=hf or data=tfds"
                yield Problem(field, f"is not used by source={self.source}", value=value, hint=f"set {others}")

    def _check_there(self, field: str) -> Iterator[Problem]:
        """Local names must lead somewhere; what lies there, and remote files, are looked at when they are opened."""
        for name in parts(getattr(self, field) or ""):
            if not is_remote(name) and not matches(name):
                hint = beside(Path(name).expanduser())
                yield Problem(field, "no file is there", value=name, accepted=ACCEPTED, hint=hint)

    def _check_shape(self) -> Iterator[Problem]:
        if self.source in READY_ROWS and self.record_type != "text":
            reason = f"is not what source={self.source} holds"
            yield Problem("record_type", reason, value=self.record_type, accepted="text")
        for role in self.columns:
            if role not in ROLES[self.record_type]:
                yield Problem(
                    f"columns.{role}",
                    f"is no role of record_type={self.record_type}",
                    value=self.columns[role],
                    accepted=", ".join(ROLES[self.record_type]),
                    hint=did_you_mean(role, ROLES[self.record_type]),
                )
