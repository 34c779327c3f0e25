"""Completions at the terminal: one prompt, or a chat in which Ctrl-C stops the reply and not the chat."""

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator

from maxhydra.config import ConfigError, Problem
from maxhydra.decode.request import Delta, Handle, Request, RequestRejectedError
from maxhydra.decode.sampling_params import Message, PromptClient, PromptError
from maxhydra.decode.speech import SpeechError, SpeechFiles

HELP = "/reset starts a new conversation, /exit or Ctrl-D quits, Ctrl-C stops a reply"


class GenerationFailedError(Exception):
    """The engine failed during a completion."""


def complete(
    client: PromptClient, prompt: str, write: Callable[[str], None], *, speech: SpeechFiles | None = None
) -> None:
    """Stream the completion of one prompt; several samples follow each other, each under a header line.

    `speech`: where the speech of each is written after its text.
    """
    try:
        prompts, task = client.prompts, client.task
        media = prompts.insert_media(client.encode(prompt), images=task.visual_media, audios=task.audios)
        requests = client.requests(media.prompt, task.sampling, number=0)
        made = [dataclasses.replace(request, images=media.images, audio=media.audio) for request in requests]
        handles = [client.engine.submit(request) for request in made]
    except (PromptError, RequestRejectedError) as error:
        raise ConfigError(Problem("task.prompt", str(error))) from None
    for number, (request, handle) in enumerate(zip(made, handles, strict=True)):
        if len(handles) > 1:
            write(f"--- {number + 1} of {len(handles)}\n")
        last, tokens = "", list[int]()
        for delta in _deltas(handle):
            last = delta.text or last
            write(delta.text)
            tokens += delta.tokens
        write("" if last.endswith("\n") else "\n")
        if speech is not None:
            _speak(speech, number, request, tokens)


def _speak(speech: SpeechFiles, number: int, request: Request, tokens: list[int]) -> None:
    try:
        speech.write(number, request, tokens)
    except SpeechError as error:
        raise ConfigError(Problem("task.speech.folder", str(error))) from None


def chat(client: PromptClient, *, read: Callable[[str], str], write: Callable[[str], None]) -> None:
    """Run a chat until the end of the input.

    Without a chat template, the model continues the concatenated text of all turns.
    """
    conversation = _Conversation(client)
    write(f"{HELP}\n")
    while True:
        try:
            line = read("> ")
        except EOFError:
            write("\n")
            return
        except KeyboardInterrupt:
            write(f"\n{HELP}\n")
            continue
        match line.strip():
            case "":
                continue
            case "/exit":
                return
            case "/reset":
                conversation = _Conversation(client)
                write("started a new conversation\n")
            case _:
                conversation.turn(line, write)


def write_and_flush(text: str) -> None:
    """Write to stdout without buffering."""
    sys.stdout.write(text)
    sys.stdout.flush()


def line_reader() -> Callable[[str], str]:
    """Return `input`, with line editing and history if Python was built with readline."""
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("readline")
    return input


class _Conversation:
    def __init__(self, client: PromptClient) -> None:
        self._client = client
        self._messages: list[Message] = client.initial_messages() if client.is_chat else []
        self._text = ""
        self._num_turns = 0

    def turn(self, line: str, write: Callable[[str], None]) -> None:
        """Stream the reply to one user message; a message that is rejected does not become part of the history."""
        client, handle = self._client, None
        messages = [*self._messages, {"role": "user", "content": line}]
        pieces: list[str] = []
        try:
            if client.is_chat:
                ids = client.prompts.encode_messages(messages)
            else:
                ids = client.prompts.encode_text(self._text + line)
            (request,) = client.requests(ids, client.task.sampling, number=self._num_turns)
            handle = client.engine.submit(request)
            for delta in _deltas(handle):
                pieces.append(delta.text)
                write(delta.text)
        except (PromptError, RequestRejectedError) as error:
            write(f"maxhydra: {error}; /reset starts a new conversation\n")
            return
        except KeyboardInterrupt:
            if handle is not None:
                handle.cancel()
            write(" [stopped]")
        reply = "".join(pieces)
        write("" if reply.endswith("\n") else "\n")
        self._messages = [*messages, {"role": "assistant", "content": reply}]
        self._text += line + reply
        self._num_turns += 1


def _deltas(handle: Handle) -> Iterator[Delta]:
    for delta in handle:
        if delta.finish == "error":
            raise GenerationFailedError(delta.error)
        yield delta
