"""Who has which page of the cache, and which pages hold beginnings of prompts that may come again.

Pages of whole prompts form chains: a page is known by the page before it and its own tokens, all of which are compared,
so that no two texts can be taken for one another. A page that nobody uses stays known until it is needed, the least
recently used first, and within a chain the last first.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence

Key = tuple[int, tuple[int, ...]]


@dataclasses.dataclass(slots=True)
class PageLease:
    """A sequence's pages."""

    pages: list[int]
    """In the order of the tokens; enough for all that the sequence may come to hold."""
    shared: int
    """Leading pages that were there already, with their tokens."""
    link: int
    """Name of the last page that is part of a chain."""
    chained: int
    """Leading pages that are part of a chain."""
    era: int


class PagePool:
    """Hands out pages, and finds those that hold the beginning of a prompt."""

    def __init__(self, pages: int, page_size: int, *, remembers: bool):
        self.page_size = page_size
        self.pages = pages
        self._remembers = remembers
        self._free = list(reversed(range(pages)))
        self._users = [0] * pages
        self._known: dict[Key, tuple[int, int]] = {}
        self._key_of: dict[int, Key] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._links = 0
        self._era = 0

    @property
    def used(self) -> int:
        """Pages that sequences hold."""
        return self.pages - len(self._free) - len(self._idle)

    @property
    def kept(self) -> int:
        """Pages that nobody holds, and that are known."""
        return len(self._idle)

    def count(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def next_key(self, prompt: Sequence[int]) -> Key | None:
        """The first page of a prompt that is not known yet; None where there is none that could be."""
        found, link = self._find(prompt)
        return self._key(prompt, len(found), link) if len(found) < self._findable(prompt) else None

    def reserve(self, prompt: Sequence[int], tokens: int) -> PageLease | None:
        """Pages for `tokens` tokens, the prompt's first; None if there are not enough for now."""
        found, link = self._find(prompt)
        free, users, needed = self._free, self._users, self.count(tokens) - len(found)
        taken = sum(page in self._idle for page in found) if found else 0
        if needed > len(free) + len(self._idle) - taken:
            return None
        for page in found:
            self._use(page)
        fresh = free[: -needed - 1 : -1]
        del free[len(free) - len(fresh) :]
        while len(fresh) < needed:
            fresh.append(self._forgotten())
        for page in fresh:
            users[page] = 1
        return PageLease(pages=found + fresh, shared=len(found), link=link, chained=len(found), era=self._era)

    def publish(self, lease: PageLease, tokens: Sequence[int], length: int) -> None:
        """Let others find the pages that are full with the first `length` tokens, whose writing is under way."""
        if not self._remembers or lease.era != self._era:
            return
        for index in range(lease.chained, length // self.page_size):
            key = self._key(tokens, index, lease.link)
            known = self._known.get(key)
            if known is None:
                self._links += 1
                known = self._known[key] = (lease.pages[index], self._links)
                self._key_of[lease.pages[index]] = key
            lease.link = known[1]
            lease.chained = index + 1

    def release(self, lease: PageLease) -> None:
        for page in reversed(lease.pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.append(page)
        lease.pages = []

    def forget(self) -> None:
        """Know no page any more: the weights have changed, and with them what the pages should hold."""
        self._free += self._idle
        self._idle.clear()
        self._known.clear()
        self._key_of.clear()
        self._era += 1

    def _find(self, prompt: Sequence[int]) -> tuple[list[int], int]:
        """Pages that hold the beginning of a prompt, without its last token, whose logits are needed."""
        found: list[int] = []
        link = 0
        for index in range(self._findable(prompt)):
            known = self._known.get(self._key(prompt, index, link))
            if known is None:
                break
            found.append(known[0])
            link = known[1]
        return found, link

    def _findable(self, prompt: Sequence[int]) -> int:
        return (len(prompt) - 1) // self.page_size if self._remembers else 0

    def _key(self, tokens: Sequence[int], index: int, link: int) -> Key:
        return link, tuple(tokens[index * self.page_size : (index + 1) * self.page_size])

    def _use(self, page: int) -> None:
        self._users[page] += 1
        self._idle.pop(page, None)

    def _forgotten(self) -> int:
        """The page that nobody has held for longest, no longer known."""
        page, _ = self._idle.popitem(last=False)
        del self._known[self._key_of.pop(page)]
        return page
