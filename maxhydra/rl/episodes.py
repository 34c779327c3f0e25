"""Episodes, the units of a rollout. The token ids that the model sampled are those that are trained on.

An episode is a prompt and the tokens after it. Without an environment these are one completion. With an environment,
the turns of the model alternate with the environment's messages; the messages are tokenized alone and appended, and
nothing that the model sampled is tokenized again. Only sampled tokens have loss.

With task.engine.deterministic, all open episodes generate a turn, then all environments step, and so on: the batches
that the engine decodes, and with them every rounding, do not depend on how long environments take, so a resumed run
repeats an episode exactly. Otherwise each episode continues as soon as its environment has replied, while the engine
decodes others.
"""

import dataclasses
import queue
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from maxhydra.config.schema.decode import Sampling
from maxhydra.config.schema.reward import Environment as Config
from maxhydra.data.chat import ChatTemplateError, Message, Tools
from maxhydra.data.tokenizers import special_token_pattern
from maxhydra.data.tool_calls import format_of, parse_turn
from maxhydra.decode.engine import Engine
from maxhydra.decode.request import Completion, Request
from maxhydra.decode.sampling_params import PromptEncoder, derive_seed, make_requests
from maxhydra.rl.environment_pool import EnvironmentPool, Failure
from maxhydra.rl.environment_process import INVALID

# Finish reason of an episode that reached environment.max_turns.
MAX_TURNS = "turns"


@dataclasses.dataclass
class Episode:
    """A prompt and the tokens after it."""

    prompt: tuple[int, ...]
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    """Log-probabilities of the tokens when they were sampled; 0 for tokens of the environment."""
    is_sampled: list[bool] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    """Versions of the weights that sampled the sampled tokens."""
    experts: np.ndarray | None = None
    """Experts [tokens, L, K] of prompt and tokens, except the last one; those with which a token was first computed."""
    finish: str = ""
    """stop; length: task.max_tokens; turns: environment.max_turns; hangs, crashes, invalid: of the environment."""
    text: str = ""
    """The text of the model's last turn."""
    error: str = ""
    transcript: str | None = None
    """All text after the prompt. None without an environment: it is `text`."""
    turns: list[Message] = dataclasses.field(default_factory=list)
    """Messages after the prompt."""
    reward: float | None = None
    """Sum of the environment's rewards; None without an environment."""
    scores: dict[str, float] = dataclasses.field(default_factory=dict)
    """Numbers that the environment reported at the end, such as the values of a rubric."""
    failure: str | None = None
    """Why the environment failed. Such an episode has no loss."""

    @classmethod
    def from_completion(cls, prompt: Sequence[int], completion: Completion) -> "Episode":
        episode = cls(tuple(prompt), finish=completion.finish, error=completion.error)
        episode.add_turn(completion)
        episode.text = completion.text
        return episode

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Episode":
        return cls(**{**fields, "prompt": tuple(fields["prompt"])})

    def add_turn(self, completion: Completion) -> None:
        self.tokens += completion.tokens
        self.logprobs += [token.logprob for token in completion.logprobs]
        self.versions += [token.version for token in completion.logprobs]
        self.is_sampled += [True] * len(completion.tokens)
        if self.experts is None:
            self.experts = completion.experts
        elif completion.experts is not None:
            # The prefill has computed earlier turns again, maybe with other experts.
            self.experts = np.concatenate([self.experts, completion.experts[len(self.experts) :]])

    def add_reply(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.is_sampled += [False] * len(tokens)

    @property
    def num_sampled(self) -> int:
        return sum(self.is_sampled)

    @property
    def num_turns(self) -> int:
        return sum(turn["role"] == "assistant" for turn in self.turns)

    @property
    def num_tool_calls(self) -> int:
        return sum(len(turn.get("tool_calls", ())) for turn in self.turns)


class TurnEncoder:
    """Token ids of an environment's messages, and messages of the model's tokens, by the model's chat template."""

    def __init__(self, prompts: PromptEncoder):
        self._template, self._tokenizer = prompts.template, prompts.tokenizer
        self._format = format_of(prompts.tokenizer.chat_template or "")
        self._prompts = prompts
        self._pattern = special_token_pattern(self._tokenizer.special_token_ids)
        self.end_ids = prompts.eos_ids
        """Tokens that end a turn of the model."""

    def prompt(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Ids of the messages that an environment starts with, and of the header of the model's turn."""
        return self._encode(self._template.prompt(messages, tools=tools))

    def reply(self, message: Message, replies: Sequence[Message], *, is_cut: bool) -> list[int]:
        """Ids of the replies, up to the model's next turn.

        The template renders them after a placeholder for the model's turn, whose text is then dropped together with the
        token that ends it, which the model has sampled unless its turn was cut.
        """
        mark = secrets.token_hex(16)
        text = self._template.prompt([{"role": "user", "content": "a"}, _placeholder(message, mark), *replies])
        text = text.rpartition(mark)[2]
        ends = [found for found in self._specials(text) if self._id(found[0]) in self.end_ids]
        if end := next(iter(ends or self._specials(text)), None):
            text = text[end[1] - len(end[0]) * is_cut :]
        return self._encode(text)

    def message(self, tokens: Sequence[int]) -> Message:
        """The message of a turn, from its tokens."""
        tokens = tokens[:-1] if tokens and tokens[-1] in self.end_ids else tokens
        return parse_turn(self.text(tokens), self._format)

    def text(self, tokens: Sequence[int]) -> str:
        """Text with the names of special tokens."""
        return self._prompts.text_with_names(tokens)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode_with_special_tokens(text)[0].tolist()
        return ids

    def _id(self, name: str) -> int:
        return self._tokenizer.special_token_ids[name]

    def _specials(self, text: str) -> list[tuple[str, int]]:
        """Names of the special tokens in a text, with the positions of their ends."""
        return [(found[0], found.end()) for found in self._pattern.finditer(text)] if self._pattern else []


def _placeholder(message: Message, mark: str) -> dict[str, Any]:
    """A message with the same tool calls, in which `mark` is the content and all arguments."""
    made: dict[str, Any] = {"role": "assistant", "content": mark}
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [
            {**call, "function": {"name": call["function"]["name"], "arguments": {"x": mark}}} for call in calls
        ]
    return made


@dataclasses.dataclass(frozen=True)
class EpisodeRunner:
    """Plays episodes: the engine samples the model's turns, environments reply. Runs in process 0."""

    pool: EnvironmentPool
    encoder: TurnEncoder
    config: Config
    max_tokens: int
    """Tokens after the prompt."""
    max_prompt: int
    seed: int
    is_deterministic: bool
    _slots: queue.SimpleQueue[int] = dataclasses.field(default_factory=queue.SimpleQueue)
    """Free slots of the pool, for episodes that are played concurrently."""

    def __post_init__(self) -> None:
        for slot in range(self.config.concurrency):
            self._slots.put(slot)

    def run(
        self,
        engine: Engine,
        prompts: Sequence[tuple[Sequence[int], Mapping[str, Any]]],
        sampling: Sampling,
        *,
        samples: int,
        number: int,
    ) -> list[Episode]:
        """`samples` episodes per prompt, in order; `number` is the index of the first prompt in the run.

        A prompt is its record, and its ids, which only an episode has whose environment fails to start.
        """
        states = []
        for index, (ids, record) in enumerate(prompts, number):
            requests = make_requests(ids, sampling, samples=samples, seed=self.seed, number=index, logprobs=0)
            seeded = {**record, "seed": derive_seed(self.seed, index)}
            states += [_State(self, Episode(tuple(ids), reward=0.0), seeded, request) for request in requests]
        play = self._play_in_rounds if self.is_deterministic else self._play_concurrently
        play(engine, states)
        return [state.episode for state in states]

    def _play_in_rounds(self, engine: Engine, states: Sequence["_State"]) -> None:
        for start in range(0, len(states), self.config.concurrency):
            active = dict(enumerate(states[start : start + self.config.concurrency]))
            resets = {slot: self.pool.reset(slot, state.record) for slot, state in active.items()}
            for slot, future in resets.items():
                active[slot].start(future.result())
            while active := {slot: state for slot, state in active.items() if state.is_open}:
                handles = engine.submit_all([state.request() for state in active.values()])
                messages = {
                    slot: active[slot].take_turn(handle.result()) for slot, handle in zip(active, handles, strict=True)
                }
                steps = {slot: self.pool.step(slot, message) for slot, message in messages.items() if message}
                for slot, future in steps.items():
                    active[slot].observe(future.result())
            for slot in resets:
                self.pool.end(slot)

    def _play_concurrently(self, engine: Engine, states: Sequence["_State"]) -> None:
        def play(state: "_State") -> None:
            slot = self._slots.get()
            try:
                state.start(self.pool.reset(slot, state.record).result())
                while state.is_open:
                    if message := state.take_turn(engine.submit(state.request()).result()):
                        state.observe(self.pool.step(slot, message).result())
                self.pool.end(slot)
            finally:
                self._slots.put(slot)

        with ThreadPoolExecutor(self.config.concurrency, thread_name_prefix="episode") as threads:
            list(threads.map(play, states))


class _State:
    """An episode that is being played."""

    def __init__(self, runner: EpisodeRunner, episode: Episode, record: dict[str, Any], request: Request):
        self.episode, self.record = episode, record
        self._runner, self._request = runner, request
        self._is_cut = False
        """Whether the last turn reached environment.turn_tokens."""

    @property
    def is_open(self) -> bool:
        return not self.episode.finish

    def start(self, reply: Any) -> None:
        """Begin with the environment's prompt."""
        if isinstance(reply, Failure):
            return self._fail(reply)
        if (prompt := self._encoded(lambda: self._runner.encoder.prompt(reply["messages"], reply["tools"]))) is None:
            return None
        if not 0 < len(prompt) <= self._runner.max_prompt:
            limit = f"train.seq_len + 1 - task.max_tokens = {self._runner.max_prompt}"
            return self._fail(Failure(INVALID, f"returned a prompt of {len(prompt)} tokens; accepted: 1 to {limit}"))
        self.episode.prompt = tuple(prompt)
        return None

    def request(self) -> Request:
        """The request of the next turn. Seeds of later turns derive from that of the first."""
        episode, turn = self.episode, self.episode.num_turns
        remaining = self._runner.max_tokens - len(episode.tokens)
        return dataclasses.replace(
            self._request,
            prompt=(*episode.prompt, *episode.tokens),
            max_tokens=min(remaining, self._runner.config.turn_tokens or remaining),
            seed=derive_seed(self._request.seed, turn) if turn else self._request.seed,
            stream=False,
        )

    def take_turn(self, completion: Completion) -> Message | None:
        """Add a turn of the model; its message, or None if the episode has ended."""
        episode = self.episode
        episode.add_turn(completion)
        message = self._runner.encoder.message(completion.tokens)
        episode.turns.append(message)
        episode.text = message["content"]
        self._is_cut = completion.finish == "length" and len(completion.tokens) == self._runner.config.turn_tokens
        if completion.finish == "stop" or (self._is_cut and len(episode.tokens) < self._runner.max_tokens):
            return message
        episode.finish, episode.error = completion.finish, completion.error
        self._finish()
        return None

    def observe(self, reply: Any) -> None:
        """Add the environment's reply to the last turn."""
        episode = self.episode
        if isinstance(reply, Failure):
            return self._fail(reply)
        message = episode.turns[-1]
        episode.turns += reply["messages"]
        assert episode.reward is not None
        episode.reward += reply["reward"]
        episode.scores = reply.get("scores", {})
        if reply["done"] or episode.num_turns == self._runner.config.max_turns:
            episode.finish = "stop" if reply["done"] else MAX_TURNS
            return self._finish()
        tokens = self._encoded(lambda: self._runner.encoder.reply(message, reply["messages"], is_cut=self._is_cut))
        if tokens is None:
            return None
        # Two tokens must fit: the engine rejects a prompt that fills the context.
        if len(episode.tokens) + len(tokens) > self._runner.max_tokens - 2:
            episode.finish = "length"
            return self._finish()
        episode.add_reply(tokens)
        return None

    def _encoded(self, encode: Callable[[], list[int]]) -> list[int] | None:
        """Ids of the environment's messages; None if the template rejects them, which ends the episode."""
        try:
            return encode()
        except ChatTemplateError as error:
            self._fail(Failure(INVALID, f"returned messages that cannot be rendered: {error}"))
            return None

    def _fail(self, failure: Failure) -> None:
        self._runner.pool.report(failure)
        self.episode.finish, self.episode.failure = failure.kind, failure.reason
        self._finish()

    def _finish(self) -> None:
        self.episode.transcript = self._runner.encoder.text(self.episode.tokens)
