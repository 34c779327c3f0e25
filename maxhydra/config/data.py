"""Where the tokens come from."""

from collections.abc import Iterator
from pathlib import Path

from maxhydra.config.declare import Schema, option, schema, section
from maxhydra.config.errors import Problem


@schema
class Tokenizer(Schema):
    """Text to token ids and back."""

    kind: str = option("byte", one_of="maxhydra.data.tokenizers")
    """byte: UTF-8 bytes plus begin, end and padding."""


@schema
class Data(Schema):
    """A source of text, cut into sequences of train.seq_len tokens."""

    source: str = option("demo", one_of="maxhydra.data.sources")
    """demo: plays of Shakespeare that ship with the package; text: your own UTF-8 files; synthetic: random tokens."""
    path: str | None = None
    """text: a file, a folder of .txt files or a glob pattern."""
    tokenizer: Tokenizer = section(Tokenizer)
    eval_fraction: float = option(0.05, gt=0, lt=1)
    """Share of the text, at its end, that is held out for evaluation."""
    shuffle: bool = True
    """Visit the sequences in a new random order each epoch, drawn from run.seed; false keeps the text's order."""
    overfit_batches: int | None = option(None, ge=1)
    """Train and evaluate on the first so many batches again and again. null: on all of them."""
    prefetch: int = option(2, ge=0)
    """Batches prepared ahead of the step."""

    def check(self) -> Iterator[Problem]:
        needs_path = self.source == "text"
        if needs_path and self.path is None:
            yield Problem(
                "path",
                "is needed by source=text",
                value=None,
                accepted="a file, a folder of .txt files or a glob pattern",
            )
        if not needs_path and self.path is not None:
            yield Problem(
                "path",
                f"is not used by source={self.source}",
                value=self.path,
                hint="set data=text to read your own files",
            )
        if needs_path and self.path is not None and not any(_matches(self.path)):
            yield _no_such_path(self.path)


def _matches(path: str) -> Iterator[Path]:
    """Files that a path, folder or pattern names, in order."""
    root = Path(path).expanduser()
    if root.is_file():
        yield root
    elif root.is_dir():
        yield from sorted(root.rglob("*.txt"))
    elif any(mark in path for mark in "*?["):
        anchor = Path(root.anchor or ".")
        yield from sorted(
            p for p in anchor.glob(str(root.relative_to(root.anchor)) if root.anchor else path) if p.is_file()
        )


def text_files(path: str) -> list[Path]:
    """Files that `data.path` names, in order."""
    return list(_matches(path))


def _no_such_path(path: str) -> Problem:
    """Say how far the path exists and what lies there."""
    root = Path(path).expanduser()
    parent = next((p for p in root.parents if p.is_dir()), Path("."))
    beside = sorted(p.name for p in parent.iterdir())[:8]
    return Problem(
        "path",
        "no file is there",
        value=path,
        accepted="a file, a folder of .txt files or a glob pattern",
        hint=f"{parent.resolve()} holds {', '.join(beside) or 'nothing'}",
    )
