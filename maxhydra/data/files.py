"""Files by name: a path, a folder, a glob pattern or an fsspec URL; remote ones are copied once to a cache."""

import hashlib
import logging
import re
import secrets
from pathlib import Path
from typing import NoReturn

import fsspec

from maxhydra.config import ConfigError, Problem
from maxhydra.config.paths import ACCEPTED, beside, is_remote, matches, parts

log = logging.getLogger("maxhydra")


def find_files(names: str, cache: str, *, endings: tuple[str, ...]) -> list[Path]:
    """Local files that `names` gives, in order. A folder stands for the files in it with one of the endings."""
    found: list[Path] = []
    for name in parts(names):
        here = _remote(name, cache, endings) if is_remote(name) else _local(name, endings)
        found += here or _nothing_there(name)
    return found


def without_shard(name: str) -> str:
    """A name without the count that some writers put behind its ending: x.tfrecord-00001-of-00008."""
    return re.sub(r"-\d+-of-\d+$", "", name)


def partial_path(target: Path) -> Path:
    """What a file of the cache is called until it is whole.

    Threads, and the hosts of a run that share the cache, may all be making it: in containers their processes have the
    same number.
    """
    return target.with_name(f"{target.name}.{secrets.token_hex(8)}")


def _local(name: str, endings: tuple[str, ...]) -> list[Path]:
    found = matches(name)
    if len(found) == 1 and found[0].is_dir():
        found = [path for path in found[0].rglob("*") if without_shard(path.name).endswith(endings)]
    return sorted(path for path in found if path.is_file())


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
        partial = partial_path(target)
        system.get_file(name, str(partial))  # type: ignore[attr-defined]
        partial.rename(target)
    return target


def _nothing_there(name: str) -> NoReturn:
    hint = "" if is_remote(name) else beside(Path(name).expanduser())
    raise ConfigError(Problem("data.path", "no file is there", value=name, accepted=ACCEPTED, hint=hint))
