"""Paths that a config names: what a glob pattern finds, and what lies near a path that leads nowhere."""

from pathlib import Path

ACCEPTED = "a file, a folder, a glob pattern or an fsspec URL; several separated by ;"


def is_remote(name: str) -> bool:
    return "://" in name


def parts(names: str) -> list[str]:
    """The names in a text that separates them by `;`."""
    return [part for part in (name.strip() for name in names.split(";")) if part]


def matches(name: str) -> list[Path]:
    """What a local name or pattern finds, in order."""
    root = Path(name).expanduser()
    if root.exists():
        return [root]
    if not any(mark in name for mark in "*?["):
        return []
    anchor = Path(root.anchor or ".")
    pattern = str(root.relative_to(root.anchor)) if root.anchor else str(root)
    return sorted(anchor.glob(pattern))


def beside(path: Path) -> str:
    """How far a path exists, and what lies there."""
    parent = path if path.is_dir() else next((folder for folder in path.parents if folder.is_dir()), Path("."))
    names = sorted(found.name for found in parent.iterdir())
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{parent.resolve()} holds {', '.join(names[:8]) or 'nothing'}{more}"
