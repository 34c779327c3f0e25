"""Messages between the engine's process and those of the HTTP server: msgpack, one after the other on a socket.

| message | to | content |
|---|---|---|
| ready | engine | why the process cannot serve, or "" |
| start, stop | server | accept connections; finish running requests and exit |
| submit | engine | number of the first sequence, field of the prompt, requests, their images and audio |
| cancel | engine | numbers of sequences |
| call | engine | number, method of `Backend`, arguments |
| result, error | server | number of a call or a submitted request; value, or the fields of an HttpError |
| deltas | server | number and delta of each sequence, for a whole call of the engine |
"""

import dataclasses
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import msgpack
import numpy as np

from maxhydra.data.audio.tokens import Clips
from maxhydra.decode.openai_server.http11 import HttpError
from maxhydra.decode.request import MEDIA, Delta, Request, TokenLogprob

READY, START, STOP, SUBMIT, CANCEL, CALL, RESULT, ERROR, DELTAS = range(9)
# Images and audio are the last fields.
REQUEST_VALUES = attrgetter(*(field.name for field in dataclasses.fields(Request) if field.name not in MEDIA))
# Not dataclasses.astuple, which takes 400 times as long, in the engine's thread.
LOGPROB_VALUES = attrgetter(*(field.name for field in dataclasses.fields(TokenLogprob)))
ARRAY = 1
# Bytes of an array; images may take hundreds of MiB.
MAX_ARRAY = 2**32 - 1
# JSON may contain lone surrogates, which UTF-8 does not have.
TEXT_ERRORS = "surrogatepass"

Message = tuple[Any, ...]


def pack(*message: Any) -> bytes:
    """Encode a message of None, bool, int, float, str, bytes, sequences and arrays."""
    packed: bytes = msgpack.packb(message, default=_pack_array, unicode_errors=TEXT_ERRORS)
    return packed


class Unpacker:
    """Decodes a stream of messages; sequences arrive as tuples."""

    def __init__(self) -> None:
        options = {"ext_hook": _unpack_array, "max_buffer_size": MAX_ARRAY, "unicode_errors": TEXT_ERRORS}
        self._stream = msgpack.Unpacker(use_list=False, **options)

    def decode(self, data: bytes | memoryview) -> Iterator[Message]:
        """Iterate over the messages that are complete with this data."""
        self._stream.feed(data)
        yield from self._stream


def encode_requests(requests: Sequence[Request]) -> tuple[Any, ...]:
    """Encode the sequences of one HTTP request, all of which have the same images and audio."""
    return list(map(REQUEST_VALUES, requests)), requests[0].images, requests[0].audio


def decode_requests(values: Sequence[Any]) -> list[Request]:
    rows, images, audio = values
    media: list[Any] = [images, None if audio is None else Clips(*audio)]
    return [Request(*row, *media) for row in rows]


def encode_delta(number: int, delta: Delta) -> tuple[Any, ...]:
    """Encode the delta of a sequence; most have only token ids."""
    if not (delta.is_detokenized or delta.logprobs or delta.prompt_logprobs):
        return number, delta.tokens, delta.finish
    logprobs = [LOGPROB_VALUES(each) for each in delta.logprobs]
    scores = [LOGPROB_VALUES(each) for each in delta.prompt_logprobs]
    others = delta.text, delta.is_detokenized, delta.error, logprobs, scores
    return number, delta.tokens, delta.finish, *others


def decode_delta(values: Sequence[Any]) -> tuple[int, Delta]:
    number, tokens, finish, *others = values
    if not others:
        return number, Delta("", tokens, (), finish, is_detokenized=False)
    text, is_detokenized, error, *logprobs = others
    given, of_prompt = (tuple(TokenLogprob(*each) for each in entries) for entries in logprobs)
    return number, Delta(text, tokens, given, finish, error, of_prompt, is_detokenized=is_detokenized)


def encode_error(error: HttpError) -> tuple[Any, ...]:
    return error.status, str(error), error.param, error.code, list(error.headers.items())


def decode_error(values: Sequence[Any]) -> HttpError:
    status, message, param, code, headers = values
    return HttpError(status, message, param=param, code=code, headers=dict(headers))


def _pack_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(ARRAY, msgpack.packb((value.dtype.str, value.shape, value.tobytes())))
    raise TypeError(f"{type(value).__name__} is not part of messages")


def _unpack_array(code: int, data: bytes) -> Any:
    assert code == ARRAY
    dtype, shape, values = msgpack.unpackb(data, max_bin_len=MAX_ARRAY)
    return np.frombuffer(values, dtype).reshape(shape)
