"""The interface of the engine: requests in, deltas and completions out."""

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from maxhydra.data.audio.tokens import Clips

# Maximum number of tokens with a logit bias; OpenAI's API accepts 300.
MAX_BIAS = 512


@dataclasses.dataclass(frozen=True)
class Request:
    """One sequence to decode. Several samples of a prompt are several requests with different seeds."""

    prompt: tuple[int, ...]
    """Token ids, at least one."""
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    stop: tuple[str, ...]
    ignore_eos: bool
    logprobs: int | None = None
    """Number of most likely tokens to report with each token's log-probability; None: no log-probabilities."""
    stream: bool = True
    """Emit deltas while the sequence runs. False: one delta at the end, which takes a fraction of the host's time."""
    adapter: str | None = None
    """Name of a loaded adapter; None: the model without one."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids and what is added to their logits."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for the tokens of the prompt after the first."""
    names_special: bool = False
    """The text contains the names of special tokens, except of the one that ends the completion."""
    grammar: str = ""
    """What the completion must match, as made by a function of grammar.py; empty: anything."""
    detokenize: bool = True
    """False: the receiver makes the text of the deltas; the engine still does where stop strings need it."""
    images: np.ndarray | None = dataclasses.field(default=None, compare=False)
    """[images, *model.vision.image_shape] images of the prompt or their tiles, in order; None: no images."""
    audio: Clips | None = dataclasses.field(default=None, compare=False)
    """Frames [clips, frames, bands] of the audio clips of the prompt and their lengths [clips]; None: no audio."""


# Fields of a request that are arrays; the last ones.
MEDIA = ("images", "audio")


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability under the model (before temperature and filters), and the most likely tokens."""

    token: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...]
    version: int = 0
    """Version of the weights that sampled the token, as given to the engine with them."""


# Not frozen: the engine makes one for every sequence in every call, and a frozen one takes three times as long.
@dataclasses.dataclass(slots=True)
class Delta:
    """A streaming update: text that can no longer change, its tokens, and the finish reason if the sequence ended."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None
    """stop: an EOS token or a stop string; length: max_tokens or the context length; cancelled; error."""
    error: str = ""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """With the first tokens, if requested: of the prompt's tokens after the first."""
    experts: np.ndarray | None = dataclasses.field(default=None, compare=False)
    """With the finish reason, if the engine records them: experts [tokens, L, K] of prompt and completion, except the
    last token."""
    is_detokenized: bool = True
    """False: the text is empty, and the receiver makes it; see `Request.detokenize`."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished sequence. `text` excludes the stop string; `tokens` are all sampled tokens, including EOS."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: str
    error: str = ""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """As in `Delta`."""
    experts: np.ndarray | None = dataclasses.field(default=None, compare=False)
    """As in `Delta`."""

    @classmethod
    def from_deltas(cls, deltas: Sequence[Delta]) -> "Completion":
        """Concatenate all deltas of a sequence."""
        if len(deltas) == 1:
            (only,) = deltas
            values = only.text, only.tokens, only.logprobs, only.finish or "", only.error
            return cls(*values, prompt_logprobs=only.prompt_logprobs, experts=only.experts)
        return cls(
            text="".join(delta.text for delta in deltas),
            tokens=tuple(token for delta in deltas for token in delta.tokens),
            logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
            finish=deltas[-1].finish or "",
            error=deltas[-1].error,
            prompt_logprobs=tuple(logprob for delta in deltas for logprob in delta.prompt_logprobs),
            experts=deltas[-1].experts,
        )

    def to_json(self) -> list[Any]:
        """The values as JSON; `from_json` restores them in another process."""
        logprobs = [[item.token, item.logprob, item.alternatives] for item in self.logprobs]
        return [self.text, self.tokens, logprobs, self.finish, self.error]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> "Completion":
        text, tokens, logprobs, finish, error = values
        entries = tuple(
            TokenLogprob(token, logprob, tuple((other, value) for other, value in alternatives))
            for token, logprob, alternatives in logprobs
        )
        return cls(text, tuple(tokens), entries, finish, error)


class Handle:
    """A submitted sequence. Iterate for deltas as they arrive, or wait for the result; any thread may cancel it."""

    def __init__(self) -> None:
        self._deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        self._listener: Callable[[Delta], None] | None = None
        self._lock = threading.Lock()
        self.is_cancelled = False

    def put(self, delta: Delta) -> None:
        """Deliver a delta; called by the engine."""
        with self._lock:
            (self._listener or self._deltas.put)(delta)

    def listen(self, listener: Callable[[Delta], None]) -> None:
        """Send every delta to a callback instead, queued ones at once, so that one thread can wait for many sequences.

        The callback runs in the engine's thread, so it must return quickly and not raise.
        """
        with self._lock:
            while not self._deltas.empty():
                listener(self._deltas.get())
            self._listener = listener

    def cancel(self) -> None:
        """Cancel the sequence; its slot is freed at the engine's next step."""
        self.is_cancelled = True

    def __iter__(self) -> Iterator[Delta]:
        while True:
            delta = self._deltas.get()
            yield delta
            if delta.finish is not None:
                return

    def result(self) -> Completion:
        """Wait until the sequence finishes."""
        return Completion.from_deltas(list(self))


class RequestRejectedError(ValueError):
    """The engine can never serve this request; the message says why and which setting to change."""


class UnknownAdapterError(RequestRejectedError):
    """No adapter of this name is loaded; the message lists the names."""


@dataclasses.dataclass(frozen=True)
class LoadedAdapter:
    """An adapter in a slot of the stacks."""

    name: str
    location: str
    slot: int
    number: int
    """Number of the load, from 1: a name that is loaded again is another adapter."""

    @property
    def prefix_root(self) -> int:
        """Root of the adapter's prefixes in the prefix cache."""
        return -self.number


class AdapterError(ValueError):
    """An adapter cannot be loaded or unloaded; the message says why."""


class Engine(Protocol):
    """Decodes many sequences together, each as if it were alone."""

    def submit(self, request: Request) -> Handle:
        """Queue a request; raise RequestRejectedError at once if it can never be served. Thread-safe."""
        ...

    def stats(self) -> dict[str, float]:
        """Return counts of running and waiting sequences, used and cached pages, generated and prefilled tokens."""
        ...

    def close(self) -> None:
        """Stop the engine's thread; unfinished sequences end with finish="cancelled"."""
        ...
