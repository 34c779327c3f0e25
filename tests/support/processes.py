"""Processes of the tests, looked up in /proc."""

from pathlib import Path


def children(process: int) -> list[int]:
    """Pids of the worker processes of a process, without the shared-memory tracker, which exits by itself."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_bytes()
        except (OSError, IndexError):
            continue
        if parent == process and b"spawn_main" in command:
            pids.append(int(folder.name))
    return pids


def is_alive(process: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
