"""Resolve file names: a path, a folder, a glob pattern or an fsspec URL. Remote files are cached locally."""

import errno
import hashlib
import logging
import re
import secrets
from pathlib import Path
from typing import NoReturn

import fsspec

from maxhydra.config import ConfigError, Problem
from maxhydra.config.values import ACCEPTED, is_remote, matches, nearby_files, parts

log = logging.getLogger("maxhydra")


def find_files(names: str, cache: str, *, endings: tuple[str, ...]) -> list[Path]:
    """Resolve `names` to local files, in order. A folder means all files in it with one of the endings."""
    paths: list[Path] = []
    for name in parts(names):
        found = _remote_files(name, cache, endings) if is_remote(name) else _local_files(name, endings)
        paths += found or _raise_not_found(name)
    return paths


def without_shard(name: str) -> str:
    """Strip the shard suffix that some writers append to the ending: x.tfrecord-00001-of-00008."""
    return re.sub(r"-\d+-of-\d+$", "", name)


def partial_path(target: Path) -> Path:
    """Temporary name of a cache file until it is complete.

    It is random, because threads and hosts that share the cache may write the same file at once, and in containers
    their process ids are equal.
    """
    return target.with_name(f"{target.name}.{secrets.token_hex(8)}")


def _local_files(name: str, endings: tuple[str, ...]) -> list[Path]:
    found = matches(name)
    if len(found) == 1 and found[0].is_dir():
        found = [path for path in found[0].rglob("*") if without_shard(path.name).endswith(endings)]
    return sorted(path for path in found if path.is_file())


def _remote_files(name: str, cache: str, endings: tuple[str, ...]) -> list[Path]:
    """Local copies of remote files, one per version of a file."""
    protocol = name.split("://", 1)[0]
    try:
        system, root = fsspec.core.url_to_fs(name)
        names = system.glob(root) if fsspec.core.has_magic(root) else system.find(root)
        if not (len(names) == 1 and names[0] == root):
            names = [found for found in names if without_shard(found).endswith(endings)]
        return [_copy(system, found, Path(cache).expanduser() / protocol) for found in sorted(names)]
    except (ImportError, ValueError) as error:
        hint = f"install the fsspec filesystem package for {protocol}://"
        raise ConfigError(Problem("data.path", str(error), value=name, hint=hint)) from None
    except Exception as error:  # every fsspec filesystem raises the errors of its own client library
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        reason = f"cannot be read: {type(error).__name__}: {error}".rstrip(": ")
        hint = "check the address, the network and the credentials"
        raise ConfigError(Problem("data.path", reason, value=name, hint=hint)) from error


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


def _raise_not_found(name: str) -> NoReturn:
    hint = "or the server cannot be reached" if is_remote(name) else nearby_files(Path(name).expanduser())
    raise ConfigError(Problem("data.path", "no such file", value=name, accepted=ACCEPTED, hint=hint))
