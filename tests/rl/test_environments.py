"""Environments in processes: user code that hangs, crashes or replies nonsense, tools, and the sandbox."""

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.reward import Environment, EnvironmentKind
from maxhydra.config.schema.tasks.training import GrpoTask
from maxhydra.rl.environment_pool import EnvironmentPool, Failure
from maxhydra.rl.environments import ReasoningGymEnvironment, ToolEnvironment
from maxhydra.rl.episodes import Episode
from maxhydra.rl.reward_pool import RewardResult
from maxhydra.rl.rollout import Group, metrics
from maxhydra.rl.sandbox import Sandbox, SandboxError
from maxhydra.rl.tools import Tool, calculator, load_tool
from tests.support.polling import wait_for
from tests.support.skips import LANDLOCK, import_optional

RECORD = {"prompt": [{"role": "user", "content": "a"}], "answer": "7", "seed": 0}


@pytest.fixture(autouse=True)
def functions(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Make the environments of the tests importable; spawned processes inherit sys.path."""
    monkeypatch.syspath_prepend(request.path.parents[1] / "support")


def environment(name: str, **changes: Any) -> Environment:
    return Environment(kind=EnvironmentKind.function, function=f"environment_functions:{name}", **changes)


def say(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_episodes_have_a_state_of_their_own() -> None:
    with closing(EnvironmentPool(environment("Echo"))) as pool:
        for slot in (0, 1):
            assert pool.reset(slot, RECORD).result()["messages"][0]["content"] == "say: 7"
        replies = [pool.step(slot, say(text)).result() for slot, text in ((0, "ae"), (0, "x stop"), (1, "u"))]
        assert [reply["messages"][0]["content"] for reply in replies] == ["turn 1", "turn 2", "turn 1"]
        assert [(reply["reward"], reply["done"]) for reply in replies] == [(2, False), (1, True), (1, False)]


FAILING = {
    "hangs": ("hangs", "exceeded environment.timeout=8 s"),
    "raises": ("crashes", "raised RuntimeError: no such move (environment_functions.py:"),
    "exits": ("crashes", "crashed its process"),
    "allocates": ("crashes", "exceeded environment.memory_limit_gib=1.0"),
    "none": ("invalid", "returned None instead of (messages, reward, done)"),
    "pair": ("invalid", "returned ([], 1.0) instead of"),
    "reward": ("invalid", "returned the reward nan, not a finite number"),
    "number": ("invalid", "returned the reward 'much', not a number"),
    "scores": ("invalid", "has the scores {'points': 'many'}, not numbers by name"),
    "role": ("invalid", "returned the message {'role': 'assistant'"),
    "content": ("invalid", "returned the message {'role': 'user', 'content': 3}"),
    "object": ("invalid", "returned values that are not JSON"),
    "silence": ("invalid", "returned no messages, although the episode continues"),
}


def test_scores_of_an_environment_are_logged_and_stored() -> None:
    """Their mean is over the episodes that have them."""
    scores: list[dict[str, float]] = [{"exact": 1.0}, {"exact": 0.5}, {}]
    episodes = [Episode((1,), reward=0.0, scores=each) for each in scores]
    group = Group(episodes, [RewardResult({}, 1.0, True, 0)] * 3)
    assert metrics([group], 1, GrpoTask(name="grpo"))["environment/score/exact"] == 0.75
    assert [record.get("scores", {}) for record in group.records()] == scores


@pytest.mark.slow
def test_a_failure_costs_its_own_episode_only() -> None:
    """All at the same time, so that the hang does not delay the others."""
    with closing(EnvironmentPool(environment("Faulty", timeout=8.0, memory_limit_gib=1.0))) as pool:
        slots = dict(enumerate([*FAILING, "fine"]))
        assert all(not isinstance(pool.reset(slot, RECORD).result(), Failure) for slot in slots)
        steps = {failure: pool.step(slot, say(failure)) for slot, failure in slots.items()}
        assert steps.pop("fine").result()["messages"][0]["content"] == "turn 1"
        for failure, future in steps.items():
            kind, reason = FAILING[failure]
            failure = future.result()
            assert failure.kind == kind and failure.reason.startswith(reason), failure
        # A slot serves again, and without a process there is nothing to step.
        assert not isinstance(pool.reset(0, RECORD).result(), Failure)
        assert isinstance(pool.step(1, say("fine")).result(), Failure)


def test_nothing_that_an_environment_starts_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setenv("PIDS", str(pids))
    with closing(EnvironmentPool(environment("Faulty", timeout=3.0))) as pool:
        pool.reset(0, RECORD).result()
        assert pool.step(0, say("starts")).result().kind == "hangs"
        # A zombie until the supervisor's next sweep.
        wait_for(lambda: not Path(f"/proc/{int(pids.read_text())}").exists())


@pytest.mark.slow
def test_a_supervisor_that_was_killed_is_replaced() -> None:
    with closing(EnvironmentPool(environment("Faulty"))) as pool:
        pool.reset(0, RECORD).result()
        assert "supervisor" in pool.step(0, say("kills")).result().reason
        for _ in range(100):
            if not isinstance(pool.reset(0, RECORD).result(), Failure):
                return
    pytest.fail("no supervisor")


@pytest.mark.slow
def test_an_environment_that_cannot_be_loaded_is_rejected() -> None:
    for name, path in (("environment_functions:Nothing", "function"), ("no_such_module:Echo", "function")):
        with pytest.raises(ConfigError) as caught:
            EnvironmentPool(Environment(kind=EnvironmentKind.function, function=name))
        assert [problem.path for problem in caught.value.problems] == [f"environment.{path}"]
    with pytest.raises(ConfigError) as caught:
        EnvironmentPool(Environment(kind=EnvironmentKind.tools, tools=["calculator", "math:sqrt"]))
    assert caught.value.problems[0].path == "environment.tools"


def test_all_invalid_keys_are_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["environment=tools", "environment.tools=[calculater]", "environment.function=a:b"])
    assert [problem.path for problem in caught.value.problems] == ["environment.function", "environment.tools"]
    with pytest.raises(ConfigError) as caught:
        compose(["environment.kind=function"])
    assert [problem.path for problem in caught.value.problems] == ["environment.function"]


def test_the_calculator_evaluates_arithmetic_only() -> None:
    values = {
        "1+2*3": "7",
        "(1+2)*3": "9",
        "7/2": "3.5",
        "8/2": "4",
        "-2**2": "-4",
        "7//2 % 2": "1",
        "2**0.5": "1.4142",
    }
    for expression, value in values.items():
        assert calculator(expression).startswith(value)
    tool = Tool(calculator)
    for expression in ("__import__('os')", "9**9**9**9", "'a'*9", "1 if 1 else 2", "(-1)**0.5", "True", "1/0", "1+"):
        assert tool({"expression": expression}).startswith("error: "), expression
    assert tool({"term": "1"}).startswith("error: TypeError")


def test_tools_are_described_and_called() -> None:
    tools = [load_tool(name, timeout=5, memory_limit_gib=1) for name in ("calculator", "environment_functions:join")]
    world = ToolEnvironment(tools)
    function = world.tools[1]["function"]
    assert (function["name"], function["description"]) == ("join", "Repeats a text.")
    fields = {"first": {"type": "string"}, "count": {"type": "integer"}}
    assert function["parameters"] == {"type": "object", "properties": fields, "required": ["first"]}

    def call(name: str, **arguments: Any) -> dict[str, Any]:
        return {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}

    calls = [call("calculator", expression="6*7"), call("join", first="ab", count=2), call("join", first=""), call("f")]
    messages, reward, done = world.step({**say(""), "tool_calls": calls, "invalid_tool_calls": ["invalid JSON"]})
    assert [message["content"] for message in messages] == [
        "42",
        '{"text": "abab"}',
        "error: AttributeError: module 'sys' has no attribute 'nothing'",
        "error: unknown tool f; tools: calculator, join",
        "error: invalid JSON",
    ]
    assert (reward, done) == (0, False)
    assert world.step(say("42")) == ([], 0, True)


@pytest.mark.slow
def test_reasoning_gym_gives_further_attempts() -> None:
    gym = import_optional("reasoning_gym", extra="rl")
    entry = gym.create_dataset("chain_sum", size=1, seed=3)[0]
    world = ReasoningGymEnvironment()
    prompt = [{"role": "user", "content": entry["question"]}]
    assert world.reset({"prompt": prompt, "entry": entry, "answer": entry["answer"]}) == prompt
    (message,), wrong, done = world.step(say("<answer>no</answer>"))
    assert wrong < 1 and not done and "Try again" in message["content"]
    messages, right, done = world.step(say(f"So <answer> {entry['answer']} </answer>"))
    assert messages == [] and done and wrong + right == 1


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    try:
        return Sandbox(timeout=30.0, memory_limit_gib=1.0)
    except SandboxError as error:
        if "Landlock is not available" in str(error):
            pytest.skip(LANDLOCK)
        raise


ESCAPES = {
    "network": ("import socket; socket.create_connection(('127.0.0.1', 22))", "PermissionError"),
    "raw socket": ("import ctypes; print(ctypes.CDLL(None).syscall(41, 2, 1, 0))", "-1"),
    "fork bomb": ("import os\nwhile True: os.fork()", "PermissionError"),
    "command": ("import subprocess; subprocess.run(['true'])", "PermissionError"),
    "10 GB": ("bytearray(10 << 30)", "MemoryError"),
    "write outside": ("open({outside!r}, 'w')", "PermissionError"),
    "write through a link": ("import os; os.symlink({outside!r}, 'l'); open('l', 'w')", "PermissionError"),
    "delete outside": ("import os; os.unlink({inside!r})", "PermissionError"),
    "truncate outside": ("import os; os.truncate({inside!r}, 0)", "PermissionError"),
    "change a mode": ("import os; os.chmod({inside!r}, 0)", "PermissionError"),
    "read outside": ("print(open({inside!r}).read())", "PermissionError"),
    "signal": ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
    "raise limits": ("import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))", "ValueError"),
    "large file": ("open('a', 'wb').write(bytes(1 << 25))", "OSError"),
}


@pytest.mark.slow
@pytest.mark.parametrize("escape", ESCAPES)
def test_the_sandbox_contains(escape: str, sandbox: Sandbox, tmp_path: Path) -> None:
    inside, outside = tmp_path / "secret", tmp_path / "outside"
    inside.write_text("secret")
    tmp_path.chmod(0o777)
    program, sign = ESCAPES[escape]
    output = sandbox.run(program.format(inside=str(inside), outside=str(outside)))
    assert sign in output and "secret\n" not in output
    assert inside.read_text() == "secret" and not outside.exists()


@pytest.mark.slow
def test_the_sandbox_ends_an_endless_loop(sandbox: Sandbox) -> None:
    assert "took more than 1 seconds" in Sandbox(timeout=1.0, memory_limit_gib=1.0).run("while True: pass")


@pytest.mark.slow
def test_the_sandbox_runs_programs(sandbox: Sandbox) -> None:
    program = "import math, json, threading; open('a', 'w').write('x')\nprint(json.dumps([math.pi, open('a').read()]))"
    assert sandbox.run(program) == f'[{math.pi}, "x"]\n'
    assert sandbox.run("def f(:") == sandbox.run("def f(:") and "SyntaxError" in sandbox.run("def f(:")
    assert "ZeroDivisionError" in sandbox.run("print(1)\n1/0") and "sandbox_process" not in sandbox.run("1/0")
    assert "VARIABLE" not in sandbox.run("import os; print(dict(os.environ))")
    python = load_tool("python", timeout=5, memory_limit_gib=1)
    assert python({"code": "print(6 * 7)"}) == "42\n"
