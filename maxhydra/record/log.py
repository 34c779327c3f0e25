"""The `maxhydra` logger: timestamps in log.txt, plain messages on stderr."""

import contextlib
import logging
import re
import sys
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path

from maxhydra.record.redact import redact_text

NAME = "maxhydra"
# Log records with this attribute go to log.txt only, because the terminal shows the same information differently.
FILE_ONLY = {"file_only": True}


# Control characters, also those of 8 bits, of the direction of text, and halves of a surrogate pair.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, *, keep: str = "\n\t") -> str:
    """Return a text whose control characters, except those in `keep`, are written as \\u001b.

    Names, notes and logs of a run are printed on the terminals of others, which execute escape sequences.
    """
    return _CONTROL.sub(lambda match: match[0] if match[0] in keep else f"\\u{ord(match[0]):04x}", text)


class _Formatter(logging.Formatter):
    """Redacts secrets, and neutralizes control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(redact_text(super().format(record)))


class _Console(logging.Handler):
    """Writes to the current sys.stderr, which a live progress bar replaces to stay below the text."""

    def emit(self, record: logging.LogRecord) -> None:
        if not record.__dict__.get("file_only", False):
            print(self.format(record), file=sys.stderr, flush=True)


@contextlib.contextmanager
def logging_to(path: Path | None, *, console: bool) -> Iterator[logging.Logger]:
    """Log to the file and to stderr inside the context; without `console`, only warnings reach stderr."""
    logger = logging.getLogger(NAME)
    handlers: list[logging.Handler] = [_console_handler(logging.INFO if console else logging.WARNING)]
    if path is not None:
        handlers.append(_file_handler(path))
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield logger
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(level)
        logger.propagate = propagate


def _console_handler(level: int) -> logging.Handler:
    handler = _Console(level)
    handler.setFormatter(_Formatter("%(message)s"))
    return handler


class _File(logging.FileHandler):
    """Creates folder and file with the first record, so that a command that is rejected before leaves nothing."""

    def __init__(self, path: Path):
        super().__init__(path, mode="a", encoding="utf-8", delay=True)

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()


def _file_handler(path: Path) -> logging.Handler:
    handler = _File(path)
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    return handler
