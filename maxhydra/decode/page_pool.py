"""Page allocation and prefix cache of the paged KV cache, and the batch slots and pages of all groups of devices.

A batch is sharded over groups of devices (mesh axes data, fsdp and expert). Each group has its own pages, batch slots
and prefix cache, since a row is computed where its pages are.

Full pages form chains: a page is identified by the page before it and its own tokens, all of which are compared, so
that two different texts can never be confused, as they could be with hashes. An unused page stays in the prefix cache
until its memory is needed: least recently used first, and the end of a chain before its beginning.
"""

import dataclasses
from array import array
from collections import OrderedDict
from collections.abc import Sequence

Key = tuple[int, tuple[int, ...]]
"""Id of the preceding page in the chain, and the tokens of the page. The first page has the root of the chain: 0, or a
negative number for a sequence with an adapter, whose KV cache differs for the same tokens."""


@dataclasses.dataclass(slots=True)
class PageLease:
    """The pages of one sequence."""

    pages: list[int]
    """In token order; enough for everything that the sequence may come to hold."""
    num_shared: int
    """Leading pages that came from the prefix cache."""
    parent: int
    """Chain id of the last published page."""
    num_published: int
    """Leading pages that are in the prefix cache."""
    generation: int
    """Generation of the prefix cache in which the lease began."""


class PagePool:
    """Allocates pages, and finds those that hold the prefix of a prompt."""

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool):
        self.page_size = page_size
        self.num_pages = num_pages
        self._prefix_cache = prefix_cache
        self._free = list(reversed(range(num_pages)))
        self._ref_counts = [0] * num_pages
        self._cached: dict[Key, tuple[int, int]] = {}
        """Key -> page and its chain id."""
        self._key_of: dict[int, Key] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()
        """Cached pages without a user, least recently used first."""
        self._last_id = 0
        self._generation = 0

    @property
    def num_used(self) -> int:
        """Pages held by sequences."""
        return self.num_pages - len(self._free) - len(self._unused)

    @property
    def num_cached(self) -> int:
        """Pages that are only held by the prefix cache."""
        return len(self._unused)

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def next_missing_key(self, prompt: Sequence[int], root: int = 0) -> Key | None:
        """Return the key of the first page of a prompt that is not cached; None if all cacheable pages are."""
        pages, parent = self._find_prefix(prompt, root)
        return self._key(prompt, len(pages), parent) if len(pages) < self._num_cacheable(prompt) else None

    def num_cached_pages(self, prompt: Sequence[int], root: int = 0) -> int:
        """Return how many leading pages of a prompt are cached."""
        return len(self._find_prefix(prompt, root)[0])

    def reserve(self, prompt: Sequence[int], tokens: int, root: int = 0) -> PageLease | None:
        """Reserve pages for `tokens` tokens, starting with the prompt; None if there are not enough at the moment."""
        shared, parent = self._find_prefix(prompt, root)
        free, ref_counts, needed = self._free, self._ref_counts, self.pages_for(tokens) - len(shared)
        num_revived = sum(page in self._unused for page in shared) if shared else 0
        if needed > len(free) + len(self._unused) - num_revived:
            return None
        for page in shared:
            self._acquire(page)
        fresh = free[: -needed - 1 : -1]
        del free[len(free) - len(fresh) :]
        while len(fresh) < needed:
            fresh.append(self._evict())
        for page in fresh:
            ref_counts[page] = 1
        return PageLease(
            pages=shared + fresh,
            num_shared=len(shared),
            parent=parent,
            num_published=len(shared),
            generation=self._generation,
        )

    def publish(self, lease: PageLease, tokens: Sequence[int], length: int) -> None:
        """Add the pages that the first `length` tokens fill to the prefix cache; their writes may be in flight."""
        if not self._prefix_cache or lease.generation != self._generation:
            return
        for index in range(lease.num_published, length // self.page_size):
            key = self._key(tokens, index, lease.parent)
            cached = self._cached.get(key)
            if cached is None:
                self._last_id += 1
                cached = self._cached[key] = (lease.pages[index], self._last_id)
                self._key_of[lease.pages[index]] = key
            lease.parent = cached[1]
            lease.num_published = index + 1

    def release(self, lease: PageLease) -> None:
        """Return the pages of a lease; those in the prefix cache stay there."""
        for page in reversed(lease.pages):
            self._ref_counts[page] -= 1
            if self._ref_counts[page]:
                continue
            if page in self._key_of:
                self._unused[page] = None
            else:
                self._free.append(page)
        lease.pages = []

    def clear_prefix_cache(self) -> None:
        """Forget all cached prefixes: the weights have changed, and with them the KV cache of every prefix."""
        self._free += self._unused
        self._unused.clear()
        self._cached.clear()
        self._key_of.clear()
        self._generation += 1

    def _find_prefix(self, prompt: Sequence[int], root: int) -> tuple[list[int], int]:
        """Return cached pages of a prompt's prefix and the chain id of the last one.

        The last token of the prompt is excluded, since its logits must be computed.
        """
        pages: list[int] = []
        parent = root
        for index in range(self._num_cacheable(prompt)):
            cached = self._cached.get(self._key(prompt, index, parent))
            if cached is None:
                break
            pages.append(cached[0])
            parent = cached[1]
        return pages, parent

    def _num_cacheable(self, prompt: Sequence[int]) -> int:
        return (len(prompt) - 1) // self.page_size if self._prefix_cache else 0

    def _key(self, tokens: Sequence[int], index: int, parent: int) -> Key:
        return parent, tuple(tokens[index * self.page_size : (index + 1) * self.page_size])

    def _acquire(self, page: int) -> None:
        self._ref_counts[page] += 1
        self._unused.pop(page, None)

    def _evict(self) -> int:
        """Remove the least recently used page from the prefix cache, and return it."""
        page, _ = self._unused.popitem(last=False)
        del self._cached[self._key_of.pop(page)]
        return page


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """The place of a sequence: its group of devices, and its batch slot and pages there."""

    group: int
    slot: int
    """Numbered over all groups."""
    lease: PageLease
    page_table: bytes
    """Page numbers, 4 bytes each."""


class Capacity:
    """Batch slots and pages of all groups."""

    def __init__(self, groups: int, *, slots: int, pages: int, page_size: int, prefix_cache: bool):
        """`slots`, `pages`: of all groups together, rounded up to a multiple of the groups."""
        self.slots_per_group, self.pages_per_group = -(-slots // groups), -(-pages // groups)
        self.page_size = page_size
        self.pools = [PagePool(self.pages_per_group, page_size, prefix_cache=prefix_cache) for _ in range(groups)]
        first_slots = range(0, self.num_slots, self.slots_per_group)
        self._free_slots = [list(reversed(range(first, first + self.slots_per_group))) for first in first_slots]

    @property
    def num_slots(self) -> int:
        return self.slots_per_group * len(self.pools)

    @property
    def num_pages(self) -> int:
        return self.pages_per_group * len(self.pools)

    @property
    def num_used(self) -> int:
        """Pages held by sequences."""
        return sum(pool.num_used for pool in self.pools)

    @property
    def num_cached(self) -> int:
        """Pages that are only held by the prefix caches."""
        return sum(pool.num_cached for pool in self.pools)

    def find_problem(self, tokens: int, remedy: str) -> str | None:
        """Why no group can hold a sequence of this many tokens; None if one can."""
        most, groups = self.pages_per_group * self.page_size, len(self.pools)
        if tokens <= most:
            return None
        where = "" if groups == 1 else f" on each of the {groups} groups of devices that share a batch"
        reason = f"prompt and completion need {tokens} tokens of KV cache, which holds {most}{where}"
        return f"{reason}: raise task.engine.cache_tokens, {remedy}"

    def order_groups(self, prompt: Sequence[int], root: int = 0) -> list[int]:
        """Return the groups with a free slot, the best for a prompt first.

        The least loaded one, since a step takes as long as its fullest group; among these, the one that has cached the
        most pages of the prompt.
        """
        groups = [group for group, slots in enumerate(self._free_slots) if slots]
        if len(groups) < 2:
            return groups
        return sorted(groups, key=lambda g: (-len(self._free_slots[g]), -self.pools[g].num_cached_pages(prompt, root)))

    def reserve(self, group: int, prompt: Sequence[int], tokens: int, root: int = 0) -> Place | None:
        """Reserve a slot, and pages for `tokens` tokens; None if the group has not enough pages at the moment."""
        lease = self.pools[group].reserve(prompt, tokens, root)
        if lease is None:
            return None
        return Place(group, self._free_slots[group].pop(), lease, array("I", lease.pages).tobytes())

    def publish(self, place: Place, tokens: Sequence[int], length: int) -> None:
        """Add the pages that the first `length` tokens fill to the prefix cache of the place's group."""
        self.pools[place.group].publish(place.lease, tokens, length)

    def release(self, place: Place) -> None:
        """Return the slot and the pages of a place."""
        self._free_slots[place.group].append(place.slot)
        self.pools[place.group].release(place.lease)

    def clear_prefix_cache(self) -> None:
        for pool in self.pools:
            pool.clear_prefix_cache()
