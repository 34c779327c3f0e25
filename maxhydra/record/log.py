"""The logger `maxhydra`: with times in log.txt, plain on stderr."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

NAME = "maxhydra"
# A record with this attribute goes to log.txt alone, because the terminal shows the same thing in another form.
FILE_ONLY = {"file_only": True}


class _Console(logging.Handler):
    """Writes to whatever sys.stderr is at the moment: a live progress bar puts itself there to stay below the text."""

    def emit(self, record: logging.LogRecord) -> None:
        if not record.__dict__.get("file_only", False):
            print(self.format(record), file=sys.stderr, flush=True)


@contextlib.contextmanager
def logging_to(path: Path | None, *, console: bool) -> Iterator[logging.Logger]:
    """Within it, the logger appends to the file and writes to stderr; without `console` only warnings reach stderr."""
    logger = logging.getLogger(NAME)
    handlers: list[logging.Handler] = [_console(logging.INFO if console else logging.WARNING)]
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(_file(path))
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


def _console(level: int) -> logging.Handler:
    handler = _Console(level)
    handler.setFormatter(logging.Formatter("%(message)s"))
    return handler


def _file(path: Path) -> logging.Handler:
    handler = logging.FileHandler(path, mode="a", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    return handler
