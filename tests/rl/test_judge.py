"""A judge behind an HTTP API: values against a deterministic stub, the wire format against our own server."""

import json
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.reward import Judge, Reward, RewardKind, Scope, Term
from maxhydra.rl.judge import JudgeError, parse_better, parse_score
from maxhydra.rl.reward_pool import RewardPool, RewardResult
from tests.decode import test_openai_server as server
from tests.rl.test_rewards import make_sample


class Stub(BaseHTTPRequestHandler):
    """Scores a response by its number of characters; of two, the longer is better.

    `flaky` fails at first, `broken` always, `mumble` gets no rating.
    """

    attempts: Counter[str]
    keys: set[str | None]
    lock = threading.Lock()

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        user = request["messages"][1]["content"]
        responses = [part.split("\n", 1)[1].strip() for part in user.split("### Response")[1:]]
        with self.lock:
            self.attempts[user] += 1
            self.keys.add(self.headers["Authorization"])
            first = self.attempts[user] == 1
        assert self.path == "/v1/chat/completions" and request["model"] == "stub" and "Say it" in user
        if "broken" in responses or ("flaky" in responses and first):
            self.reply(500, {"error": "overloaded"})
        elif "forbidden" in responses:
            self.reply(401, {"error": f"wrong key {self.headers['Authorization']}"})
        else:
            self.reply(200, {"choices": [{"message": {"role": "assistant", "content": rating(responses)}}]})

    def reply(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def rating(responses: list[str]) -> str:
    if "mumble" in responses:
        return "I cannot say."
    if len(responses) == 1:
        return f"<think>Score: 1</think>It is fine.\n\n**Score:** {len(responses[0])}/10"
    lengths = [len(response) for response in responses]
    return f"Better: {'tie' if lengths[0] == lengths[1] else 'AB'[lengths[0] < lengths[1]]}"


@pytest.fixture
def url() -> Iterator[str]:
    Stub.attempts, Stub.keys = Counter(), set()
    stub = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    thread = threading.Thread(target=stub.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{stub.server_address[1]}/v1"
    stub.shutdown()
    thread.join()
    stub.server_close()


def judge(url: str, *texts: str, scope: Scope = Scope.completion, **fields: Any) -> list[RewardResult]:
    config = Judge(**{"url": url, "model": "stub", **fields})
    term = Term(kind=RewardKind.judge, scope=scope, concurrency=4, judge=config)
    with closing(RewardPool(Reward(terms={"own": term}, timeout=20))) as pool:
        return pool.score([make_sample(text, prompt="Say it") for text in texts], group_size=len(texts))


def test_a_rubric_score_is_divided_by_10_and_failures_cost_their_completion_only(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "maxhydra"):
        results = judge(url, "four", "flaky", "broken", "mumble", "a" * 11, "a" * 10, retries=1)
    assert [result.reward for result in results] == [0.4, 0.5, 0, 0, 0, 1]
    assert [result.errors for result in results] == [0, 0, 1, 1, 1, 0]
    for reason in ("HTTP 500", "no score: 'I cannot say.'", "score 11 is not from 0 to 10"):
        assert reason in caplog.text
    assert sorted(Stub.attempts.values()) == [1, 1, 2, 2, 2, 2]


def test_pairwise_comparisons_give_win_rates_in_both_orders(url: str) -> None:
    results = judge(url, "a", "bbb", "cc", "dd", scope=Scope.group)
    assert [result.reward for result in results] == pytest.approx([0, 1, 0.5, 0.5])
    assert len(Stub.attempts) == 12, "every pair in both orders"


def test_a_comparison_that_fails_does_not_count(url: str) -> None:
    results = judge(url, "a", "bbb", "broken", scope=Scope.group, retries=0)
    assert [(result.reward, result.errors) for result in results] == [(0, 0), (1, 0), (0, 1)]


@pytest.mark.slow
def test_the_key_comes_from_the_environment_and_is_not_logged(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="MY_KEY is not set"):
        judge(url, "four", key_variable="MY_KEY")
    monkeypatch.setenv("MY_KEY", "hush-hush")
    with caplog.at_level(logging.WARNING, "maxhydra"):
        results = judge(url, "four", "forbidden", key_variable="MY_KEY")
    assert [result.reward for result in results] == [0.4, 0] and Stub.keys == {"Bearer hush-hush"}
    assert "HTTP 401" in caplog.text and "hush" not in caplog.text
    assert max(Stub.attempts.values()) == 1, "a wrong key is not tried again"


def test_no_server_is_an_error_of_each_completion(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "maxhydra"):
        results = judge("http://127.0.0.1:9/v1", "a", "b", retries=0)
    assert [result.errors for result in results] == [1, 1] and "no reply from the judge" in caplog.text


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 7", 7),
        ("score = 7.5 / 10", 7.5),
        ("Score: 2\nNo.\n**Score**: `8`", 8),
        ("6/10", 6),
        ("10", 10),
        ("<b>9</b>", None),
        ("Score: ten", None),
        ("Score: -1", None),
        ("I scored 3 goals", None),
        ("", None),
    ],
)
def test_scores_are_parsed(reply: str, score: float | None) -> None:
    if score is None:
        with pytest.raises(JudgeError):
            parse_score(reply)
    else:
        assert parse_score(reply) == score


@pytest.mark.parametrize(
    ("reply", "value"),
    [("Better: A", 1), ("**Better:** response B.", 0), ("Better: A? no. Better: TIE", 0.5), ("b", 0)],
)
def test_comparisons_are_parsed(reply: str, value: float) -> None:
    assert parse_better(reply) == value
    with pytest.raises(JudgeError):
        parse_better("Better: Anna")


def test_invalid_judges_are_rejected_and_a_key_is_not_shown() -> None:
    terms = "{a:{kind:judge},b:{kind:exact,judge:{url:'http://x'}},c:{kind:judge,scope:batch,concurrency:1,"
    terms += "judge:{url:'ftp://x',model:m,key_variable:'sk-123456789'}}}"
    with pytest.raises(ConfigError) as caught:
        compose([f"+reward.terms={terms}"])
    paths = {problem.path.removeprefix("reward.terms.") for problem in caught.value.problems}
    fields = {"a.judge.url", "a.judge.model", "a.concurrency", "b.judge"}
    assert paths == {*fields, "c.scope", "c.judge.url", "c.judge.key_variable"}
    assert "123456789" not in str(caught.value)


@pytest.mark.slow
def test_our_own_server_understands_the_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reply, words without a score, shows that the request was served and its reply read."""
    template = tmp_path / "chat.jinja"
    template.write_text(server.TEMPLATE)
    monkeypatch.setenv("MY_KEY", "secret")
    data = compose([f"data.tokenizer.chat_template={template}"]).config.data
    prompts = server.PromptEncoder(data, vocab_size=320)
    with caplog.at_level(logging.WARNING, "maxhydra"), server.running(prompts, key="secret") as running:
        address = f"http://127.0.0.1:{running.port}/v1"
        (result,) = judge(address, "four", model="tiny", key_variable="MY_KEY", retries=0, max_tokens=3, rubric="x")
    assert result.errors == 1 and "has no score" in caplog.text
    assert any(word in caplog.text for word in server.WORDS)
