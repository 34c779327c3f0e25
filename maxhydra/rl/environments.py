"""Environments: they reply to the model's turns, so that a rollout is an episode of several turns.

An environment is an object with two methods, and lives for one episode:

    reset(record) -> messages                        the prompt
    step(message) -> (messages, reward, done)        the reply to a turn of the model

`record` has the columns of the prompt's record, `prompt` as a list of messages, and `seed`, which is equal for all
episodes of a prompt. A message is {"role": ..., "content": ...}; the model's messages also have `tool_calls` if it
called tools. The reward of an episode is the sum over its steps. An attribute `tools`, if there is one, lists the JSON
schemas of the functions that the chat template describes to the model; an attribute `scores`, numbers by name that the
run logs after the last step.

This module does not import jax: environments run in separate processes (environment_process.py).
"""

import importlib
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from maxhydra.config.plug_ins import bind_options, call_plug_in, load_object
from maxhydra.config.schema.reward import Environment as Config
from maxhydra.config.schema.reward import EnvironmentKind
from maxhydra.rl.tools import Tool, load_tool

Message = Mapping[str, Any]
StepResult = tuple[Sequence[Message], float, bool]


class Environment(Protocol):
    """The world of one episode."""

    def reset(self, record: dict[str, Any]) -> Sequence[Message]:
        """Start the episode; the messages of the prompt."""
        ...

    def step(self, message: Message) -> StepResult:
        """Reply to the model's turn: further messages, a reward, and whether the episode has ended."""
        ...


def load_environment(config: Config) -> Callable[[], Environment]:
    """What makes the environment of an episode; raises anything that importing user code raises."""
    return LOADERS[config.kind](config)


class ToolEnvironment:
    """Calls the tools that the model asks for; the episode ends with a turn without calls."""

    def __init__(self, tools: Sequence[Tool]):
        self._tools = {tool.name: tool for tool in tools}
        self.tools = [tool.schema for tool in tools]

    def reset(self, record: dict[str, Any]) -> Sequence[Message]:
        prompt: list[Message] = record["prompt"]
        return prompt

    def step(self, message: Message) -> StepResult:
        replies = [self._reply(call["id"], call["function"]) for call in message.get("tool_calls", [])]
        invalid = message.get("invalid_tool_calls", [])
        replies += [_tool_message("", "", f"error: {reason}") for reason in invalid]
        return replies, 0.0, not replies

    def _reply(self, id: str, call: Mapping[str, Any]) -> Message:
        name = call["name"]
        if name not in self._tools:
            return _tool_message(id, name, f"error: unknown tool {name}; tools: {', '.join(self._tools)}")
        return _tool_message(id, name, self._tools[name](call["arguments"]))


def _tool_message(id: str, name: str, content: str) -> Message:
    return {"role": "tool", "tool_call_id": id, "name": name, "content": content}


class ReasoningGymEnvironment:
    """Several attempts at a reasoning-gym problem: a wrong answer gets feedback; the reward is the best score.

    The answer is the text in the last <answer> tags of a turn, or the whole turn.
    """

    def __init__(self) -> None:
        self._entry: dict[str, Any] = {}
        self._score: Callable[[str, dict[str, Any]], float] | None = None
        self._best = 0.0

    def reset(self, record: dict[str, Any]) -> Sequence[Message]:
        from reasoning_gym import get_score_answer_fn  # noqa: PLC0415

        self._entry = record["entry"]
        self._score = get_score_answer_fn(self._entry["metadata"]["source_dataset"])
        prompt: list[Message] = record["prompt"]
        return prompt

    def step(self, message: Message) -> StepResult:
        assert self._score is not None
        text = message["content"]
        found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
        score = float(self._score((found[-1] if found else text).strip(), self._entry))
        reward, self._best = max(0.0, score - self._best), max(score, self._best)
        if score >= 1:
            return [], reward, True
        feedback = f"This answer is wrong (score {score:.2f} of 1). Try again."
        return [{"role": "user", "content": feedback}], reward, False


class OpenEnvEnvironment:
    """A session with an OpenEnv server: the text of a turn is the action, that of the observation the reply."""

    def __init__(self, config: Config):
        from openenv.core import GenericEnvClient  # noqa: PLC0415

        assert config.url is not None and config.action is not None and config.observation is not None
        self._action, self._observation = config.action, config.observation
        self._client = GenericEnvClient(config.url, message_timeout_s=config.timeout).sync()

    def reset(self, record: dict[str, Any]) -> Sequence[Message]:
        """The prompt; the first observation, if it has a text, follows the last message of the user."""
        *earlier, last = record["prompt"]
        text = self._text(self._client.reset(seed=record["seed"]).observation)
        if not text:
            return [*earlier, last]
        if last["role"] != "user":
            return [*earlier, last, {"role": "user", "content": text}]
        # Many chat templates reject two messages of the user in a row.
        return [*earlier, {**last, "content": f"{last['content']}\n{text}"}]

    def step(self, message: Message) -> StepResult:
        result = self._client.step({self._action: message["content"]})
        replies = [] if result.done else [{"role": "user", "content": self._text(result.observation)}]
        return replies, result.reward or 0.0, result.done

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self._observation not in observation:
            fields = ", ".join(observation) or "none"
            raise LookupError(
                f"an observation has no field {self._observation} (environment.observation), but {fields}"
            )
        return str(observation[self._observation])


def _load_tools(config: Config) -> Callable[[], Environment]:
    tools = [load_tool(name, timeout=config.timeout, memory_limit_gib=config.memory_limit_gib) for name in config.tools]
    return lambda: ToolEnvironment(tools)


def _load_reasoning_gym(config: Config) -> Callable[[], Environment]:
    importlib.import_module("reasoning_gym")
    return ReasoningGymEnvironment


def _load_openenv(config: Config) -> Callable[[], Environment]:
    importlib.import_module("openenv.core.generic_client")
    return lambda: OpenEnvEnvironment(config)


def _load_verifiers(config: Config) -> Callable[[], Environment]:
    importlib.import_module("verifiers.types")
    module = importlib.import_module("maxhydra.rl.verifiers_environment")
    assert config.function is not None
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in numbers]
    environment = call_plug_in(config.function, options=config.options, key="environment.function")
    # The constructor of an environment replaces the signal handlers of the process.
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)
    module.check_environment(environment)
    return lambda: module.VerifiersEnvironment(environment)


def _load_function(config: Config) -> Callable[[], Environment]:
    assert config.function is not None
    key = "environment.function"
    factory = load_object(config.function, key=key)
    return partial(factory, **bind_options(factory, config.options, key=key))


LOADERS: dict[EnvironmentKind, Callable[[Config], Callable[[], Environment]]] = {
    EnvironmentKind.tools: _load_tools,
    EnvironmentKind.reasoning_gym: _load_reasoning_gym,
    EnvironmentKind.openenv: _load_openenv,
    EnvironmentKind.verifiers: _load_verifiers,
    EnvironmentKind.function: _load_function,
}
