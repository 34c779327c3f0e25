"""environment=openenv with a real OpenEnv server: sessions, rewards, and failures that cost their episode only."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.reward import Environment, EnvironmentKind
from maxhydra.rl.environment_pool import EnvironmentPool, Failure
from maxhydra.rl.environments import OpenEnvEnvironment
from tests.support.skips import import_optional

RECORD = {"prompt": [{"role": "user", "content": "Guess a number."}], "seed": 5}
# Guessing a number, which is the seed. It prints its port once it listens.
SERVER = """
import socket
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Guess(Action):
    message: str

class Hint(Observation):
    hint: str

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self.number, self.turns = seed, 0
        return Hint(hint="It is below 10.")

    def step(self, action, timeout_s=None, **_):
        guess, self.turns = int(action.message), self.turns + 1
        done = guess == self.number
        return Hint(hint=f"turn {self.turns}: higher", done=done, reward=1.0 if done else None)

    @property
    def state(self):
        return State()

listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=4)
uvicorn.Server(uvicorn.Config(app, log_level="error")).run([listener])
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    import_optional("openenv", extra="openenv")
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
    server.kill()
    server.wait()


def config(url: str, **changes: Any) -> Environment:
    fields = {"action": "message", "observation": "hint", "timeout": 60.0, **changes}
    return Environment(kind=EnvironmentKind.openenv, url=url, **fields)


def say(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@pytest.mark.exhaustive
def test_episodes_are_sessions_of_the_server(url: str) -> None:
    with closing(EnvironmentPool(config(url))) as games:
        for slot, seed in ((0, 5), (1, 7)):
            messages = games.reset(slot, {**RECORD, "seed": seed}).result()["messages"]
            assert messages == [{"role": "user", "content": "Guess a number.\nIt is below 10."}]
        hint = {"role": "user", "content": "turn 1: higher"}
        assert games.step(0, say("3")).result() == {"messages": [hint], "reward": 0.0, "done": False}
        # The other session is at its first turn.
        assert games.step(1, say("5")).result()["messages"] == [hint]
        assert games.step(0, say("5")).result() == {"messages": [], "reward": 1.0, "done": True}
        failure = games.step(1, say("not a number")).result()
        assert isinstance(failure, Failure) and failure.kind == "crashes" and "invalid literal" in failure.reason
        assert games.reset(1, RECORD).result()["messages"]


@pytest.mark.exhaustive
def test_a_missing_field_or_server_is_named(url: str) -> None:
    with pytest.raises(LookupError, match=r"no field text \(environment.observation\), but hint"):
        OpenEnvEnvironment(config(url, observation="text")).reset(RECORD)
    with pytest.raises(ConnectionError, match=r"Failed to connect to ws://127\.0\.0\.1:9/"):
        OpenEnvEnvironment(config("http://127.0.0.1:9")).reset(RECORD)


@pytest.mark.exhaustive
def test_keys_of_other_environments_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"environment.url=localhost: is not an HTTP address"):
        compose(["environment=openenv", "environment.url=localhost"])
    with pytest.raises(ConfigError, match=r"environment.url=\S+: is not used by kind=tools"):
        compose(["environment=tools", "environment.url=http://localhost:8000"])
