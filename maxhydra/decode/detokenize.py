"""Incremental detokenization: emits text that can no longer change, at constant cost per token.

A character may be split over tokens, so text that ends inside one is held back; a stop string may be split over tokens
too, so text that could be the beginning of one is also held back.
"""

from collections.abc import Sequence

from maxhydra.data import Tokenizer
from maxhydra.decode.request import Delta, Request

# Decoders emit this for bytes that are not a complete character.
REPLACEMENT = "�"
# Prompt tokens that are decoded together with the first completion tokens: some tokenizers write a space before a word
# only if something precedes it.
PROMPT_TOKENS = 6
# Maximum bytes of a UTF-8 character, and so the maximum number of tokens that one is split over.
MAX_CHARACTER_TOKENS = 4
MAX_WINDOW_TOKENS = 16


class Detokenizer:
    """Text of one completion, as its tokens arrive.

    It decodes a window of recent tokens: some whose text is emitted, followed by new ones. The first `_emitted`
    characters of the window are emitted. Replacement characters at the end are held back: they may become complete, and
    some decoders show one for every byte of an incomplete character, and even for the bytes around it. So a window
    starts with a complete character if possible.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, names_special: bool = False):
        """`names_special`: names of special tokens are part of the text."""
        self._tokenizer = tokenizer
        self._names = {id: name for name, id in tokenizer.special_token_ids.items()} if names_special else {}
        self._window = _prompt_tail(prompt, tokenizer)
        self._emitted: int | None = len(tokenizer.decode(self._window).rstrip(REPLACEMENT))
        """None: all but `_held_back` characters, which are counted when more tokens arrive."""
        self._held_back = 0
        self._num_old = len(self._window)

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens complete; one decode if it ends with a complete character, as most does."""
        special = self._tokenizer.special
        if self._names and not special.isdisjoint(tokens):
            return self._add_with_names(tokens)
        ids = tokens if special.isdisjoint(tokens) else [token for token in tokens if token not in special]
        if len(ids) > 1:
            start, text = self._num_emitted(), self._tokenizer.decode([*self._window, *ids])
            if not text.endswith(REPLACEMENT):
                return self._start_window([*self._window[self._num_old :], *ids], text[start:], held_back=0)
        return "".join(map(self._add_token, ids))

    def _add_with_names(self, tokens: Sequence[int]) -> str:
        text, start = "", 0
        for index, token in enumerate(tokens):
            if token in self._names:
                text += self.add(tokens[start:index]) + self.flush() + self._names[token]
                self._window, self._num_old, self._emitted, self._held_back, start = [], 0, 0, 0, index + 1
        return text + self.add(tokens[start:])

    def _add_token(self, token: int) -> str:
        start = self._num_emitted()
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        if not text.endswith(REPLACEMENT):
            return self._start_window(self._window[self._num_old :], text[start:], held_back=0)
        if len(self._window) > MAX_WINDOW_TOKENS:
            # Too many bytes for one character: all but the last are invalid for good.
            return self._start_window(self._window[-MAX_CHARACTER_TOKENS:], text[start:-1], held_back=1)
        complete = len(text.rstrip(REPLACEMENT))
        self._emitted = max(start, complete)
        return text[start:complete]

    def flush(self) -> str:
        """Return the text that was held back; call it after the last token."""
        is_empty = not self._window or (self._emitted is None and self._held_back == 0)
        return "" if is_empty else self._tokenizer.decode(self._window)[self._num_emitted() :]

    def _num_emitted(self) -> int:
        """Return the number of characters of the window that are emitted."""
        if self._emitted is None:
            self._emitted = len(self._tokenizer.decode(self._window)) - self._held_back
        return self._emitted

    def _start_window(self, tokens: list[int], text: str, *, held_back: int) -> str:
        """Start a new window with tokens whose text is emitted except for the last `held_back` characters.

        It is empty if later text does not depend on them.
        """
        is_empty = not held_back and self._tokenizer.is_byte_level
        self._window, self._num_old = ([], 0) if is_empty else (tokens, len(tokens))
        self._emitted, self._held_back = 0 if is_empty else None, held_back
        return text


def _prompt_tail(prompt: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Return the last tokens of a prompt, starting with a complete character if possible."""
    tails = (list(prompt[-PROMPT_TOKENS - extra :]) for extra in range(MAX_CHARACTER_TOKENS))
    complete = (tail for tail in tails if not tokenizer.decode(tail).startswith(REPLACEMENT))
    return next(complete, list(prompt[-PROMPT_TOKENS:]))


class DeltaDetokenizer:
    """Makes the text of the deltas of one request that the engine leaves to their receiver."""

    def __init__(self, tokenizer: Tokenizer, request: Request):
        self._tokenizer, self._request = tokenizer, request
        self._detokenizer: Detokenizer | None = None

    def add(self, delta: Delta) -> Delta:
        """Return a delta with its text."""
        if delta.is_detokenized:
            return delta
        if self._detokenizer is None:
            names_special = self._request.names_special
            self._detokenizer = Detokenizer(self._tokenizer, self._request.prompt, names_special=names_special)
        # Such a completion has no stop strings, so that the last token of a stopped one is EOS.
        text = self._detokenizer.add(delta.tokens[:-1] if delta.finish == "stop" else delta.tokens)
        if delta.finish is not None:
            text += self._detokenizer.flush()
        others = delta.logprobs, delta.finish, delta.error, delta.prompt_logprobs, delta.experts
        return Delta(text, delta.tokens, *others)


class StopMatcher:
    """Cuts a streamed text before the first of its stop strings."""

    def __init__(self, stop: Sequence[str]):
        self._stop = stop
        self._max_length = max(map(len, stop), default=0)
        self._buffer = ""
        self.is_stopped = False

    def add(self, text: str) -> str:
        """Return the buffered and new text that cannot be the beginning of a stop string."""
        if not self._stop or not text:
            return text
        self._buffer += text
        # The stop string that is completed first wins, independently of token boundaries.
        matches = [(start + len(stop), start) for stop in self._stop if (start := self._buffer.find(stop)) >= 0]
        if matches:
            self.is_stopped = True
            return self._take(min(matches)[1])
        longest = min(len(self._buffer), self._max_length - 1)
        held_back = next((n for n in range(longest, 0, -1) if self._is_prefix(self._buffer[-n:])), 0)
        return self._take(len(self._buffer) - held_back)

    def flush(self) -> str:
        """Return the text that was held back; call it after the last text."""
        return "" if self.is_stopped else self._take(len(self._buffer))

    def _is_prefix(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stop)

    def _take(self, end: int) -> str:
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        return text
