"""Rewards against known numbers, and code that raises, hangs, crashes or gives no number."""

import logging
from typing import Any

import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.reward import OnFault, Reward, Term
from maxhydra.rl.reward_pool import RewardError, RewardPool, RewardResult
from maxhydra.rl.rewards import Sample, build_score, extract_answer
from tests.support.skips import import_optional


def answer(text: str, expected: Any = None, **changes: Any) -> Sample:
    fields = {"prompt": "x?", "text": text, "answer": text, "expected": expected, "record": {}, "tokens": len(text)}
    return Sample(**{**fields, **changes})


def score(term: Term, *answers: Sample) -> list[float]:
    return [build_score(term)(one) for one in answers]


def judged(reward: Reward, *texts: str) -> list[RewardResult]:
    judge = RewardPool(reward)
    try:
        return judge.score([answer(text) for text in texts])
    finally:
        judge.close()


def own(name: str, **changes: Any) -> Reward:
    return Reward(terms={"own": Term(kind="function", function=f"reward_functions:{name}")}, **changes)


@pytest.fixture(autouse=True)
def functions(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The functions of the tests can be imported by other processes."""
    monkeypatch.setenv("PYTHONPATH", str(request.path.parent), prepend=":")


def test_exact_answers_differ_in_case_and_spaces_at_most() -> None:
    answers = [answer(" New  York\n", "new york"), answer("71", 71), answer("711", "71"), answer("x", "x", answer=None)]
    assert score(Term(kind="exact"), *answers) == [1, 1, 0, 0]


def test_equal_expressions_are_the_same_answer() -> None:
    import_optional("math_verify", extra="rl")
    pairs = [
        ("$\\frac{1}{2}$", "0.5"),
        ("$x^2-1$", "$(x-1)(x+1)$"),
        ("$\\{3, 1\\}$", "$\\{1, 3\\}$"),
        ("72", "71"),
        ("", "1"),
    ]
    assert score(Term(kind="math"), *(answer(given, known) for given, known in pairs)) == [1, 1, 1, 0, 0]


def test_format_and_length() -> None:
    tagged = Term(kind="format", pattern=r"<think>.*</think>\d+")
    assert score(tagged, answer("<think>a\nb</think>7"), answer("7"), answer("<think></think>7!")) == [1, 0, 0]
    assert score(Term(kind="length", target=4), *map(answer, ["", "ab", "abcd", "abcdef", "a" * 9])) == [
        0,
        0.5,
        1,
        0.5,
        0,
    ]


def test_the_answer_within_a_text_is_what_matches_last() -> None:
    text = "<answer>1</answer> no, <answer>\n2</answer>"
    assert extract_answer(text, "<answer>(.*?)</answer>") == "\n2"
    assert extract_answer("2", "<answer>(.*?)</answer>") is None
    assert extract_answer("2", None) == "2"


def test_the_reward_is_the_weighted_sum_and_one_term_decides() -> None:
    terms = {
        "vowels": Term(kind="function", function="reward_functions:vowels", weight=0.5),
        "form": Term(kind="format", pattern="[a-z]+", weight=-2),
    }
    verdicts = judged(Reward(terms=terms, passes="form", workers=2), "aeb", "A1", "xyz")
    assert [verdict.reward for verdict in verdicts] == [1 - 2, 0, -2]
    assert [verdict.is_right for verdict in verdicts] == [True, False, True]
    assert verdicts[0].terms == {"vowels": 2, "form": 1}


def test_a_function_is_told_all_that_is_known() -> None:
    judge = RewardPool(own("known"))
    try:
        (verdict,) = judge.score([answer("x=3", 3, answer="3", record={"level": 2})])
    finally:
        judge.close()
    assert verdict.is_right


@pytest.mark.parametrize(
    ("name", "texts", "expected", "reason"),
    [
        ("raises", "ab", [0, 0], "raised RuntimeError: cannot judge a (reward_functions.py:"),
        ("hangs_at_b", "abc", [1, 0, 1], "took over reward.timeout=0.5 s"),
        ("hangs", "abcdef", [0] * 6, "was left out after 3 such failures"),
        ("not_a_number", "abcd", [0, 0, 0, 0.5], "gave nan, no finite number"),
        ("exits", "a", [0], "ended its process"),
    ],
)
def test_what_goes_wrong_is_named_counted_and_worth_nothing(
    name: str, texts: str, expected: list[float], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "maxhydra"):
        verdicts = judged(own(name, timeout=0.5), *texts)
    assert [verdict.reward for verdict in verdicts] == expected
    assert sum(verdict.errors for verdict in verdicts) == expected.count(0)
    assert f"reward.terms.own {reason}" in caplog.text


def test_it_ends_the_run_where_that_is_asked_for() -> None:
    with pytest.raises(RewardError, match=r"reward.terms.own raised RuntimeError.*on_error=raise"):
        judged(own("raises", on_error=OnFault["raise"]), "a")


@pytest.mark.parametrize("path", ["reward_functions:nothing", "no_such_module:f"])
def test_a_function_that_is_not_there_is_refused_at_the_start(path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RewardPool(Reward(terms={"mine": Term(kind="function", function=path)}))
    (problem,) = caught.value.problems
    assert problem.path == "reward.terms.mine.function" and problem.value == path


def test_bad_terms_are_listed_together() -> None:
    terms = "{a:{kind:format},b:{kind:function,function:f},c:{kind:exat},d:{kind:exact,target:3}}"
    with pytest.raises(ConfigError) as caught:
        compose([f"+reward.terms={terms}"])
    fields = ["a.pattern", "b.function", "c.kind", "d.target"]
    assert {problem.path for problem in caught.value.problems} == {f"reward.terms.{field}" for field in fields}


def test_the_term_that_decides_and_the_answer_must_be_there() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["reward=exact", "reward.passes=answr", "reward.answer=x"])
    assert {problem.path for problem in caught.value.problems} == {"reward.passes", "reward.answer"}
