"""Tokens to text that can no longer change, at the same cost for every token however long the answer is.

A character may be split over tokens, so what ends in the middle of one is held back; and a text that ends an answer may
be split over tokens, so what could be its beginning is held back too.
"""

from collections.abc import Sequence

from maxhydra.data import Tokenizer

# Shown by decoders for bytes that are no character, or not yet.
BROKEN = "�"
# Tokens of the prompt that are decoded with the first of the answer: some tokenizers write a space before a word only
# where something stands before it.
BEFORE = 6
# Bytes of a character at most, and so tokens that one is split over.
CHARACTER = 4
# Tokens of a window at most.
LONGEST = 16


class Detokenizer:
    """The text of one answer, as its tokens come.

    It decodes a window of the last tokens: those whose text is out already, and the new. Text is out up to `_out`
    characters of the window. Broken characters at the end are not out: they may become whole, and some decoders show
    one for every byte of a character that is not complete, even of those before and behind it. So a window begins with
    a whole character wherever there is one.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._window = _end_of(prompt, tokenizer)
        self._out: int | None = len(tokenizer.decode(self._window).rstrip(BROKEN))
        """None: all but `_pending` characters, which are counted when more tokens come."""
        self._pending = 0
        self._new = len(self._window)

    def add(self, tokens: Sequence[int]) -> str:
        """The text that these tokens make final: decoded at once if it ends with a whole character, as most does."""
        special = self._tokenizer.special
        words = tokens if special.isdisjoint(tokens) else [token for token in tokens if token not in special]
        if len(words) > 1:
            out, text = self._told(), self._tokenizer.decode([*self._window, *words])
            if not text.endswith(BROKEN):
                return self._give(text[out:], keeping=[*self._window[self._new :], *words], pending=0)
        return "".join(map(self._add, words))

    def _add(self, token: int) -> str:
        out = self._told()
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        if not text.endswith(BROKEN):
            return self._give(text[out:], keeping=self._window[self._new :], pending=0)
        if len(self._window) > LONGEST:
            # Too many for one character: all but the last are broken for good.
            return self._give(text[out:-1], keeping=self._window[-CHARACTER:], pending=1)
        whole = len(text.rstrip(BROKEN))
        self._out = max(out, whole)
        return text[out:whole]

    def rest(self) -> str:
        """What was held back, once no token follows."""
        is_all_out = self._out is None and self._pending == 0
        return "" if is_all_out else self._tokenizer.decode(self._window)[self._told() :]

    def _told(self) -> int:
        """Characters of the window that are out."""
        if self._out is None:
            self._out = len(self._tokenizer.decode(self._window)) - self._pending
        return self._out

    def _give(self, final: str, *, keeping: list[int], pending: int) -> str:
        """The next window begins with tokens whose text is out, but for the end."""
        self._window, self._new = keeping, len(keeping)
        self._out, self._pending = None, pending
        return final


def _end_of(prompt: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Its last tokens, with those before that they share a character with."""
    ends = (list(prompt[-BEFORE - more :]) for more in range(CHARACTER))
    whole = (end for end in ends if not tokenizer.decode(end).startswith(BROKEN))
    return next(whole, list(prompt[-BEFORE:]))


class Stopper:
    """Cuts an answer before the first of its stop texts."""

    def __init__(self, stop: Sequence[str]):
        self._stop = stop
        self._longest = max(map(len, stop), default=0)
        self._held = ""
        self.is_stopped = False

    def add(self, text: str) -> str:
        """The part of the text so far that cannot be the beginning of a stop text, and was not given before."""
        if not self._stop or not text:
            return text
        self._held += text
        # The first to be complete, wherever the borders between tokens are.
        ends = [(start + len(stop), start) for stop in self._stop if (start := self._held.find(stop)) >= 0]
        if ends:
            self.is_stopped = True
            return self._give(min(ends)[1])
        longest = min(len(self._held), self._longest - 1)
        kept = next((n for n in range(longest, 0, -1) if self._is_beginning(self._held[-n:])), 0)
        return self._give(len(self._held) - kept)

    def rest(self) -> str:
        """What was held back, once no text follows."""
        return "" if self.is_stopped else self._give(len(self._held))

    def _is_beginning(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stop)

    def _give(self, end: int) -> str:
        given, self._held = self._held[:end], self._held[end:]
        return given
