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
# Bytes of a character; tokens that may hold the beginning of one.
CHARACTER = 4


class Detokenizer:
    """The text of one answer, token by token.

    It decodes a window of the last tokens: those whose text is out already, and the new. Text is out up to `_out`
    characters of the window; at most its last character, a broken one, is not.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._window = list(prompt[-BEFORE:])
        text = tokenizer.decode(self._window)
        self._out = len(text) - text.endswith(BROKEN)
        self._start_of_new = len(self._window)

    def add(self, token: int) -> str:
        """The text that this token makes final."""
        if token in self._tokenizer.special:
            return ""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        is_broken = text.endswith(BROKEN)
        # Only the last of several broken characters can still become a whole one.
        final = text[self._out : len(text) - is_broken]
        self._out = max(self._out, len(text) - is_broken)
        if not is_broken:
            self._window = self._window[self._start_of_new :]
            self._settle(0)
        elif len(self._window) > 4 * CHARACTER:
            self._window = self._window[-CHARACTER:]
            self._settle(1)
        return final

    def rest(self) -> str:
        """What was held back, once no token follows."""
        return self._tokenizer.decode(self._window)[self._out :]

    def _settle(self, pending: int) -> None:
        """Begin a window whose text is out, all but the last `pending` characters."""
        self._out = len(self._tokenizer.decode(self._window)) - pending
        self._start_of_new = len(self._window)


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
