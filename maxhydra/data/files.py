"""Resolve file names: a path, a folder, a glob pattern or an fsspec URL. Remote files are cached locally."""

import hashlib
import logging
import re
import secrets
from pathlib import Path
from typing import NoReturn

from maxhydra.config import ConfigError, Problem
from maxhydra.config.values import ACCEPTED, matches, nearby_files, parts
from maxhydra.record.storage import Object, StorageError, Store, is_remote, unsupported_reason

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
    if (problem := unsupported_reason(name)) is not None:
        raise ConfigError(Problem("data.path", problem[0], value=name, hint=problem[1]))
    # Folders up to the first one with a wildcard.
    plain = re.split(r"/(?=[^/]*[*?\[])", name, maxsplit=1)
    try:
        store = Store(plain[0])
        found = store.glob(plain[1]) if len(plain) == 2 else store.find()
        names = [file for file in sorted(found) if not file or without_shard(file).endswith(endings)]
        folder = Path(cache).expanduser() / name.split("://", 1)[0]
        return [_copy(store, file, found[file], folder) for file in names]
    except StorageError as error:
        hint = "check the address, the network and the credentials"
        raise ConfigError(Problem("data.path", str(error), value=name, hint=hint)) from error


def _copy(store: Store, name: str, item: Object, folder: Path) -> Path:
    url = f"{store.url}/{name}" if name else store.url
    digest = hashlib.sha256(f"{url} {item.version}".encode()).hexdigest()[:16]
    target = folder / f"{digest}-{Path(url).name}"
    if not target.exists():
        log.info("copying %s to %s", url, target)
        store.download(name, target)
    return target


def _raise_not_found(name: str) -> NoReturn:
    hint = "or the server cannot be reached" if is_remote(name) else nearby_files(Path(name).expanduser())
    raise ConfigError(Problem("data.path", "no such file", value=name, accepted=ACCEPTED, hint=hint))
