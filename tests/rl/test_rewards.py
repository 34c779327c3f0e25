"""Reward terms against known values, and reward code that raises, hangs, crashes or returns no number."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.reward import OnFault, Reward, RewardKind, Scope, Term
from maxhydra.rl.reward_pool import RewardError, RewardPool, RewardResult
from maxhydra.rl.rewards import Sample, build_score, extract_answer
from tests.support.cli import ROOT, environment
from tests.support.processes import children, is_alive
from tests.support.skips import import_optional


def make_sample(text: str, expected: Any = None, **changes: Any) -> Sample:
    fields = {"prompt": "x?", "text": text, "answer": text, "expected": expected, "record": {}, "tokens": len(text)}
    return Sample(**{**fields, **changes})


def score(term: Term, *samples: Sample) -> list[float]:
    return [build_score(term)(sample) for sample in samples]


def score_texts(reward: Reward, *texts: str) -> list[RewardResult]:
    pool = RewardPool(reward)
    try:
        return pool.score([make_sample(text) for text in texts])
    finally:
        pool.close()


def function_term(name: str, **fields: Any) -> Term:
    return Term(kind=RewardKind.function, function=f"reward_functions:{name}", **fields)


def function_reward(name: str, **changes: Any) -> Reward:
    return Reward(terms={"own": function_term(name)}, **changes)


@pytest.fixture(autouse=True)
def functions(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Make the reward functions of the tests importable; spawned processes inherit sys.path."""
    monkeypatch.syspath_prepend(request.path.parents[1] / "support")


def test_exact_ignores_case_and_whitespace() -> None:
    samples = [
        make_sample(" New  York\n", "new york"),
        make_sample("71", 71),
        make_sample("711", "71"),
        make_sample("x", "x", answer=None),
    ]
    assert score(Term(kind=RewardKind.exact), *samples) == [1, 1, 0, 0]


@pytest.mark.slow
def test_math_accepts_equal_expressions() -> None:
    import_optional("math_verify", extra="rl")
    pairs = [
        ("$\\frac{1}{2}$", "0.5"),
        ("$x^2-1$", "$(x-1)(x+1)$"),
        ("$\\{3, 1\\}$", "$\\{1, 3\\}$"),
        ("72", "71"),
        ("", "1"),
    ]
    assert score(Term(kind=RewardKind.math), *(make_sample(given, known) for given, known in pairs)) == [1, 1, 1, 0, 0]


def test_format_and_length() -> None:
    tagged = Term(kind=RewardKind.format, pattern=r"<think>.*</think>\d+")
    assert score(tagged, make_sample("<think>a\nb</think>7"), make_sample("7"), make_sample("<think></think>7!")) == [
        1,
        0,
        0,
    ]
    assert score(Term(kind=RewardKind.length, target=4), *map(make_sample, ["", "ab", "abcd", "abcdef", "a" * 9])) == [
        0,
        0.5,
        1,
        0.5,
        0,
    ]


def test_overlong_completions_are_penalized_as_in_dapo() -> None:
    """Equation 13 of Yu et al. (2025): 0 up to L_max - L_cache, (L_max - L_cache - |y|) / L_cache, -1 beyond L_max."""
    term = Term(kind=RewardKind.overlong, target=20, buffer=8)
    lengths = {0: 0, 12: 0, 13: -1 / 8, 18: -6 / 8, 20: -1, 21: -1, 90: -1}
    assert score(term, *(make_sample("a", tokens=length) for length in lengths)) == list(lengths.values())


def test_the_answer_is_extracted_from_the_last_match() -> None:
    text = "<answer>1</answer> no, <answer>\n2</answer>"
    assert extract_answer(text, "<answer>(.*?)</answer>") == "\n2"
    assert extract_answer("2", "<answer>(.*?)</answer>") is None
    assert extract_answer("2", None) == "2"


@pytest.mark.slow
def test_the_reward_is_the_weighted_sum_and_one_term_decides_correctness() -> None:
    terms = {
        "vowels": Term(kind=RewardKind.function, function="reward_functions:vowels", weight=0.5),
        "form": Term(kind=RewardKind.format, pattern="[a-z]+", weight=-2),
    }
    results = score_texts(Reward(terms=terms, passes="form", workers=2), "aeb", "A1", "xyz")
    assert [result.reward for result in results] == [1 - 2, 0, -2]
    assert [result.is_correct for result in results] == [True, False, True]
    assert results[0].terms == {"vowels": 2, "form": 1}


def test_a_function_receives_the_whole_sample() -> None:
    pool = RewardPool(function_reward("known"))
    try:
        (result,) = pool.score([make_sample("x=3", 3, answer="3", record={"level": 2})])
    finally:
        pool.close()
    assert result.is_correct


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_function_sees_a_group_or_the_batch(workers: int) -> None:
    """Groups of two: the longer text of each wins. In the batch, all texts compete."""
    terms = {
        "group": function_term("rank", scope=Scope.group),
        "later": function_term("rank_later", scope=Scope.group, concurrency=2),
        "batch": function_term("rank", scope=Scope.batch, weight=0.0),
        "one": function_term("vowels", weight=0.0),
    }
    samples = [make_sample(text) for text in ("a", "bb", "cccc", "eee")]
    with closing(RewardPool(Reward(terms=terms, workers=workers))) as pool:
        results = pool.score(samples, group_size=2)
    assert [result.terms["group"] for result in results] == [0, 1, 1, 0]
    assert [result.reward for result in results] == [0, 2, 2, 0]
    assert [result.terms["batch"] for result in results] == pytest.approx([0, 1 / 3, 1, 2 / 3])
    assert [result.terms["one"] for result in results] == [1, 0, 0, 3]


def test_a_function_of_a_group_receives_lists() -> None:
    samples = [make_sample("a", 3, record={"level": 2}), make_sample("b", 4, record={"level": 5})]
    with closing(RewardPool(Reward(terms={"own": function_term("known_lists", scope=Scope.group)}))) as pool:
        assert [result.reward for result in pool.score(samples, group_size=2)] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("term", "expected", "reason"),
    [
        (function_term("too_few", scope=Scope.group), [0, 0, 1, 1], "returned 1 numbers for 2 completions"),
        (function_term("nan_at_b", scope=Scope.group), [1, 0, 1, 1], "returned nan, not a finite number"),
        (function_term("vowels_of_none", scope=Scope.batch), [0] * 4, "returned NoneType instead of a list of numbers"),
        (function_term("concurrent", concurrency=2), [2, 0, 0, 2], "exceeded reward.timeout=5 s"),
        (function_term("concurrent", concurrency=3), [3, 0, 0, 3], "raised RuntimeError: cannot judge c"),
        (function_term("blocks", concurrency=4), [0] * 4, "exceeded reward.timeout=5 s"),
    ],
)
def test_a_failure_costs_its_unit_only(
    term: Term, expected: list[float], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "maxhydra"),
        closing(RewardPool(Reward(terms={"own": term}, timeout=5.0))) as pool,
    ):
        results = pool.score([make_sample(text) for text in "abcd"], group_size=2)
    assert [result.reward for result in results] == expected
    assert sum(result.errors for result in results) == expected.count(0)
    assert f"reward.terms.own {reason}" in caplog.text


@pytest.mark.parametrize(("name", "concurrency"), [("concurrent", None), ("vowels", 2)])
def test_async_functions_need_a_concurrency_and_others_none(name: str, concurrency: int | None) -> None:
    with pytest.raises(ConfigError, match="concurrency must be"):
        RewardPool(Reward(terms={"own": function_term(name, concurrency=concurrency)}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "texts", "expected", "reason"),
    [
        ("raises", "ab", [0, 0], "raised RuntimeError: cannot judge a (reward_functions.py:"),
        ("hangs_at_b", "abc", [1, 0, 1], "exceeded reward.timeout=5 s"),
        ("hangs", "abcdef", [0] * 6, "was skipped after 3 hangs or crashes in a batch"),
        ("not_a_number", "abcd", [0, 0, 0, 0.5], "returned nan, not a finite number"),
        ("exits", "a", [0], "crashed its process"),
    ],
)
def test_errors_are_logged_counted_and_worth_0(
    name: str, texts: str, expected: list[float], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "maxhydra"):
        results = score_texts(function_reward(name, timeout=0.5 if name == "hangs" else 5.0), *texts)
    assert [result.reward for result in results] == expected
    assert sum(result.errors for result in results) == expected.count(0)
    assert f"reward.terms.own {reason}" in caplog.text


def wait_until_gone(pids: list[int], seconds: float = 240) -> list[int]:
    """Pids that are still alive after some seconds."""
    deadline = time.monotonic() + seconds
    while (alive := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive


def score_record(pool: RewardPool, record: dict[str, Any], *texts: str) -> list[RewardResult]:
    return pool.score([make_sample(text, record=record) for text in texts])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("runs_a_command", {}),
        ("starts_a_daemon", {}),
        ("starts_a_daemon", {"hangs": True}),
        ("starts_a_daemon", {"crashes": True}),
    ],
)
def test_nothing_that_a_reward_starts_outlives_its_time_limit(
    name: str, record: dict[str, Any], tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    with closing(RewardPool(function_reward(name, timeout=4.0))) as pool:
        score_record(pool, {"pids": str(pids), **record}, "a")
        assert not wait_until_gone([int(pid) for pid in pids.read_text().split()])


def test_closing_the_pool_ends_a_call_and_what_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pool = RewardPool(function_reward("starts_a_daemon", timeout=60))
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(score_record, pool, {"pids": str(pids), "hangs": True}, "a")
        while not pids.exists() or not pids.read_text().endswith("\n"):
            time.sleep(0.01)
        pool.close()
        assert isinstance(call.exception(), RewardError)
    assert not wait_until_gone([int(pids.read_text())], seconds=0)


@pytest.mark.slow
@pytest.mark.default_cases("process")
@pytest.mark.parametrize("kill", [os.kill, os.killpg], ids=["process", "group"])
def test_nothing_outlives_a_killed_run(kill: Callable[[int, int], None], tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"""
from maxhydra.config.schema.reward import Reward, RewardKind, Term
from maxhydra.rl.reward_pool import RewardPool
from maxhydra.rl.rewards import Sample
if __name__ == "__main__":
    term = Term(kind=RewardKind.function, function="reward_functions:starts_a_daemon")
    pool = RewardPool(Reward(terms={{"own": term}}, timeout=60))
    record = {{"pids": {str(pids)!r}, "hangs": True}}
    pool.score([Sample(prompt="", text="a", answer=None, expected=None, record=record, tokens=1)])
"""
    (tmp_path / "run.py").write_text(script)
    variables = {**environment(), "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])}
    run = subprocess.Popen([sys.executable, str(tmp_path / "run.py")], env=variables, start_new_session=True)
    while not pids.exists() or not pids.read_text().endswith("\n"):
        assert run.poll() is None
        time.sleep(0.02)
    workers = children(run.pid)
    assert workers
    kill(run.pid, signal.SIGKILL)
    run.wait()
    assert not wait_until_gone([int(pids.read_text()), *workers])


@pytest.mark.slow
def test_a_reward_cannot_corrupt_the_results(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "maxhydra"):
        results = score_texts(function_reward("writes_to_descriptors", timeout=1.0), "a", "b", "hangs")
    assert [result.reward for result in results] in ([1, 1, 0], [0, 0, 0])
    (low,) = score_texts(function_reward("open_descriptors"), "a")
    assert low.reward == 0 and low.errors == 0


def test_only_one_process_replies_for_a_reward_that_forks() -> None:
    assert [result.reward for result in score_texts(function_reward("forks"), "a", "b", "c")] == [1, 1, 1]


def test_memory_is_limited(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "maxhydra"):
        (result,) = score_texts(function_reward("allocates", memory_limit_gib=1.0), "a")
    assert result.errors == 1 and "exceeded reward.memory_limit_gib=1.0" in caplog.text


@pytest.mark.parametrize(("name", "value"), [("has_jax", 0), ("terminates_a_command", 1)])
def test_a_reward_process_is_small_and_its_children_react_to_signals(name: str, value: float) -> None:
    (result,) = score_texts(function_reward(name), "a")
    assert (result.reward, result.errors) == (value, 0)


@pytest.mark.slow
def test_code_that_keeps_the_interpreter_lock_is_killed() -> None:
    (result,) = score_texts(function_reward("backtracks", timeout=0.5), "a")
    assert result.errors == 1


def test_on_error_raise_ends_the_run() -> None:
    with pytest.raises(RewardError, match=r"reward.terms.own raised RuntimeError.*on_error=raise"):
        score_texts(function_reward("raises", on_error=OnFault["raise"]), "a")


@pytest.mark.parametrize("path", ["reward_functions:nothing", "no_such_module:f"])
def test_a_missing_function_is_rejected_at_the_start(path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RewardPool(Reward(terms={"mine": Term(kind=RewardKind.function, function=path)}))
    (problem,) = caught.value.problems
    assert problem.path == "reward.terms.mine.function" and problem.value == path


def test_all_invalid_terms_are_reported() -> None:
    terms = "{a:{kind:format},b:{kind:function,function:f},c:{kind:exat},d:{kind:exact,target:3}}"
    with pytest.raises(ConfigError) as caught:
        compose([f"+reward.terms={terms}"])
    fields = ["a.pattern", "b.function", "c.kind", "d.target"]
    assert {problem.path for problem in caught.value.problems} == {f"reward.terms.{field}" for field in fields}


def test_passes_must_name_a_term_and_answer_must_have_a_group() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["reward=exact", "reward.passes=answr", "reward.answer=x"])
    assert {problem.path for problem in caught.value.problems} == {"reward.passes", "reward.answer"}


def test_a_failure_of_the_supervisor_is_reported(tmp_path: Path) -> None:
    """Such as a limit of processes, which the operating system reports when it forks."""
    script = """
import os
from multiprocessing import Pipe
from maxhydra.config.schema.reward import Reward
from maxhydra.rl.reward_process import supervise

def fork():
    raise OSError(11, "Resource temporarily unavailable")

os.fork = fork
(pipe, other), (lifeline, _open) = Pipe(), Pipe()
supervise(pipe, lifeline, Reward())
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert "the supervisor of a reward process failed: [Errno 11] Resource temporarily unavailable" in done.stderr
