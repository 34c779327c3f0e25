"""/v1/responses as a stream: an event for each change of the response and of its items."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from maxhydra.decode.openai_server.http11 import HttpError
from maxhydra.decode.openai_server.response_schema import ResponseBuilder
from maxhydra.decode.openai_server.responses_api import call_item, response_of, status_after, text_item
from maxhydra.decode.request import Delta

Event = dict[str, Any]
# Kinds of text: of an item, of its only part, and of the events that extend the part.
KINDS = {
    "reasoning_content": ("reasoning", "reasoning_text", "response.reasoning_text"),
    "content": ("message", "output_text", "response.output_text"),
}
# Further fields of these events.
EXTRA: dict[str, dict[str, Any]] = {"reasoning_content": {}, "content": {"logprobs": []}}


@dataclasses.dataclass
class _OpenText:
    """An item that is being written."""

    kind: str
    index: int
    text: str = ""


class ResponseStream:
    """The events of one response: items are opened, extended and closed one after the other."""

    def __init__(self, builder: ResponseBuilder):
        self._builder, self._numbers = builder, itertools.count()
        self._output: list[dict[str, Any]] = []
        self._open: _OpenText | None = None
        self._finish: str | None = None

    def opening(self, index: int) -> list[Event]:
        """Return the events before the first token."""
        response = self._response("in_progress", None)
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def chunks(self, index: int, delta: Delta, offset: int) -> list[Event]:
        """Return the events of a delta."""
        parts, self._finish = self._builder.parts(index, delta.text, delta.finish)
        events = [event for kind in KINDS if parts[kind] for event in self._extend(kind, parts[kind])]
        for call in parts["tool_calls"]:
            events += [*self._close(), *self._call(call)]
        return events

    def closing(self, num_tokens: int) -> list[Event]:
        """Return the events after the last token."""
        # A response without any text has an empty message.
        events = list(self._close()) if self._open or self._output else [*self._extend("content", ""), *self._close()]
        status = status_after(self._finish)
        return [*events, self._event(f"response.{status}", response=self._response(status, num_tokens))]

    def failure(self, error: HttpError) -> Event:
        """Return the event that ends a stream whose request failed."""
        fields = {name: error.body()["error"].get(name) for name in ("code", "message", "param")}
        return self._event("error", **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "sequence_number": next(self._numbers), **fields}

    def _response(self, status: str, num_tokens: int | None) -> dict[str, Any]:
        builder = self._builder
        usage = None if num_tokens is None else builder.usage(num_tokens)
        return response_of(builder.id, builder.created, builder.model, self._output, status=status, usage=usage)

    def _extend(self, kind: str, text: str) -> Iterator[Event]:
        item_kind, part_kind, prefix = KINDS[kind]
        if self._open is None or self._open.kind != kind:
            yield from self._close()
            self._open = _OpenText(kind, len(self._output))
            item = text_item(self._builder.id, item_kind, None)
            yield self._event("response.output_item.added", output_index=self._open.index, item=item)
            yield self._part("response.content_part.added", part_kind)
        self._open.text += text
        if text:
            yield self._event(f"{prefix}.delta", **self._place(), delta=text, **EXTRA[kind])

    def _close(self) -> Iterator[Event]:
        if self._open is None:
            return
        item_kind, part_kind, prefix = KINDS[self._open.kind]
        yield self._event(f"{prefix}.done", **self._place(), text=self._open.text, **EXTRA[self._open.kind])
        yield self._part("response.content_part.done", part_kind)
        item = text_item(self._builder.id, item_kind, self._open.text, status=status_after(self._finish))
        self._output.append(item)
        yield self._event("response.output_item.done", output_index=self._open.index, item=item)
        self._open = None

    def _part(self, event: str, kind: str) -> Event:
        assert self._open is not None
        annotations: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
        return self._event(event, **self._place(), part={"type": kind, "text": self._open.text, **annotations})

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        id = text_item(self._builder.id, KINDS[self._open.kind][0], None)["id"]
        return {"item_id": id, "output_index": self._open.index, "content_index": 0}

    def _call(self, call: dict[str, Any]) -> Iterator[Event]:
        """The events of a function call, whose arguments arrive together."""
        item = call_item(self._builder.id, call["index"], call)
        index, arguments = len(self._output), item["arguments"]
        place = {"item_id": item["id"], "output_index": index}
        opened = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=index, item=opened)
        yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
        yield self._event("response.function_call_arguments.done", **place, arguments=arguments)
        self._output.append(item)
        yield self._event("response.output_item.done", output_index=index, item=item)
