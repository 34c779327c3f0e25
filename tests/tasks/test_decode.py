"""task=decode around the engine: requests and their seeds, prompts, files that survive a kill, the terminal."""

import json
import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.decode import Sampling
from maxhydra.config.schema.run import Progress
from maxhydra.decode.chat_cli import answer, converse
from maxhydra.decode.offline import BatchFailedError
from maxhydra.decode.offline_files import AnswerFile, read_records
from maxhydra.decode.progress import open_progress
from maxhydra.decode.prompts import PromptEncoder, PromptError
from maxhydra.decode.request import Delta, Handle
from maxhydra.decode.sampling_params import SettingError, adjusted, make_requests
from tests.support.fake_engine import FakeEngine, answer_file, asker, expected

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def requests(sampling: Sampling, **changes: Any) -> list[Any]:
    return make_requests([1, 2], sampling, **{"samples": 3, "seed": 0, "number": 0, "logprobs": None, **changes})


def template(folder: Path) -> str:
    (folder / "chat.jinja").write_text(TEMPLATE)
    return f"data.tokenizer.chat_template={folder / 'chat.jinja'}"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Settings


def test_seeds_follow_the_given_one_or_the_run_and_the_prompt() -> None:
    given = Sampling(seed=5)  # type: ignore[call-arg]
    assert [request.seed for request in requests(given, number=9, seed=3)] == [5, 6, 7]
    seeds = {
        (seed, number): [request.seed for request in requests(Sampling(), seed=seed, number=number)]  # type: ignore[call-arg]
        for seed in range(20)
        for number in range(20)
    }
    assert len({seed for drawn in seeds.values() for seed in drawn}) == 20 * 20 * 3
    assert all(0 <= seed < 2**31 for drawn in seeds.values() for seed in drawn)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "0.5"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("temperature", None),
        ("temperature", 1e39),
        ("repetition_penalty", 1e39),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("max_tokens", 10**400),
        ("top_p", 0),
        ("top_p", 1.5),
        ("seed", "x"),
        ("stop", "END"),
        ("stop", [""]),
        ("stop", [3]),
        ("stop", ["x" * 2000]),
        ("ignore_eos", 1),
        ("tempreature", 1),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(SettingError, match=name):
        adjusted(Sampling(), {name: value})  # type: ignore[call-arg]


def test_settings_are_replaced_and_the_others_kept() -> None:
    base = Sampling(temperature=0.5, top_k=7)  # type: ignore[call-arg]
    changed = adjusted(base, {"top_k": 3, "stop": ["a"], "seed": None, "top_p": 1})
    assert (changed.top_k, changed.temperature, changed.stop, changed.top_p) == (3, 0.5, ["a"], 1)
    assert (base.top_k, base.stop) == (7, [])


# Prompts


def test_a_prompt_begins_as_documents_did_in_training() -> None:
    config = compose([]).config
    words = PromptEncoder(config.data, vocab_size=320)
    assert words.of_text("ab") == [256, 97, 98] and words.ends == {257}
    plain = compose(["data.tokenizer.add_bos=false"]).config
    assert PromptEncoder(plain.data, vocab_size=320).of_text("ab") == [97, 98]
    for text in ("", "\ud800"):
        with pytest.raises(PromptError):
            words.of_text(text)
    with pytest.raises(ConfigError, match=r"model\.vocab_size=100"):
        PromptEncoder(config.data, vocab_size=100)


def test_a_prompt_is_what_the_user_says_where_there_is_a_template(tmp_path: Path) -> None:
    engine = FakeEngine()
    with_template = asker(engine, template(tmp_path), "task.system=Be brief")
    wanted = "<system>Be brief</system><user>Hi</user><assistant>"
    assert bytes(with_template.encode("Hi")).decode() == wanted
    assert asker(engine, template(tmp_path), "task.chat=off").encode("Hi") == [256, *b"Hi"]
    assert asker(engine).encode("Hi") == [256, *b"Hi"]
    own = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert bytes(with_template.encode_messages(own)).decode() == "<system>S</system><user>U</user><assistant>"
    for overrides in (["task.chat=on"], ["task.system=x"]):
        with pytest.raises(ConfigError, match="template"):
            asker(engine, *overrides).encode("Hi")
    engine.close()


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["task.prompt=a", "task.input=b", "task.output=c"], "task.prompt"),
        (["task.input=b"], "task.output"),
        (["task.output=b"], "task.input"),
        (["task.samples=3"], "task.samples"),
        (["task.prompt=''"], "task.prompt"),
        (["task.prompt=a", "task.logprobs=1"], "task.logprobs"),
        (["task.prompt=a", "task.system=s", "task.chat=off"], "task.system"),
        (["task.prompt=a", "task.sampling.max_tokens=-1"], "task.sampling.max_tokens"),
        (["task.prompt=a", "task.sampling.stop=['']"], "task.sampling.stop"),
        (["task.prompt=a", "task.engine.page_size=0"], "task.engine.page_size"),
        (["task.prompt=a", "model=gpt3-tiny", "task.engine.max_context=100000"], "task.engine.max_context"),
    ],
)
def test_settings_that_contradict_are_refused(overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        compose(["task=decode", *overrides])
    assert key in [problem.path for problem in raised.value.problems]


# Files


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))
    return path


def test_a_file_is_answered_with_ids_settings_and_samples(tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        [
            {"prompt": "one", "id": "a", "topic": "sums"},
            "",
            {"prompt": "two", "sampling": {"max_tokens": 2, "seed": 4}},
        ],
    )
    target = tmp_path / "new" / "out.jsonl"
    settings = ["task.samples=2", "task.logprobs=1", "task.sampling.max_tokens=4", "run.seed=7"]
    answer_file(source, target, *settings)
    found = {(row["index"], row["sample"]): row for row in lines(target)}
    assert sorted(found) == [(0, 0), (0, 1), (1, 0), (1, 1)] and len(lines(target)) == 4
    engine = FakeEngine()
    asking = asker(engine, "task.prompt=x", *[s for s in settings if "logprobs" not in s])
    for (index, sample), row in found.items():
        text = ("one", "two")[index]
        sampling = adjusted(asking.task.sampling, {"max_tokens": 2, "seed": 4} if index else {})
        request = asking.requests(asking.encode(text), sampling, number=index)[sample]
        assert row["text"] == expected(request) and row["prompt"] == text
        assert (row["tokens"], row["prompt_tokens"], row["finish"]) == (4 - 2 * index, 4, "length")
        assert len(row["logprobs"]) == row["tokens"] and len(row["logprobs"][0]["alternatives"]) == 1
    assert found[1, 0]["sampling"] == {"max_tokens": 2, "seed": 4} and "sampling" not in found[0, 0]
    assert found[0, 1]["id"] == "a" and found[0, 1]["topic"] == "sums" and "id" not in found[1, 0]
    engine.close()


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("{", "line 2"),
        ("[1]", "no object"),
        ({"text": "x"}, "prompt and messages"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt and messages"),
        ({"prompt": ""}, "empty"),
        ({"prompt": 3}, "no text"),
        ({"messages": [{"role": "user", "content": "x"}, "y"]}, "messages holds something that is no object"),
        ({"prompt": "x", "id": "first"}, "twice"),
        ({"prompt": "x", "id": [1]}, "id"),
        ({"prompt": "x", "temperature": 1}, "sampling"),
        ({"prompt": "x", "sampling": {"temprature": 1}}, "temperature"),
        ({"prompt": "x", "sampling": {"max_tokens": -1}}, "max_tokens"),
        ({"prompt": "x", "finish": 1}, "finish"),
        ('{"prompt": "\\ud800"}', "line 2"),
        ("[" * 100_000, "line 2"),
        ('{"prompt": "x", "sampling": 1}', "sampling"),
    ],
)
def test_a_bad_record_is_refused_before_anything_is_written(tmp_path: Path, record: Any, words: str) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "fine", "id": "first"}, record])
    with pytest.raises(ConfigError, match=words):
        answer_file(source, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_prompt_that_is_too_long_does_not_stop_the_others(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "x" * 1000}, {"prompt": "y"}])
    tally = answer_file(source, tmp_path / "out.jsonl")
    first, second = sorted(lines(tmp_path / "out.jsonl"), key=lambda row: row["index"])
    assert first["finish"] == "refused" and "task.engine.max_context" in first["error"] and second["text"]
    assert (tally.answered, tally.refused) == (2, 1)
    again = answer_file(source, tmp_path / "out.jsonl")
    assert (again.answered, again.refused) == (0, 1)


def missing(source: Path, target: Path) -> int:
    with AnswerFile(target, settings="fake") as answers:
        return answers.missing(read_records(source, Sampling()), samples=1)  # type: ignore[call-arg]


def test_answers_of_another_file_or_other_settings_are_not_mixed(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out.jsonl"
    answer_file(source, target)
    before = target.read_text()
    write(source, [{"prompt": "b"}])
    with pytest.raises(ConfigError, match="another prompt"):
        answer_file(source, target)
    for other in ({"prompt": "b"}, {"prompt": "a", "sampling": {"max_tokens": 3}}):
        with pytest.raises(ConfigError, match="another prompt or sampling for record 0 than line 1"):
            missing(write(source, [other]), target)
    write(source, [{"prompt": "a"}, {"prompt": "b"}])
    assert missing(source, target) == 1
    answer_file(source, target)
    assert missing(source, target) == 0
    with pytest.raises(ConfigError, match=r"answers record 1, and task\.input ends with record 0"):
        missing(write(source, [{"prompt": "a"}]), target)
    target.write_text(before.replace('"fake"', '"other"'))
    with pytest.raises(ConfigError, match="other settings"):
        answer_file(write(source, [{"prompt": "a"}]), target)
    target.write_text('{"x": 1}\n')
    with pytest.raises(ConfigError, match="line 1 is no answer"):
        answer_file(source, target)
    assert target.read_text() == '{"x": 1}\n'
    with pytest.raises(ConfigError, match="cannot be written"):
        answer_file(source, target / "out.jsonl")


def test_what_was_answered_before_the_engine_failed_is_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer and the failure come together."""

    def submit(self: FakeEngine, request: Any) -> Handle:
        handle = Handle()
        is_first = bytes(request.prompt[1:]) == b"first"
        handle.put(Delta("yes", (1,), finish="stop") if is_first else Delta("", (), finish="error", error="no memory"))
        return handle

    monkeypatch.setattr(FakeEngine, "submit", submit)
    source = write(tmp_path / "in.jsonl", [{"prompt": "first"}, {"prompt": "second"}])
    with pytest.raises(BatchFailedError, match="no memory"):
        answer_file(source, tmp_path / "out.jsonl")
    assert [row["text"] for row in lines(tmp_path / "out.jsonl")] == ["yes"]


def test_how_many_are_answered_is_known_without_counting(tmp_path: Path) -> None:
    """It is shown after every answer: of a million, a look at each would take longer than the model."""
    source, target = write(tmp_path / "in.jsonl", [{"prompt": f"{n}"} for n in range(50)]), tmp_path / "out.jsonl"
    answer_file(source, target, "task.samples=2")
    for text in (target.read_text(), 2 * target.read_text()):
        target.write_text(text)
        with AnswerFile(target, settings="fake") as answers:
            assert answers.count == 100


def test_killed_at_any_moment_every_prompt_is_answered_exactly_once(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": f"prompt {n}", "id": n} for n in range(40)])
    target = tmp_path / "out.jsonl"
    begin = multiprocessing.get_context("fork").Process
    settings, draw, sizes = ("task.sampling.max_tokens=5",), random.Random(0), []
    for _ in range(3):
        process = begin(target=answer_file, args=(source, target, *settings), kwargs={"seconds": 0.02})
        before = target.stat().st_size if target.exists() else 0
        process.start()
        while process.is_alive() and not (target.exists() and target.stat().st_size > before):
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.3))
        process.kill()
        process.join()
        sizes.append(len(lines(target)))
        # A kill in the middle of a write leaves half a line, which a test cannot time; so it is made.
        with target.open("ab") as file:
            file.write(target.read_bytes()[: draw.randrange(1, 40)])
    assert sizes == sorted(sizes) and sizes[0] > 0 and sizes[-1] < 40, sizes
    other = begin(target=answer_file, args=(source, target, *settings), kwargs={"seconds": 0.2})
    other.start()
    while target.read_bytes()[-1:] != b"\n":
        time.sleep(0.005)
    with pytest.raises(ConfigError, match="another process"):
        answer_file(source, target, *settings)
    other.kill()
    other.join()
    answer_file(source, target, *settings)
    rows = lines(target)
    assert sorted(row["id"] for row in rows) == list(range(40))
    whole = tmp_path / "whole.jsonl"
    answer_file(source, whole, *settings)
    assert sorted(target.read_text().splitlines()) == sorted(whole.read_text().splitlines())


def test_progress_tells_answers_and_tokens_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    for mode, words in ((Progress.lines, "answered 7/10"), (Progress.bar, "7/10"), (Progress.none, "")):
        with open_progress(mode, total=10, start=2, verb="answered") as progress:
            time.sleep(0.05)
            progress.update(7, 500)
        shown = capsys.readouterr().err
        assert words in shown and ("tok/s" in shown) == bool(words)


# The terminal


class Person:
    """Says lines, or presses a key (an exception), and keeps what is shown."""

    def __init__(self, *says: str | type[BaseException]):
        self._says, self.shown = list(says), ""

    def read(self, sign: str) -> str:
        said = self._says.pop(0)
        if isinstance(said, str):
            return said
        raise said

    def write(self, text: str) -> None:
        self.shown += text


def test_one_prompt_is_answered_on_stdout() -> None:
    engine = FakeEngine()
    person = Person()
    asking = asker(engine, "task.prompt=hi", "task.samples=2", "task.sampling.max_tokens=3")
    answer(asking, "hi", person.write)
    first, second = (expected(r) for r in asking.requests(asking.encode("hi"), asking.task.sampling, number=0))
    assert person.shown == f"--- 1 of 2\n{first}\n--- 2 of 2\n{second}\n"
    with pytest.raises(ConfigError, match=r"task\.engine\.max_context"):
        answer(asking, "x" * 1000, person.write)
    engine.close()


def test_a_chat_remembers_resets_and_survives_ctrl_c(tmp_path: Path) -> None:
    engine = FakeEngine()
    asked: list[str] = []
    submit = engine.submit
    engine.submit = lambda request: (asked.append(bytes(request.prompt).decode()), submit(request))[1]  # type: ignore[method-assign]
    person = Person("one", KeyboardInterrupt, "two", "", "/reset", "x" * 1000, "three", EOFError)
    converse(asker(engine, template(tmp_path), "task.sampling.max_tokens=1"), read=person.read, write=person.write)
    engine.close()
    said = asked[1].removeprefix("<user>one</user><assistant>").partition("</assistant>")[0]
    assert asked[0] == "<user>one</user><assistant>" and said
    assert asked[1] == f"<user>one</user><assistant>{said}</assistant><user>two</user><assistant>"
    assert asked[3] == "<user>three</user><assistant>" and "task.engine.max_context" in person.shown


def test_ctrl_c_stops_the_answer_and_frees_its_place(tmp_path: Path) -> None:
    engine = FakeEngine(seconds=0.005)
    person = Person("go on for ever", "and you?", "/exit")

    def write(text: str) -> None:
        person.write(text)
        if person.shown.count("delta") == 1 and text.strip() == "delta":
            raise KeyboardInterrupt

    converse(asker(engine, "task.sampling.max_tokens=400"), read=person.read, write=write)
    assert "[stopped]" in person.shown
    began = time.monotonic()
    while engine.stats()["running"] > 0 and time.monotonic() - began < 5:
        time.sleep(0.01)
    assert engine.stats()["running"] == 0
    engine.close()
