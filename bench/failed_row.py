"""Prints the JSON line of a row of bench/one_gpu.sh that failed.

python bench/failed_row.py NAME LIMIT EXIT_CODE STDERR_FILE COMMAND...
"""

import json
import re
import sys
from pathlib import Path

TIMEOUT = (124, 137)
# What jax adds to the message of an exception, which may be the cause of a later one.
NOTICE = re.compile(r"^-{20}\nFor simplicity, JAX .*\n?", re.MULTILINE)
EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")


def last_error(text: str) -> str:
    """From the last line that names an exception, otherwise the last line."""
    lines = [line.rstrip() for line in NOTICE.sub("", text).splitlines() if line.strip()]
    starts = [number for number, line in enumerate(lines) if EXCEPTION.match(line)]
    return "\n".join(lines[starts[-1] :] if starts else lines[-1:])[:400]


def main(name: str, limit: str, code: str, stderr: str, *command: str) -> None:
    is_late = int(code) in TIMEOUT
    error = f"no result after {limit} s" if is_late else last_error(Path(stderr).read_text(errors="replace"))
    print(json.dumps({"bench": "failed", "row": name, "command": command, "exit_code": int(code), "error": error}))


if __name__ == "__main__":
    main(*sys.argv[1:])
