"""task=decode and task=serve as commands, with a model that was trained a moment ago and the engine that serves it."""

import json
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.decode.checkpoint_check import check_origin, settings_name
from tests.support.cli import SMALL, command, environment, finished, silent
from tests.support.skips import import_optional

openai = import_optional("openai", extra="test")

MODEL = [override for override in SMALL if override.startswith("model.")]
DECODE = ["task=decode", "checkpoint.load_parameters=outputs/run", "task.engine.max_batch=4", *MODEL]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
SECONDS = 120

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("trained")
    finished(*SMALL, "run.name=run", "train.steps=1", cwd=path)
    (path / "chat.jinja").write_text(TEMPLATE)
    return path


def test_a_model_of_another_shape_is_refused_with_the_way_out(folder: Path) -> None:
    config = compose(["task=decode"]).config
    with pytest.raises(ConfigError, match=r"model\.num_layers is 2, here 4") as raised:
        check_origin(config, str(folder / "outputs" / "run" / "checkpoints" / "1"))
    hint = raised.value.problems[0].hint.split("trained with: ")[1].split()
    assert sorted(hint) == sorted(["model=tiny", *MODEL])
    check_origin(compose(["task=decode", *hint, "model.scan_unroll=1"]).config, str(folder / "outputs" / "run"))
    other = compose(["task=decode", *hint, "data.tokenizer.add_bos=false"]).config
    with pytest.raises(ConfigError, match=r"with: model=tiny .* data\.tokenizer\.add_bos=true"):
        check_origin(other, str(folder / "outputs" / "run"))


def test_settings_that_change_answers_have_another_name() -> None:
    asked = ["task=decode", "task.input=a", "task.output=b"]
    changes = [
        "task.sampling.top_k=5",
        "run.seed=1",
        "model.norm_eps=1e-6",
        "checkpoint.load_parameters=x",
        "task.chat=off",
    ]
    names = [settings_name(compose([*asked, *change]).config) for change in ([], *([each] for each in changes))]
    assert len(set(names)) == len(names)
    assert settings_name(compose([*asked, "task.engine.max_batch=1", "task.progress=none"]).config) == names[0]


def test_a_run_that_went_on_gives_other_answers(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "9" / "params").mkdir(parents=True)
    config = compose(["task=decode", f"checkpoint.load_parameters={tmp_path}"]).config
    before = settings_name(config)
    assert settings_name(config) == before
    (tmp_path / "checkpoints" / "10" / "params").mkdir(parents=True)
    assert settings_name(config) != before


def test_a_killed_file_goes_on_and_answers_each_prompt_once(folder: Path) -> None:
    records = [{"prompt": f"prompt {n}", "id": n, "sampling": {"max_tokens": 5 + n}} for n in range(30)]
    (folder / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    ask = [*DECODE, "task.input=in.jsonl", "task.output=out.jsonl", "task.sampling.temperature=0.9"]
    process = silent(*ask, cwd=folder)
    output, until = folder / "out.jsonl", time.monotonic() + SECONDS
    while process.runs() and not (output.exists() and output.stat().st_size) and time.monotonic() < until:
        time.sleep(0.005)
    process.kill()
    process.wait()
    before = output.read_text().splitlines()
    assert 0 < len(before) < 30, "the kill came too early or too late"
    done = finished(*ask, cwd=folder)
    after = output.read_text().splitlines()
    assert after[: len(before)] == before and f"{len(before)} of them before" in done.stderr
    rows = [json.loads(line) for line in after]
    assert sorted(row["id"] for row in rows) == list(range(30))
    for row in rows:
        assert row["finish"] in ("stop", "length") and row["tokens"] <= 5 + row["id"] and row["prompt_tokens"] > 8
    (folder / "in.jsonl").write_text("".join(json.dumps({**record, "prompt": "other"}) + "\n" for record in records))
    at_home = [re.sub(r"=(\w+\.jsonl)", r'="~/\1"', word) for word in ask]
    there = environment(HOME=str(folder))
    other = subprocess.run(command(*at_home), cwd=folder, env=there, capture_output=True, text=True, check=False)
    assert other.returncode == 2 and "answers another prompt or sampling for record 0" in other.stderr


def test_the_server_answers_and_ends_when_told(folder: Path) -> None:
    serve = [override.replace("task=decode", "task=serve") for override in DECODE]
    serve += ["data.tokenizer.chat_template=chat.jinja", "task.port=0", "task.api_key_env=KEY", "task.model_name=mine"]
    process = subprocess.Popen(
        command(*serve), cwd=folder, env=environment(KEY="sesame-1234"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    line = process.stdout.readline().decode()
    address = re.search(r"serving mine on (http://127\.0\.0\.1:\d+/v1)", line)
    assert address, line
    client = openai.OpenAI(base_url=address[1], api_key="sesame-1234", max_retries=0, timeout=SECONDS)
    hello = [{"role": "user", "content": "hello"}]
    asked = {"model": "mine", "messages": hello, "max_tokens": 12, "n": 2, "temperature": 0.8, "seed": 4}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)  # type: ignore[call-overload]
    texts = ["", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):  # type: ignore[call-overload]
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices] and texts[0] != texts[1]
    for choice in whole.choices:
        assert 0 < len(choice.logprobs.content) <= 12 and len(choice.logprobs.content[0].top_logprobs) == 3
        best = [top.logprob for top in choice.logprobs.content[0].top_logprobs]
        assert best == sorted(best, reverse=True) and all(value <= 0 for value in best)
    with pytest.raises(openai.BadRequestError, match=r"task\.engine\.max_context"):
        client.completions.create(model="mine", prompt="x" * 5000)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0 and b"sesame" not in out + err and b"Traceback" not in err, err.decode()


# A terminal around a command, its keyboard and its screen as pipes. Made by a process of its own: this one has threads,
# which a fork would leave behind with their locks, and may be one of those in the background that know no Ctrl-C.
IN_TERMINAL = """
import os, pty, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))
"""


@contextmanager
def ending(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Whatever happens inside, it has ended then."""
    try:
        yield
    finally:
        process.kill()


def test_a_chat_at_a_terminal(folder: Path) -> None:
    words = [*DECODE, "task.sampling.max_tokens=900", "task.sampling.ignore_eos=true", "task.sampling.temperature=1"]
    around = [sys.executable, "-c", IN_TERMINAL, *command(*words)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    with subprocess.Popen(around, cwd=folder, env=environment(TERM="xterm"), **pipes) as process, ending(process):
        shown = ""

        def until(text: str, *, after: int = 0, more: int = 0) -> None:
            """Until the text is shown, and so many characters behind it."""
            nonlocal shown
            end = time.monotonic() + SECONDS
            while text not in shown[after : len(shown) - more]:
                assert select.select([process.stdout], [], [], max(0, end - time.monotonic()))[0], shown
                read = process.stdout.read(4096)
                assert read, shown
                shown += read.decode(errors="replace")

        until("> ")
        for _ in range(2):
            start = len(shown)
            process.stdin.write(b"go on\n")
            until("go on", after=start, more=20)
            process.stdin.write(b"\x03")
            until("[stopped]", after=start)
            until("> ", after=shown.index("[stopped]", start))
        process.stdin.write(b"/exit\n")
        process.stdout.read()
        assert process.wait() == 0
