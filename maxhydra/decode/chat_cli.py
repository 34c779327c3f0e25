"""Answers at the terminal: one prompt, or a conversation in which Ctrl-C stops the answer and not the chat."""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator

from maxhydra.config import ConfigError, Problem
from maxhydra.decode.client import Message, PromptClient
from maxhydra.decode.prompts import PromptError
from maxhydra.decode.request import Handle, RefusedError

GREETING = "/reset begins anew, /exit or Ctrl-D ends, Ctrl-C stops an answer"


class AnswerFailedError(Exception):
    """The engine failed in the middle of an answer."""


def answer(asker: PromptClient, prompt: str, write: Callable[[str], None]) -> None:
    """Write the answer to one prompt as it comes; of several samples one after the other, with a line between."""
    try:
        requests = asker.requests(asker.encode(prompt), asker.task.sampling, number=0)
        handles = [asker.engine.submit(request) for request in requests]
    except (PromptError, RefusedError) as error:
        raise ConfigError(Problem("task.prompt", str(error))) from None
    for number, handle in enumerate(handles, start=1):
        if len(handles) > 1:
            write(f"--- {number} of {len(handles)}\n")
        last = ""
        for last in filter(None, _texts(handle)):
            write(last)
        write("" if last.endswith("\n") else "\n")


def converse(asker: PromptClient, *, read: Callable[[str], str], write: Callable[[str], None]) -> None:
    """Ask, answer, and remember, until the end of the input.

    Without a chat template the model goes on from all the text so far, its own and the person's.
    """
    conversation = _Conversation(asker)
    write(f"{GREETING}\n")
    while True:
        try:
            said = read("> ")
        except EOFError:
            write("\n")
            return
        except KeyboardInterrupt:
            write(f"\n{GREETING}\n")
            continue
        match said.strip():
            case "":
                continue
            case "/exit":
                return
            case "/reset":
                conversation = _Conversation(asker)
                write("a new conversation\n")
            case _:
                conversation.turn(said, write)


def write_now(text: str) -> None:
    """Write to stdout, and let it be seen."""
    sys.stdout.write(text)
    sys.stdout.flush()


def read_line() -> Callable[[str], str]:
    """Reads a line with editing and history, where Python was built with readline."""
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("readline")
    return input


class _Conversation:
    def __init__(self, asker: PromptClient) -> None:
        self._asker = asker
        self._messages: list[Message] = asker.opening() if asker.is_chat else []
        self._text = ""
        self._turns = 0

    def turn(self, said: str, write: Callable[[str], None]) -> None:
        """One question and its answer; a question that cannot be asked is forgotten."""
        asker, handle = self._asker, None
        messages = [*self._messages, {"role": "user", "content": said}]
        answered: list[str] = []
        try:
            ids = asker.prompts.of_messages(messages) if asker.is_chat else asker.prompts.of_text(self._text + said)
            (request,) = asker.requests(ids, asker.task.sampling, number=self._turns)
            handle = asker.engine.submit(request)
            for text in _texts(handle):
                answered.append(text)
                write(text)
        except (PromptError, RefusedError) as error:
            write(f"maxhydra: {error}; /reset begins anew\n")
            return
        except KeyboardInterrupt:
            if handle is not None:
                handle.cancel()
            write(" [stopped]")
        write("" if "".join(answered).endswith("\n") else "\n")
        self._messages = [*messages, {"role": "assistant", "content": "".join(answered)}]
        self._text += said + "".join(answered)
        self._turns += 1


def _texts(handle: Handle) -> Iterator[str]:
    for delta in handle:
        if delta.finish == "error":
            raise AnswerFailedError(delta.error)
        yield delta.text
