"""Object stores behind URLs (s3://, gs://, any other scheme of fsspec): requests with retries, and a cache of inputs.

A store has no rename and no folders, and each request may fail or time out. Objects are written whole or not at all,
so a set of objects becomes visible with the last one (checkpoint_tiers.py).
"""

import contextlib
import errno
import functools
import importlib
import importlib.util
import logging
import os
import random
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from maxhydra.record.checkpoint_manifest import MANIFEST

T = TypeVar("T")
R = TypeVar("R")
log = logging.getLogger("maxhydra")

CACHE = Path("~/.cache/maxhydra")
# Requests are repeated after 0.25, 0.5, 1, ... seconds, with a random part: many hosts would repeat them at once.
ATTEMPTS, FIRST_DELAY, LONGEST_DELAY = 8, 0.25, 8.0
REQUEST_SECONDS = 60
THREADS = 8
# Options of file systems that limit the time of one request. Those of other schemes have their own defaults.
_S3: dict[str, Any] = {"config_kwargs": {"connect_timeout": 10, "read_timeout": REQUEST_SECONDS}}
_OPTIONS: dict[str, dict[str, Any]] = {"s3": _S3, "s3a": _S3, "gs": {"requests_timeout": REQUEST_SECONDS}}
_OPTIONS["gcs"] = _OPTIONS["gs"]
READ_ONLY = ("http", "https", "data")
# Local errors, which another attempt does not change.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# Failures that another attempt does not change: a missing bucket, rejected credentials, an operation without support.
_PERMANENT = (FileNotFoundError, PermissionError, ImportError, ValueError, TypeError, NotImplementedError)
_MISSING = (FileNotFoundError,)
# Fields that differ between two versions of an object, in the words of the stores.
_VERSION = ("size", "ETag", "etag", "mtime", "updated", "created", "LastModified")
_CHECKPOINT = re.compile(rf"(?P<step>(?:checkpoints/)?(?P<number>[0-9]+))/{re.escape(MANIFEST)}")
_RUN_BELOW = re.compile(rf".+/checkpoints/[0-9]+/{re.escape(MANIFEST)}")
_IN_RUN = re.compile(r"(?P<run>.+)/checkpoints(/[0-9]+)?")
RUN_FILES = ("run.json", "config.yaml")


class StorageError(Exception):
    """An operation on a store failed for good; the message names the operation, the URL and the cause."""

    def __init__(self, operation: str, url: str, cause: BaseException | str):
        text = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}".rstrip(": ")
        super().__init__(f"cannot {operation} {url}: {' '.join(text.split())[:300]}")
        self.operation, self.url = operation, url


class Object(NamedTuple):
    """Size and version of an object; the version changes with every write."""

    size: int
    version: str


def is_remote(location: str) -> bool:
    return "://" in location


def unsupported_reason(url: str) -> tuple[str, str] | None:
    """Why a URL cannot be used here, and what to do; None if it can. Imports no file system and sends no request."""
    scheme, _, rest = url.partition("://")
    known = importlib.import_module("fsspec.registry").known_implementations
    if scheme not in known:
        return f"has the unknown scheme {scheme}://", "use s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or a local folder"
    package = known[scheme]["class"].partition(".")[0]
    if importlib.util.find_spec(package) is None:
        return f"needs the package {package}, which is not installed", "pip install 'maxhydra[storage]'"
    if ".." in rest.split("/"):
        return "contains ..", "name the folder itself"
    if "@" in rest.partition("/")[0]:
        return "contains credentials", "pass them by environment variables or the files of the store's own tools"
    return None


def read_only_reason(url: str) -> tuple[str, str] | None:
    """Why nothing can be written below a URL, and what to do; None if it can."""
    is_read_only = url.partition("://")[0] in READ_ONLY
    return ("is read-only", "use s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or a local folder") if is_read_only else None


class Store:
    """The objects below a URL, by relative name. Every request is repeated if it fails; see StorageError."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        if (problem := unsupported_reason(url)) is not None:
            raise StorageError("open", url, "; ".join(problem))
        options = _OPTIONS.get(url.partition("://")[0], {})
        url_to_fs = importlib.import_module("fsspec.core").url_to_fs
        self._system, self._root = self._call("open", "", lambda: url_to_fs(url, use_listings_cache=False, **options))
        self._root = self._root.rstrip("/")

    def find(self, prefix: str = "") -> dict[str, Object]:
        """All objects below a prefix, in all folders; the name of the URL's own object is empty."""
        try:
            found = self._call(
                "list", prefix, lambda: self._system.find(self._path(prefix), detail=True), expected=_MISSING
            )
        except FileNotFoundError:
            return {}
        return {self._name(path): self._object(details) for path, details in found.items()}

    def children(self, prefix: str = "") -> tuple[dict[str, Object], list[str]]:
        """The objects and the folders directly below a prefix."""
        try:
            found = self._call(
                "list", prefix, lambda: self._system.ls(self._path(prefix), detail=True), expected=_MISSING
            )
        except FileNotFoundError:
            return {}, []
        files = {self._name(entry["name"]): self._object(entry) for entry in found if entry["type"] == "file"}
        return files, [self._name(entry["name"]) for entry in found if entry["type"] == "directory"]

    def read(self, name: str) -> bytes:
        """The content of an object. Raises FileNotFoundError without it."""
        return bytes(self._call("read", name, lambda: self._system.cat_file(self._path(name)), expected=_MISSING))

    def write(self, name: str, content: bytes) -> None:
        self._call("write", name, lambda: self._pipe(name, content))

    def create(self, name: str, content: bytes) -> bool:
        """Write an object that does not exist yet; False if it does, also if an earlier attempt of this call wrote it.

        A store without conditional writes overwrites an object that another client creates at the same time.
        """
        try:
            refused = (FileExistsError, NotImplementedError, TypeError)
            self._call("create", name, lambda: self._pipe(name, content, mode="create"), expected=refused)
        except FileExistsError:
            return False
        except (NotImplementedError, TypeError):
            if name in self.find(name):
                return False
            self.write(name, content)
        return True

    def upload(self, path: Path, name: str) -> None:
        """Copy a local file into the store. Raises FileNotFoundError without the file."""

        def put() -> None:
            self._make_folder(name)
            self._system.put_file(str(path), self._path(name))

        path.stat()
        self._call("write", name, put)

    def download(self, name: str, path: Path) -> None:
        """Copy an object to a local file, which appears once it is complete. Raises FileNotFoundError without it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # A random name: threads and hosts that share the cache may write the same file at once.
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            self._call("read", name, lambda: self._system.get_file(self._path(name), str(partial)), expected=_MISSING)
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that do not exist are ignored."""

        def remove(name: str) -> None:
            with contextlib.suppress(FileNotFoundError, KeyError):
                self._system.rm_file(self._path(name))

        self.map(lambda name: self._call("delete", name, lambda: remove(name)), names)

    def glob(self, pattern: str) -> dict[str, Object]:
        """The objects that match a pattern."""
        found = self._call("list", pattern, lambda: self._system.glob(self._path(pattern), detail=True))
        return {self._name(path): self._object(item) for path, item in found.items() if item["type"] == "file"}

    @staticmethod
    def map(action: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Call an action for all items in parallel; raises the first error after all have ended."""
        with ThreadPoolExecutor(THREADS, thread_name_prefix="storage") as pool:
            return list(pool.map(action, items))

    def _pipe(self, name: str, content: bytes, **mode: str) -> None:
        self._make_folder(name)
        self._system.pipe_file(self._path(name), content, **mode)

    def _make_folder(self, name: str) -> None:
        """Folders exist only in file systems behind file:// and similar schemes."""
        if "file" in self._protocols:
            self._system.makedirs(os.path.dirname(self._path(name)), exist_ok=True)

    @property
    def _protocols(self) -> tuple[str, ...]:
        protocol = self._system.protocol
        return (protocol,) if isinstance(protocol, str) else tuple(protocol)

    def _object(self, details: Mapping[str, Any]) -> Object:
        if not any(details.get(key) for key in _VERSION[1:]):
            # A listing of a web server has only names.
            details = self._call("read", self._name(details["name"]), lambda: self._system.info(details["name"]))
        return Object(int(details.get("size") or 0), str([str(details[key]) for key in _VERSION if key in details]))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else str(self._root)

    def _name(self, path: str) -> str:
        return path.rstrip("/").removeprefix(self._root).lstrip("/")

    def _url(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def _call(
        self, operation: str, name: str, action: Callable[[], Any], *, expected: tuple[type[Exception], ...] = ()
    ) -> Any:
        """Call until it succeeds. Errors of the `expected` types and of the local disk are raised unchanged."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return action()
            except expected:
                raise
            except Exception as error:  # every file system raises the errors of its client library
                if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
                    raise
                if isinstance(error, _PERMANENT) or attempt == ATTEMPTS:
                    raise StorageError(operation, self._url(name), error) from error
                delay = min(LONGEST_DELAY, FIRST_DELAY * 2 ** (attempt - 1)) * random.uniform(0.5, 1)
                log.debug("cannot %s %s, repeated in %.1f s: %s", operation, self._url(name), delay, error)
                time.sleep(delay)
        raise AssertionError("the last attempt returns or raises")


def complete_steps(names: Iterable[str]) -> dict[int, str]:
    """Checkpoints among the objects of a run or of its checkpoints folder: step -> folder. Others are incomplete."""
    found = (match for name in names if (match := _CHECKPOINT.fullmatch(name)))
    return {int(match["number"]): match["step"] for match in sorted(found, key=lambda match: int(match["number"]))}


def working_copy(url: str) -> Path:
    """The default folder of the working copies of the runs below a URL."""
    return cached_path("staging", url)


def cached_path(kind: str, url: str) -> Path:
    """The local folder for a URL, with the same structure: a checkpoint is below the folder of its run."""
    scheme, _, rest = url.partition("://")
    return CACHE.expanduser() / kind / scheme / rest.strip("/")


@functools.cache
def fetch(url: str) -> Path:
    """A local copy of an object or a folder of a store, made by the first call of this process.

    Of a run, or its checkpoints folder, only the newest complete checkpoint and the run's own files are copied. Files
    whose version has not changed are not copied again. The path does not exist if the store has nothing there.
    """
    store, target = Store(url), cached_path("objects", url)
    found, part = store.find(), target
    if any(_RUN_BELOW.fullmatch(name) for name in found):
        raise StorageError("copy", url, "it contains several runs; name one of them")
    if steps := complete_steps(found):
        newest = max(steps)
        part = target / steps[newest]
        found = {name: item for name, item in found.items() if "/" not in name or name.startswith(f"{steps[newest]}/")}
        for entry in part.parent.glob("[0-9]*"):
            if entry.name.isdecimal() and int(entry.name) > newest:
                shutil.rmtree(entry)
    for path in part.rglob("*"):
        if found and path.is_file() and path.relative_to(target).as_posix() not in found:
            path.unlink()  # of an earlier version of the folder
    store.map(lambda name: fetch_object(store, name, found[name], target / name if name else target), found)
    if (match := _IN_RUN.fullmatch(url.rstrip("/"))) and found:
        fetch_files(match["run"], RUN_FILES)
    return target


def fetch_files(url: str, names: Iterable[str]) -> Path:
    """A local copy of files directly below a URL, those that exist."""
    store, target = Store(url), cached_path("objects", url)
    found, _ = store.children()
    existing = [name for name in names if name in found]
    store.map(lambda name: fetch_object(store, name, found[name], target / name), existing)
    return target


def fetch_object(store: Store, name: str, item: Object, path: Path) -> None:
    """Copy an object to a path in the cache, unless the copy of this version exists."""
    note = CACHE.expanduser() / "versions" / path.relative_to(CACHE.expanduser())
    note = note.with_name(f"{note.name}.version")
    with contextlib.suppress(OSError):
        if path.stat().st_size == item.size and note.read_text(encoding="utf-8") == item.version:
            return
    store.download(name, path)
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(item.version, encoding="utf-8")
