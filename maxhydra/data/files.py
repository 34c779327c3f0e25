"""Files by name: a path, a folder, a glob pattern or an fsspec URL; remote ones are copied once to a cache."""

import hashlib
import logging
import os
import re
from pathlib import Path

import fsspec

from maxhydra.config import ConfigError, Problem

log = logging.getLogger("maxhydra")

ACCEPTED = "a file, a folder, a glob pattern or an fsspec URL; several separated by ;"


def find_files(names: str, cache: str, *, endings: tuple[str, ...]) -> list[Path]:
    """Local files that `names` gives, in order. A folder stands for the files in it with one of the endings."""
    found: list[Path] = []
    for name in filter(None, (part.strip() for part in names.split(";"))):
        here = _remote(name, cache, endings) if "://" in name else _local(name, endings)
        found += here or _nothing_there(name)
    return found


def without_shard(name: str) -> str:
    """A name without the count that some writers put behind its ending: x.tfrecord-00001-of-00008."""
    return re.sub(r"-\d+-of-\d+$", "", name)


def _local(name: str, endings: tuple[str, ...]) -> list[Path]:
    root = Path(name).expanduser()
    if root.is_file():
        return [root]
    if root.is_dir():
        return sorted(path for path in root.rglob("*") if path.is_file() and without_shard(path.name).endswith(endings))
    if any(mark in name for mark in "*?["):
        anchor = Path(root.anchor or ".")
        pattern = str(root.relative_to(root.anchor)) if root.anchor else str(root)
        return sorted(path for path in anchor.glob(pattern) if path.is_file())
    return []


def _remote(name: str, cache: str, endings: tuple[str, ...]) -> list[Path]:
    """Copies of remote files, made once for each version of a file."""
    protocol = name.split("://", 1)[0]
    try:
        system, root = fsspec.core.url_to_fs(name)
        names = system.glob(root) if fsspec.core.has_magic(root) else system.find(root)
    except (ImportError, ValueError) as error:
        hint = f"install what fsspec needs for {protocol}://"
        raise ConfigError(Problem("data.path", str(error), value=name, hint=hint)) from None
    if not (len(names) == 1 and names[0] == root):
        names = [found for found in names if without_shard(found).endswith(endings)]
    return [_copy(system, found, Path(cache).expanduser() / protocol) for found in sorted(names)]


def _copy(system: object, name: str, folder: Path) -> Path:
    details = system.info(name)  # type: ignore[attr-defined]
    version = str([details.get(key) for key in ("size", "etag", "mtime", "updated", "created", "LastModified")])
    digest = hashlib.sha256(f"{name} {version}".encode()).hexdigest()[:16]
    target = folder / f"{digest}-{Path(name).name}"
    if not target.exists():
        log.info("copying %s to %s", name, target)
        folder.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{os.getpid()}")
        system.get_file(name, str(partial))  # type: ignore[attr-defined]
        partial.rename(target)
    return target


def _nothing_there(name: str) -> list[Path]:
    """Say how far a local path exists and what lies there."""
    hint = ""
    if "://" not in name:
        root = Path(name).expanduser()
        parent = root if root.is_dir() else next((p for p in root.parents if p.is_dir()), Path("."))
        beside = sorted(path.name for path in parent.iterdir())
        more = f" and {len(beside) - 8} more" if len(beside) > 8 else ""
        hint = f"{parent.resolve()} holds {', '.join(beside[:8]) or 'nothing'}{more}"
    raise ConfigError(Problem("data.path", "no file is there", value=name, accepted=ACCEPTED, hint=hint))
