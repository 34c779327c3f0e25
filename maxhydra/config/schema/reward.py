"""Schema of rewards, a weighted sum of verifiable terms of a completion, and of environments of several turns."""

import re
from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Options, PlugInUse, Schema, option, schema, section
from maxhydra.config.errors import Problem, did_you_mean

OnFault = Enum("OnFault", ["zero", "raise"])


class RewardKind(Enum):
    exact = "exact"
    format = "format"
    function = "function"
    judge = "judge"
    length = "length"
    math = "math"
    model = "model"
    overlong = "overlong"
    reasoning_gym = "reasoning_gym"


class Scope(Enum):
    completion = "completion"
    group = "group"
    batch = "batch"


class EnvironmentKind(Enum):
    none = "none"
    tools = "tools"
    reasoning_gym = "reasoning_gym"
    openenv = "openenv"
    verifiers = "verifiers"
    function = "function"


# Fields that a kind of environment requires; other kinds do not use them.
NEEDED_BY_ENVIRONMENT = {
    "function": (EnvironmentKind.function, EnvironmentKind.verifiers),
    "tools": (EnvironmentKind.tools,),
    "url": (EnvironmentKind.openenv,),
    "action": (EnvironmentKind.openenv,),
    "observation": (EnvironmentKind.openenv,),
}
# Tools that environment.tools names without a module.
BUILT_IN_TOOLS = ("calculator", "python")
# Name of the environment's reward among the terms of a rollout.
ENVIRONMENT = "environment"

# Fields that a kind of term requires; other kinds do not use them.
NEEDED = {
    RewardKind.format: ("pattern",),
    RewardKind.length: ("target",),
    RewardKind.overlong: ("target", "buffer"),
    RewardKind.function: ("function",),
    RewardKind.model: ("weights",),
}

HTTP_ADDRESS = r"https?://[^/]"
# Kinds whose calls can run concurrently.
CONCURRENT = (RewardKind.function, RewardKind.judge)


@schema
class Judge(Schema):
    """A language model that rates completions, behind an OpenAI-compatible API."""

    url: str | None = None
    """Base URL of the API, such as http://localhost:8000/v1."""
    model: str | None = None
    """Name of the model in requests."""
    rubric: str = "Reward responses that are correct, helpful and concise."
    """Criteria of the rating, which are part of the judge's instructions."""
    key_variable: str | None = None
    """Environment variable that holds the API key. null: no key."""
    max_tokens: int = option(512, ge=1)
    """Maximum tokens of a reply, including its reasoning."""
    temperature: float = option(0.0, ge=0)
    """Sampling temperature of the judge."""
    retries: int = option(3, ge=0)
    """Further attempts after a failed connection, HTTP 408, 425, 429 or 5xx, or a reply without a rating. The waits
    between them double from half a second, and count in reward.timeout."""

    def check(self) -> Iterator[Problem]:
        if self.url is not None and not re.match(HTTP_ADDRESS, self.url):
            yield Problem("url", "is not an HTTP address", value=self.url, accepted="such as http://localhost:8000/v1")
        if self.key_variable is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.key_variable):
            # The value may be the key itself.
            accepted = "such as OPENAI_API_KEY"
            yield Problem("key_variable", "is not the name of an environment variable", value=None, accepted=accepted)


@schema
class Term(Schema):
    """One score of a completion; 1 is correct and 0 is wrong for terms that are either."""

    kind: RewardKind = RewardKind.exact
    """exact: the answer equals the expected one, ignoring case and whitespace; math: it is equal as a mathematical
    expression; format: the completion matches a pattern; length: closeness to a number of tokens; overlong: a penalty
    for long completions (Yu et al., 2025); function: a function of yours; model: the score of a reward model; judge:
    the rating of a language model behind an HTTP API; reasoning_gym: the score of the prompt's Reasoning Gym task."""
    weight: float = 1.0
    """Weight of the term in the sum."""
    pattern: str | None = None
    """format: regular expression that must match the whole completion; `.` also matches line breaks."""
    target: int | None = option(None, ge=1)
    """length: number of tokens that scores 1; the score falls linearly to 0 at zero tokens and at twice the target.
    overlong: number of tokens from which the score is -1."""
    buffer: int | None = option(None, ge=1)
    """overlong: length of the interval before target in which the score falls linearly from 0 to -1."""
    function: str | None = option(None, plug_in=PlugInUse.worker)
    """function: `package.module:function`, called in a separate process. With scope=completion as function(text,
    prompt=, answer=, expected=, record=) -> number, otherwise with a list in place of each value: function(texts,
    prompts=, answers=, expected=, records=) -> one number per text; with options= if it has such a parameter."""
    options: Options = section(Options)
    weights: str | None = None
    """model: run of task=reward_model, its checkpoint, or Hugging Face folder of a sequence classifier with one label.
    It must have the tokenizer of the policy, whose token ids it scores, at the last token of the completion."""
    scope: Scope = Scope.completion
    """function: input of one call: a completion, all completions of a prompt, or all completions of a rollout. judge:
    completion rates each from 0 to 10 and divides by 10; group compares each pair of a group in both orders, and a
    completion's score is its share of wins, with ties as half."""
    concurrency: int | None = option(None, ge=1)
    """function: calls at a time of an `async def` function, in each reward process; null: the function is not async.
    judge: requests at a time in each reward process."""
    judge: Judge = section(Judge)

    def check(self) -> Iterator[Problem]:
        needed = NEEDED.get(self.kind, ())
        for field in sorted({field for fields in NEEDED.values() for field in fields}):
            value = getattr(self, field)
            if field in needed and value is None:
                yield Problem(field, f"is needed by kind={self.kind.value}", value=None)
            if field not in needed and value is not None:
                yield Problem(field, f"is not used by kind={self.kind.value}", value=value, accepted="null")
        if self.buffer is not None and self.target is not None and self.buffer > self.target:
            yield Problem("buffer", f"is over target={self.target}", value=self.buffer, accepted=f"1 to {self.target}")
        scopes = {RewardKind.function: tuple(Scope), RewardKind.judge: (Scope.completion, Scope.group)}
        if self.scope not in (accepted := scopes.get(self.kind, (Scope.completion,))):
            accepted_names = ", ".join(scope.value for scope in accepted)
            yield Problem("scope", f"is not supported by kind={self.kind.value}", self.scope, accepted=accepted_names)
        yield from self._judge_problems()
        if self.concurrency is not None and self.kind not in CONCURRENT:
            yield Problem("concurrency", f"is not used by kind={self.kind.value}", self.concurrency, accepted="null")
        yield from pattern_problems("pattern", self.pattern, groups=0)

    def _judge_problems(self) -> Iterator[Problem]:
        if self.kind is not RewardKind.judge:
            if self.judge != Judge():  # type: ignore[call-arg]
                yield Problem("judge", f"is not used by kind={self.kind.value}", accepted="its defaults")
            return
        for path, value in (("judge.url", self.judge.url), ("judge.model", self.judge.model)):
            if value is None:
                yield Problem(path, "is needed by kind=judge", value=None)
        if self.concurrency is None:
            yield Problem("concurrency", "is needed by kind=judge", value=None, accepted="1 or more")


@schema
class Reward(Schema):
    """Reward of a completion."""

    terms: dict[str, Term] = option({})
    """Terms by a name of your choice; their weighted sum is the reward."""
    answer: str | None = None
    """Regular expression whose first group, at its last match, is the answer in a completion, such as
    <answer>(.*?)</answer>; without a match there is no answer. null: the whole completion."""
    passes: str | None = None
    """Term that decides in evaluation whether a completion is correct; `environment` is the environment's reward. null:
    the first."""
    pass_at: float = 1.0
    """Value of that term, before its weight, from which a completion counts as correct."""
    timeout: float = option(5.0, gt=0)
    """Seconds that one call of a term may take before its process is killed, with everything that it started; a
    concurrent call is cancelled alone. Processes that a call leaves behind are killed at that age too; those started
    by importing the function stay."""
    memory_limit_gib: float | None = option(8.0, gt=0)
    """Memory that a reward process, and each process that it starts, may allocate. null: no limit."""
    workers: int = option(1, ge=1)
    """Processes that compute rewards."""
    on_error: OnFault = OnFault.zero
    """A term that raises, times out or returns a non-finite number: zero scores it as 0, logs it and counts it in
    reward/errors; raise stops the run."""

    def check(self) -> Iterator[Problem]:
        yield from pattern_problems("answer", self.answer, groups=1)
        if ENVIRONMENT in self.terms:
            yield Problem("terms", "has a term with the name of the environment's reward", ENVIRONMENT)
        if self.passes is not None and self.passes not in (*self.terms, ENVIRONMENT):
            yield Problem(
                "passes",
                "is not a term of reward.terms",
                value=self.passes,
                accepted=", ".join(self.terms) or "null, because there are no terms",
                hint=did_you_mean(self.passes, self.terms),
            )


@schema
class Environment(Schema):
    """Environment of task=grpo, which replies to the model's turns: a rollout then has several turns."""

    kind: EnvironmentKind = EnvironmentKind.none
    """none: one completion per prompt; tools: the model may call functions; reasoning_gym: further attempts at a
    problem of data=reasoning_gym, with feedback; openenv: a server of OpenEnv; verifiers: an environment of the
    package verifiers; function: an environment of yours."""
    function: str | None = option(None, plug_in=PlugInUse.worker)
    """`package.module:name`, called with options= if it has such a parameter. function: a class or function that is
    called for each episode, and returns an object with reset(record) -> messages and step(message) -> (messages,
    reward, done). verifiers: a function that is called once and returns an environment of the package, such as
    wiki_search:load_environment."""
    options: Options = section(Options)
    tools: list[str] = option([])
    """tools: calculator, python (in a sandbox), and functions of yours as `package.module:function`, whose annotations
    and docstring describe them to the model."""
    url: str | None = None
    """openenv: address of the server, such as http://localhost:8000; each episode has its own session."""
    action: str | None = None
    """openenv: field of an action that holds the text of the model's turn, such as message."""
    observation: str | None = None
    """openenv: field of an observation that holds the text of the reply to the model, such as echoed_message."""
    max_turns: int = option(8, ge=1)
    """Maximum number of the model's turns in an episode."""
    turn_tokens: int | None = option(None, ge=1)
    """Maximum tokens of one turn of the model; a longer one is cut, and the token that ends it has no loss. null: what
    remains of task.max_tokens, which limits all tokens after the prompt, including those of the environment."""
    timeout: float = option(10.0, gt=0)
    """Seconds that a call of reset or step may take before the process of its episode is killed."""
    memory_limit_gib: float | None = option(2.0, gt=0)
    """Memory that the process of an episode, and each process that it starts, may allocate. null: no limit."""
    concurrency: int = option(64, ge=1)
    """Episodes at a time, each in a separate process; further ones of a batch wait."""

    def check(self) -> Iterator[Problem]:
        for field, kinds in NEEDED_BY_ENVIRONMENT.items():
            value, is_needed = getattr(self, field), self.kind in kinds
            if is_needed and not value:
                yield Problem(field, f"is needed by kind={self.kind.value}", value=value)
            if value and not is_needed:
                yield Problem(field, f"is not used by kind={self.kind.value}", value=value)
        if self.url is not None and not re.match(HTTP_ADDRESS, self.url):
            yield Problem("url", "is not an HTTP address", value=self.url, accepted="such as http://localhost:8000")
        for tool in self.tools:
            if tool not in BUILT_IN_TOOLS and tool.count(":") != 1:
                accepted = f"{', '.join(BUILT_IN_TOOLS)}, or package.module:function"
                yield Problem("tools", "is not a tool", tool, accepted, hint=did_you_mean(tool, BUILT_IN_TOOLS))


def pattern_problems(field: str, pattern: str | None, *, groups: int) -> Iterator[Problem]:
    """Yield problems of a regular expression that needs at least `groups` groups."""
    try:
        if pattern is not None and re.compile(pattern).groups < groups:
            yield Problem(
                field, "has no group", value=pattern, accepted="a regular expression with ( ) around the answer"
            )
    except re.error as error:
        yield Problem(field, f"is not a regular expression: {error}", value=pattern)
