"""Atomic writes of compiled programs to the compilation cache of jax.

jax writes an entry in place and never replaces one. A process that is killed meanwhile leaves a truncated entry, at
which every later run would warn, and which it would compile again.
"""

import os

from jax._src import compilation_cache
from jax._src.lru_cache import LRUCache


class AtomicCache(LRUCache):
    """Writes an entry to another file first, and replaces an entry that could not be read."""

    def put(self, key: str, value: bytes) -> None:
        if self.eviction_enabled or "://" in str(self.path):
            # Under a lock, or by an object store, which is atomic.
            super().put(key, value)
            return
        partial = self.path / f".{key}.{os.getpid()}"
        partial.write_bytes(value)
        partial.replace(self.path / f"{key}-cache")


def write_programs_atomically() -> None:
    """Let jax use this cache from its next initialization on."""
    compilation_cache.LRUCache = AtomicCache  # type: ignore[misc, assignment]
