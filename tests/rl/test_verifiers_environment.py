"""environment=verifiers with environments of the real package: single-turn, multi-turn and with tools."""

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.reward import Environment, EnvironmentKind
from maxhydra.rl.environment_pool import EnvironmentPool, Failure
from tests.support.skips import import_optional

import_optional("verifiers", extra="verifiers")
pytestmark = pytest.mark.exhaustive

GAMES = '''
import verifiers as vf
from datasets import Dataset
from maxhydra.rl.verifiers_environment import check_environment

ROWS = Dataset.from_list([{"question": "Guess a number below 10.", "answer": "7"}])

def exact(completion, answer):
    return float(completion[-1].content == answer)

def short(completion):
    return 1 / len(completion)

RUBRIC = {"funcs": [exact, short], "weights": [1.0, 0.5]}

class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["low"] = int(state["info"]["low"])
        return state

    @vf.stop
    async def is_found(self, state):
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1].content == state["answer"]

    async def env_response(self, messages, state, **_):
        return [{"role": "user", "content": f"{messages[-1].content} is wrong; it is at least {state['low']}"}]

def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b

def games():
    check_rejections()
    common = {"dataset": ROWS, "rubric": vf.Rubric(**RUBRIC)}
    kinds = {"guess": Guess(max_turns=3, **common), "once": vf.SingleTurnEnv(**common)}
    kinds["tools"] = vf.ToolEnv(tools=[add], **common)
    return vf.EnvGroup(envs=list(kinds.values()), env_names=list(kinds))

def group(completions):
    return [0.0 for _ in completions]

def check_rejections():
    rejected = [(object(), TypeError), (vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[group])), ValueError)]
    for environment, error in rejected:
        try:
            check_environment(environment)
        except error:
            continue
        raise AssertionError(f"{environment} was accepted")
'''
PROMPT = [{"role": "user", "content": "Guess a number below 10."}]


def record(name: str, **info: int) -> dict[str, Any]:
    return {"prompt": PROMPT, "answer": "7", "info": {"env_id": name, **info}, "seed": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("games")
    (folder / "vf_games.py").write_text(GAMES)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def config(function: str) -> Environment:
    kind = EnvironmentKind.verifiers
    return Environment(kind=kind, function=f"vf_games:{function}", timeout=60.0, memory_limit_gib=None)


def say(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[EnvironmentPool]:
    """One pool for all tests: importing the package takes eight seconds. Its module also checks rejections."""
    with closing(EnvironmentPool(config("games"))) as pool:
        yield pool


def test_turns_and_rewards_are_those_of_the_package(pool: EnvironmentPool) -> None:
    for slot in (0, 1):
        assert pool.reset(slot, record("guess", low=5)).result() == {"messages": PROMPT, "tools": None}
    hint = {"role": "user", "content": "3 is wrong; it is at least 5"}
    assert pool.step(0, say("3")).result() == {"messages": [hint], "reward": 0.0, "done": False}
    end = pool.step(0, say("7")).result()
    # The completion has three messages: two turns and the hint.
    assert end["reward"] == pytest.approx(1 + 0.5 / 3) and end["done"] and end["messages"] == []
    assert end["scores"]["exact"] == 1 and end["scores"]["short"] == pytest.approx(1 / 3)
    # The other episode has its own state, and ends at the environment's max_turns.
    replies = [pool.step(1, say(text)).result() for text in ("1", "2", "3")]
    assert [reply["done"] for reply in replies] == [False, False, True]
    assert replies[-1]["reward"] == pytest.approx(0.5 / 5) and replies[-1]["scores"]["exact"] == 0
    # A record without `low` makes setup_state fail, which costs the episode.
    failure = pool.reset(0, record("guess", high=9)).result()
    assert isinstance(failure, Failure) and failure.kind == "crashes" and "KeyError: 'low'" in failure.reason


def test_single_turns_and_tools(pool: EnvironmentPool) -> None:
    pool.reset(0, record("once")).result()
    assert pool.step(0, say("7")).result()["reward"] == 1.5
    (tool,) = pool.reset(0, record("tools")).result()["tools"]
    assert tool["function"]["name"] == "add" and set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
    reply = pool.step(0, say("", tool_calls=[call])).result()
    assert reply["messages"] == [{"role": "tool", "tool_call_id": "c1", "name": "add", "content": "7"}]
    end = pool.step(0, say("7")).result()
    assert end["done"] and end["reward"] == pytest.approx(1 + 0.5 / 3)
    assert end["scores"]["total_tool_calls"] == 1


def test_keys_of_other_environments_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"environment.url=\S+: is not used by kind=verifiers"):
        compose(["environment=verifiers", "environment.function=a:b", "environment.url=http://localhost:8000"])
