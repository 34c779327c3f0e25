"""Environments of the package verifiers: its own rollout loop plays the episode.

An environment of verifiers asks a client for each turn of the model. The client here hands the messages to `reset` and
`step`, and waits for the model's turn, so that stop conditions, tools, replies and rubrics are those of the package.

Imported only by environment=verifiers, because it needs the package: release 0.3, since 0.4 has no such environments.
"""

import asyncio
import json
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from verifiers import Environment
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage, ToolCall

from maxhydra.rl.environments import Message, StepResult

# Columns of a record that the rows of a verifiers dataset can have too.
COLUMNS = ("answer", "info", "task", "example_id")


def check_environment(environment: Any) -> None:
    """Raise TypeError or ValueError for an object that cannot play a single episode."""
    if not isinstance(environment, Environment):
        kinds = "an Environment of verifiers, such as MultiTurnEnv, SingleTurnEnv, ToolEnv or EnvGroup"
        raise TypeError(f"environment.function returned {type(environment).__name__}; accepted: {kinds}")
    if environment.requires_group_rollouts:
        raise ValueError("the rubric scores groups of rollouts, which is not supported; use functions of one rollout")


class VerifiersEnvironment:
    """One rollout of an environment, which runs in a thread."""

    def __init__(self, environment: Any):
        self._environment = environment
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Conversations to which the model replies, then the output of the rollout, or an exception."""
        self._client = _TurnClient(self._requests)
        self._messages: list[Message] = []
        """The conversation so far, as the environment sees it."""
        self.tools: list[dict[str, Any]] | None = None
        self.scores: dict[str, float] = {}
        """Values of the rubric's functions, after the last step. Their weighted sum is the reward."""

    def reset(self, record: dict[str, Any]) -> Sequence[Message]:
        row = {"example_id": 0, **{name: record[name] for name in COLUMNS if record.get(name) is not None}}
        row["prompt"] = [dict(message) for message in record["prompt"]]
        threading.Thread(target=self._play, args=(row,), name="verifiers", daemon=True).start()
        request = self._requests.get()
        if not isinstance(request, tuple):
            raise RuntimeError(f"the rollout ended before the first turn of the model: {_describe(request)}")
        self._messages, self.tools = request
        return self._messages

    def step(self, message: Message) -> StepResult:
        self._client.turns.put(message)
        request = self._requests.get()
        if isinstance(request, tuple):
            return self._replies(message, request[0]), 0.0, False
        if isinstance(request, BaseException) or request.get("error"):
            raise RuntimeError(f"the rollout failed: {_describe(request)}")
        self.scores = {name: float(value) for name, value in (request.get("metrics") or {}).items()}
        return [], float(request["reward"]), True

    def _replies(self, message: Message, messages: list[Message]) -> list[Message]:
        """The messages after the model's turn."""
        known = len(self._messages)
        if messages[:known] != self._messages or [m["role"] for m in messages[known : known + 1]] != ["assistant"]:
            raise RuntimeError("the environment changed earlier messages of the conversation, which is not supported")
        self._messages = messages
        # Chat templates show the name of the function, which messages of verifiers do not have.
        names = {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        return [
            {**reply, "name": names.get(reply["tool_call_id"], "")} if reply["role"] == "tool" else reply
            for reply in messages[known + 1 :]
        ]

    def _play(self, row: dict[str, Any]) -> None:
        try:
            self._requests.put(asyncio.run(self._environment.run_rollout(row, self._client, "policy", {})))
        except BaseException as error:  # user code may raise anything; `reset` or `step` raises it
            self._requests.put(error)


class _TurnClient(Client):  # type: ignore[misc, type-arg, unused-ignore]
    """A client whose model is the policy of the run."""

    def __init__(self, requests: "queue.SimpleQueue[Any]"):
        super().__init__(None)
        self._requests = requests
        self.turns: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def setup_client(self, config: Any) -> None:
        return None

    async def to_native_tool(self, tool: Any) -> dict[str, Any]:
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        return {"type": "function", "function": function}

    async def to_native_prompt(self, messages: Sequence[Any]) -> tuple[list[Message], dict[str, Any]]:
        return [_as_message(message.model_dump(exclude_none=True)) for message in messages], {}

    async def get_native_response(
        self,
        prompt: list[Message],
        model: str,
        sampling_args: Mapping[str, Any],
        tools: list[dict[str, Any]] | None = None,
        **_: Any,
    ) -> Message:
        self._requests.put((prompt, tools))
        return await asyncio.to_thread(self.turns.get)

    async def raise_from_native_response(self, response: Message) -> None:
        return None

    async def from_native_response(self, response: Message) -> Any:
        calls = [
            ToolCall(id=call["id"], name=call["function"]["name"], arguments=json.dumps(call["function"]["arguments"]))
            for call in response.get("tool_calls", ())
        ]
        turn = ResponseMessage(
            content=response["content"],
            tool_calls=calls or None,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        return Response(id="", created=0, model="policy", message=turn)

    async def close(self) -> None:
        return None


def _as_message(message: dict[str, Any]) -> Message:
    """A message whose content is text."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        if any(part.get("type") != "text" for part in content):
            raise ValueError("a message has content other than text, which is not supported")
        content = "".join(part["text"] for part in content)
    return {**message, "content": content}


def _describe(end: Any) -> str:
    """Why a rollout ended: the innermost cause of an exception, or the error or stop condition of its output."""
    if isinstance(end, BaseException):
        while end.__cause__ is not None:
            end = end.__cause__
        return f"{type(end).__name__}: {end}"
    return str(end.get("error") or end.get("stop_condition"))
