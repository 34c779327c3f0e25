"""task=decode without a model: requests and their seeds, prompts, output files that survive a kill, the terminal."""

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
from maxhydra.config.schema.tasks.inference import DecodeTask, SpeechOutput
from maxhydra.decode.chat_cli import chat, complete
from maxhydra.decode.offline import BatchFailedError
from maxhydra.decode.offline_files import OutputFile, read_records
from maxhydra.decode.request import Delta, Handle
from maxhydra.decode.sampling_params import PromptEncoder, PromptError, SettingError, make_requests, with_overrides
from maxhydra.runtime.progress import open_item_progress
from maxhydra.tasks.decode import print_drafts
from tests.support.fake_engine import FakeEngine, decode_file, expected_text, make_client
from tests.support.polling import wait_for

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


# Speculative decoding.


def test_steps_without_drafts_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """A short job may end before the program that verifies drafts is compiled."""
    stats = {"tokens_drafted": 0, "tokens_accepted": 0, "steps": 24, "steps_speculative": 0, "steps_waiting": 16}
    print_drafts(stats)
    assert capsys.readouterr().err == (
        "speculative decoding: 0 of 0 drafted tokens accepted, in 0 of 24 steps; "
        "16 steps ran without drafts while the program that verifies them was being compiled "
        "(task.engine.warm_up=true compiles it first)\n"
    )
    print_drafts({**stats, "steps_waiting": 0})
    assert capsys.readouterr().err == "speculative decoding: 0 of 0 drafted tokens accepted, in 0 of 24 steps\n"
    print_drafts({"running": 0})
    assert not capsys.readouterr().err


# Sampling parameters.


def test_seeds_follow_the_given_one_or_the_run_and_the_prompt() -> None:
    given = Sampling(seed=5)  # type: ignore[call-arg]
    assert [request.seed for request in requests(given, number=9, seed=3)] == [5, 6, 7]
    seeds = {
        (seed, number): [request.seed for request in requests(Sampling(), seed=seed, number=number)]  # type: ignore[call-arg]
        for seed in range(20)
        for number in range(20)
    }
    assert len({seed for each in seeds.values() for seed in each}) == 20 * 20 * 3
    assert all(0 <= seed < 2**31 for each in seeds.values() for seed in each)


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
def test_invalid_sampling_parameters_are_rejected_by_name(name: str, value: object) -> None:
    with pytest.raises(SettingError, match=name):
        with_overrides(Sampling(), {name: value})  # type: ignore[call-arg]


def test_overrides_leave_other_parameters_unchanged() -> None:
    base = Sampling(temperature=0.5, top_k=7)  # type: ignore[call-arg]
    changed = with_overrides(base, {"top_k": 3, "stop": ["a"], "seed": None, "top_p": 1})
    assert (changed.top_k, changed.temperature, changed.stop, changed.top_p) == (3, 0.5, ["a"], 1)
    assert (base.top_k, base.stop) == (7, [])


# Prompts.


def test_a_prompt_starts_like_documents_in_training() -> None:
    config = compose([]).config
    encoder = PromptEncoder(config.data, vocab_size=320)
    assert encoder.encode_text("ab") == [256, 97, 98] and encoder.eos_ids == {257}
    plain = compose(["data.tokenizer.add_bos=false"]).config
    assert PromptEncoder(plain.data, vocab_size=320).encode_text("ab") == [97, 98]
    for text in ("", "\ud800"):
        with pytest.raises(PromptError):
            encoder.encode_text(text)
    with pytest.raises(ConfigError, match=r"model\.vocab_size=100"):
        PromptEncoder(config.data, vocab_size=100)


@pytest.mark.slow
def test_a_prompt_is_a_user_message_if_there_is_a_template(tmp_path: Path) -> None:
    engine = FakeEngine()
    with_template = make_client(engine, template(tmp_path), "task.system=Be brief")
    expected = "<system>Be brief</system><user>Hi</user><assistant>"
    assert bytes(with_template.encode("Hi")).decode() == expected
    assert make_client(engine, template(tmp_path), "task.chat=off").encode("Hi") == [256, *b"Hi"]
    assert make_client(engine).encode("Hi") == [256, *b"Hi"]
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert bytes(with_template.encode_messages(messages)).decode() == "<system>S</system><user>U</user><assistant>"
    for overrides in (["task.chat=on"], ["task.system=x"]):
        with pytest.raises(ConfigError, match="template"):
            make_client(engine, *overrides).encode("Hi")
    engine.close()


@pytest.mark.slow
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
def test_contradictory_settings_are_rejected(overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        compose(["task=decode", *overrides])
    assert key in [problem.path for problem in raised.value.problems]


def test_speech_needs_the_name_of_a_folder() -> None:
    """An empty name is the working directory, whose 0.wav would be replaced."""
    task = DecodeTask(name="decode", prompt="a", speech=SpeechOutput(folder=""))
    assert [problem.path for problem in task.check()] == ["speech.folder"]


# Files.


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))
    return path


def test_a_file_is_completed_with_ids_overrides_and_samples(tmp_path: Path) -> None:
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
    decode_file(source, target, *settings)
    outputs = {(row["index"], row["sample"]): row for row in lines(target)}
    assert sorted(outputs) == [(0, 0), (0, 1), (1, 0), (1, 1)] and len(lines(target)) == 4
    engine = FakeEngine()
    client = make_client(engine, "task.prompt=x", *[s for s in settings if "logprobs" not in s])
    for (index, sample), row in outputs.items():
        text = ("one", "two")[index]
        sampling = with_overrides(client.task.sampling, {"max_tokens": 2, "seed": 4} if index else {})
        request = client.requests(client.encode(text), sampling, number=index)[sample]
        assert row["text"] == expected_text(request) and row["prompt"] == text
        assert (row["tokens"], row["prompt_tokens"], row["finish"]) == (4 - 2 * index, 4, "length")
        assert len(row["logprobs"]) == row["tokens"] and len(row["logprobs"][0]["alternatives"]) == 1
    assert outputs[1, 0]["sampling"] == {"max_tokens": 2, "seed": 4} and "sampling" not in outputs[0, 0]
    assert outputs[0, 1]["id"] == "a" and outputs[0, 1]["topic"] == "sums" and "id" not in outputs[1, 0]
    engine.close()


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ("{", "line 2: is not valid JSON: .* at column 3$"),
        ("[1]", "line 2: expected a JSON object, found list"),
        ({"text": "x"}, "prompt and messages"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt and messages"),
        ({"prompt": ""}, "empty"),
        ({"prompt": 3}, "not a string"),
        ({"messages": [{"role": "user", "content": "x"}, "y"]}, "messages contains an item that is not a JSON object"),
        ({"prompt": "x", "id": "first"}, "twice"),
        ({"prompt": "x", "id": [1]}, "id"),
        ({"prompt": "x", "temperature": 1}, "sampling"),
        ({"prompt": "x", "sampling": {"temprature": 1}}, "is not a sampling parameter; did you mean 'temperature'"),
        ({"prompt": "x", "sampling": {"max_tokens": -1}}, "max_tokens"),
        ({"prompt": "x", "finish": 1}, "finish"),
        ('{"prompt": "\\ud800"}', "line 2"),
        ("[" * 100_000, "line 2"),
        ('{"prompt": "x", "sampling": 1}', "sampling"),
    ],
)
def test_an_invalid_record_is_rejected_before_anything_is_written(tmp_path: Path, record: Any, reason: str) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "fine", "id": "first"}, record])
    with pytest.raises(ConfigError, match=reason):
        decode_file(source, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_prompt_that_is_too_long_does_not_stop_the_others(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "x" * 1000}, {"prompt": "y"}])
    stats = decode_file(source, tmp_path / "out.jsonl")
    first, second = sorted(lines(tmp_path / "out.jsonl"), key=lambda row: row["index"])
    assert first["finish"] == "refused" and "task.engine.max_context" in first["error"] and second["text"]
    assert (stats.completed, stats.rejected) == (2, 1)
    again = decode_file(source, tmp_path / "out.jsonl")
    assert (again.completed, again.rejected) == (0, 1)


def count_missing(source: Path, target: Path) -> int:
    with OutputFile(target, settings="fake") as output:
        return output.count_missing(read_records(source, Sampling()), samples=1)  # type: ignore[call-arg]


def test_completions_of_other_files_or_settings_are_not_mixed(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out.jsonl"
    decode_file(source, target)
    before = target.read_text()
    write(source, [{"prompt": "b"}])
    with pytest.raises(ConfigError, match="a different prompt"):
        decode_file(source, target)
    for other in ({"prompt": "b"}, {"prompt": "a", "sampling": {"max_tokens": 3}}):
        with pytest.raises(ConfigError, match="record 0 for a different prompt or sampling than line 1"):
            count_missing(write(source, [other]), target)
    write(source, [{"prompt": "a"}, {"prompt": "b"}])
    assert count_missing(source, target) == 1
    decode_file(source, target)
    assert count_missing(source, target) == 0
    with pytest.raises(ConfigError, match=r"has a completion of record 1, but task\.input ends with record 0"):
        count_missing(write(source, [{"prompt": "a"}]), target)
    target.write_text(before.replace('"fake"', '"other"'))
    with pytest.raises(ConfigError, match="other settings"):
        decode_file(write(source, [{"prompt": "a"}]), target)
    target.write_text('{"x": 1}\n')
    with pytest.raises(ConfigError, match="line 1 is not an output"):
        decode_file(source, target)
    assert target.read_text() == '{"x": 1}\n'
    with pytest.raises(ConfigError, match="cannot be written"):
        decode_file(source, target / "out.jsonl")


def test_completions_before_an_engine_failure_are_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first completion and the failure arrive together."""

    def submit(self: FakeEngine, request: Any) -> Handle:
        handle = Handle()
        is_first = bytes(request.prompt[1:]) == b"first"
        handle.put(Delta("yes", (1,), finish="stop") if is_first else Delta("", (), finish="error", error="no memory"))
        return handle

    monkeypatch.setattr(FakeEngine, "submit", submit)
    source = write(tmp_path / "in.jsonl", [{"prompt": "first"}, {"prompt": "second"}])
    with pytest.raises(BatchFailedError, match="no memory"):
        decode_file(source, tmp_path / "out.jsonl")
    assert [row["text"] for row in lines(tmp_path / "out.jsonl")] == ["yes"]


@pytest.mark.slow
def test_the_number_of_completions_is_a_counter(tmp_path: Path) -> None:
    """It is displayed after every completion: counting a million lines each time would be slower than the model."""
    source, target = write(tmp_path / "in.jsonl", [{"prompt": f"{n}"} for n in range(10)]), tmp_path / "out.jsonl"
    decode_file(source, target, "task.samples=2")
    for text in (target.read_text(), 2 * target.read_text()):
        target.write_text(text)
        with OutputFile(target, settings="fake") as output:
            assert output.count == 20


@pytest.mark.slow
def test_killed_at_any_moment_every_prompt_is_completed_exactly_once(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": f"prompt {n}", "id": n} for n in range(40)])
    target = tmp_path / "out.jsonl"
    Process = multiprocessing.get_context("fork").Process
    settings, rng, sizes = ("task.sampling.max_tokens=5",), random.Random(0), []
    for _ in range(3):
        process = Process(target=decode_file, args=(source, target, *settings), kwargs={"seconds": 0.1})
        before = target.stat().st_size if target.exists() else 0
        process.start()
        while process.is_alive() and not (target.exists() and target.stat().st_size > before):
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.3))
        process.kill()
        process.join()
        sizes.append(len(lines(target)))
        # A kill during a write leaves an incomplete line; a test cannot time that, so append one.
        with target.open("ab") as file:
            file.write(target.read_bytes()[: rng.randrange(1, 40)])
    assert sizes == sorted(sizes) and sizes[0] > 0 and sizes[-1] < 40, sizes
    other = Process(target=decode_file, args=(source, target, *settings), kwargs={"seconds": 2})
    other.start()
    while target.read_bytes()[-1:] != b"\n":
        time.sleep(0.005)
    with pytest.raises(ConfigError, match="another process"):
        decode_file(source, target, *settings)
    other.kill()
    other.join()
    decode_file(source, target, *settings)
    rows = lines(target)
    assert sorted(row["id"] for row in rows) == list(range(40))
    reference = tmp_path / "reference.jsonl"
    decode_file(source, reference, *settings)
    assert sorted(target.read_text().splitlines()) == sorted(reference.read_text().splitlines())


def test_progress_shows_completions_and_tokens_per_second(capsys: pytest.CaptureFixture[str]) -> None:
    for mode, text in ((Progress.lines, "completed 7/10"), (Progress.bar, "7/10"), (Progress.none, "")):
        with open_item_progress(mode, total=10, start=2, verb="completed") as progress:
            time.sleep(0.05)
            progress.update(7, 500)
        shown = capsys.readouterr().err
        assert text in shown and ("tok/s" in shown) == bool(text)


# The terminal.


class FakeTerminal:
    """Reads from a list of lines and exceptions (key presses), and records the output."""

    def __init__(self, *inputs: str | type[BaseException]):
        self._inputs, self.shown = list(inputs), ""

    def read(self, prompt: str) -> str:
        line = self._inputs.pop(0)
        if isinstance(line, str):
            return line
        raise line

    def write(self, text: str) -> None:
        self.shown += text


def test_one_prompt_is_completed_on_stdout() -> None:
    engine = FakeEngine()
    terminal = FakeTerminal()
    client = make_client(engine, "task.prompt=hi", "task.samples=2", "task.sampling.max_tokens=3")
    complete(client, "hi", terminal.write)
    first, second = (expected_text(r) for r in client.requests(client.encode("hi"), client.task.sampling, number=0))
    assert terminal.shown == f"--- 1 of 2\n{first}\n--- 2 of 2\n{second}\n"
    with pytest.raises(ConfigError, match=r"task\.engine\.max_context"):
        complete(client, "x" * 1000, terminal.write)
    engine.close()


def test_a_chat_remembers_resets_and_survives_ctrl_c(tmp_path: Path) -> None:
    engine = FakeEngine()
    submitted: list[str] = []
    submit = engine.submit
    engine.submit = lambda request: (submitted.append(bytes(request.prompt).decode()), submit(request))[1]  # type: ignore[method-assign]
    terminal = FakeTerminal("one", KeyboardInterrupt, "two", "", "/reset", "x" * 1000, "three", EOFError)
    chat(
        make_client(engine, template(tmp_path), "task.sampling.max_tokens=1"), read=terminal.read, write=terminal.write
    )
    engine.close()
    reply = submitted[1].removeprefix("<user>one</user><assistant>").partition("</assistant>")[0]
    assert submitted[0] == "<user>one</user><assistant>" and reply
    assert submitted[1] == f"<user>one</user><assistant>{reply}</assistant><user>two</user><assistant>"
    assert submitted[3] == "<user>three</user><assistant>" and "task.engine.max_context" in terminal.shown


@pytest.mark.slow
def test_ctrl_c_stops_the_reply_and_frees_its_slot(tmp_path: Path) -> None:
    engine = FakeEngine(seconds=0.005)
    terminal = FakeTerminal("talk forever", "and you?", "/exit")

    def write(text: str) -> None:
        terminal.write(text)
        if terminal.shown.count("delta") == 1 and text.strip() == "delta":
            raise KeyboardInterrupt

    chat(make_client(engine, "task.sampling.max_tokens=400"), read=terminal.read, write=write)
    assert "[stopped]" in terminal.shown
    wait_for(lambda: engine.stats()["running"] == 0)
    engine.close()
