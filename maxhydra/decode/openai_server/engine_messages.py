"""Messages between the engine's process and those of the HTTP server: msgpack, one after the other on a socket.

| message | to | content |
|---|---|---|
| ready | engine | why the process cannot serve, or "" |
| start, stop | server | accept connections; finish running requests and exit |
| submit | engine | number of the first sequence, field of the prompt, requests |
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
from maxhydra.decode.request import Delta, Request, TokenLogprob

READY, START, STOP, SUBMIT, CANCEL, CALL, RESULT, ERROR, DELTAS = range(9)
# The audio is the last field.
REQUEST_VALUES = attrgetter(*(field.name for field in dataclasses.fields(Request)))
ARRAY = 1
# Bytes of a message; images may take hundreds of MiB.
MAX_MESSAGE = 2**32 - 1

Message = tuple[Any, ...]


def pack(*message: Any) -> bytes:
    """Encode a message of None, bool, int, float, str, bytes, sequences and arrays."""
    packed: bytes = msgpack.packb(message, default=_pack_array)
    return packed


class Unpacker:
    """Decodes a stream of messages; sequences arrive as tuples."""

    def __init__(self) -> None:
        self._stream = msgpack.Unpacker(use_list=False, ext_hook=_unpack_array, max_buffer_size=MAX_MESSAGE)

    def decode(self, data: bytes | memoryview) -> Iterator[Message]:
        """Iterate over the messages that are complete with this data."""
        self._stream.feed(data)
        yield from self._stream


def encode_request(request: Request) -> tuple[Any, ...]:
    values: tuple[Any, ...] = REQUEST_VALUES(request)
    return values


def decode_request(values: Sequence[Any]) -> Request:
    *others, audio = values
    given: list[Any] = [*others, None if audio is None else Clips(*audio)]
    return Request(*given)


def encode_delta(number: int, delta: Delta) -> tuple[Any, ...]:
    """Encode the delta of a sequence; most have only token ids."""
    if not (delta.is_detokenized or delta.logprobs or delta.prompt_logprobs):
        return number, delta.tokens, delta.finish
    logprobs = [dataclasses.astuple(each) for each in delta.logprobs]
    scores = [dataclasses.astuple(each) for each in delta.prompt_logprobs]
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
    dtype, shape, values = msgpack.unpackb(data, max_bin_len=MAX_MESSAGE)
    return np.frombuffer(values, dtype).reshape(shape)
