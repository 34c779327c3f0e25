"""task=decode and task=serve as commands, with a freshly trained model and the real engine."""

import json
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.decode.offline import settings_fingerprint
from maxhydra.decode.open import check_same_model
from tests.support import compile_cache, fork_server
from tests.support.cli import SMALL, command, environment, run, run_ok, start_silent
from tests.support.skips import import_optional

openai = import_optional("openai", extra="test")

MODEL = [override for override in SMALL if override.startswith("model.")]
ENGINE = ["task.engine.max_batch=4", "task.engine.cache_tokens=4096"]
DECODE = ["task=decode", "checkpoint.load_parameters=outputs/run", *ENGINE, *MODEL]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
SECONDS = 240

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("trained")
    run_ok(*SMALL, "run.name=run", "train.steps=1", cwd=path)
    (path / "chat.jinja").write_text(TEMPLATE)
    return path


def test_a_different_model_is_rejected_with_the_overrides_to_use(folder: Path) -> None:
    config = compose(["task=decode"]).config
    with pytest.raises(ConfigError, match=r"model\.num_layers is 2, here 4") as raised:
        check_same_model(config, str(folder / "outputs" / "run" / "checkpoints" / "1"))
    hint = raised.value.problems[0].hint.split("trained with: ")[1].split()
    assert sorted(hint) == sorted(["model=tiny", *MODEL])
    check_same_model(compose(["task=decode", *hint, "model.scan_unroll=1"]).config, str(folder / "outputs" / "run"))
    # Without a readable run.json, the hint lists every key.
    content = (folder / "outputs/run/run.json").read_text()
    (folder / "outputs/run/run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"with: model\.\w+="):
        check_same_model(config, str(folder / "outputs" / "run"))
    (folder / "outputs/run/run.json").write_text(content)
    other = compose(["task=decode", *hint, "data.tokenizer.add_bos=false"]).config
    with pytest.raises(ConfigError, match=r"with: model=tiny .* data\.tokenizer\.add_bos=true"):
        check_same_model(other, str(folder / "outputs" / "run"))


def test_settings_that_change_completions_change_the_fingerprint() -> None:
    command = ["task=decode", "task.input=a", "task.output=b"]
    changes = [
        "task.sampling.top_k=5",
        "run.seed=1",
        "model.norm_eps=1e-6",
        "checkpoint.load_parameters=x",
        "task.chat=off",
    ]
    fingerprints = [
        settings_fingerprint(compose([*command, *change]).config) for change in ([], *([each] for each in changes))
    ]
    assert len(set(fingerprints)) == len(fingerprints)
    same = compose([*command, "task.engine.max_batch=1", "task.progress=none"]).config
    assert settings_fingerprint(same) == fingerprints[0]


def test_fingerprints_equal_those_of_earlier_versions() -> None:
    """Values that commit fe5ae02 wrote: keys of the model that were added since count only if they are used."""
    command = ["task=decode", "task.input=a.jsonl", "task.output=b.jsonl", "checkpoint.load_parameters=x"]
    earlier = {"tiny": "d0695497213b", "mixtral-tiny": "1f3a556c24c8", "deepseek3-tiny": "119deee419d3"}
    for name, expected in earlier.items():
        assert settings_fingerprint(compose([*command, f"model={name}"]).config) == expected, name
    changed = compose([*command, "model=tiny", "model.multipliers.branch=0.5"]).config
    assert settings_fingerprint(changed) != earlier["tiny"]


def test_a_new_checkpoint_changes_the_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "9" / "params").mkdir(parents=True)
    config = compose(["task=decode", f"checkpoint.load_parameters={tmp_path}"]).config
    before = settings_fingerprint(config)
    assert settings_fingerprint(config) == before
    (tmp_path / "checkpoints" / "10" / "params").mkdir(parents=True)
    assert settings_fingerprint(config) != before


@pytest.mark.exhaustive
def test_a_killed_command_resumes_and_completes_each_prompt_once(folder: Path) -> None:
    records = [{"prompt": f"prompt {n}", "id": n, "sampling": {"max_tokens": 5 + n}} for n in range(30)]
    (folder / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    overrides = [*DECODE, "task.input=in.jsonl", "task.output=out.jsonl", "task.sampling.temperature=0.9"]
    process = start_silent(*overrides, cwd=folder)
    output, until = folder / "out.jsonl", time.monotonic() + SECONDS
    while process.is_running() and not (output.exists() and output.stat().st_size) and time.monotonic() < until:
        time.sleep(0.005)
    process.kill()
    process.wait()
    before = output.read_text().splitlines()
    assert 0 < len(before) < 30, "the kill came too early or too late"
    done = run_ok(*overrides, cwd=folder)
    after = output.read_text().splitlines()
    assert after[: len(before)] == before and f"({len(before)} before this command)" in done.stderr
    rows = [json.loads(line) for line in after]
    assert sorted(row["id"] for row in rows) == list(range(30))
    for row in rows:
        assert row["finish"] in ("stop", "length") and row["tokens"] <= 5 + row["id"] and row["prompt_tokens"] > 8
    (folder / "in.jsonl").write_text("".join(json.dumps({**record, "prompt": "other"}) + "\n" for record in records))
    with_tilde = [re.sub(r"=(\w+\.jsonl)", r'="~/\1"', override) for override in overrides]
    other = run(*with_tilde, cwd=folder, HOME=str(folder))
    assert other.returncode == 2 and "has a completion of record 0 for a different prompt or sampling" in other.stderr


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("processes", [0, 1])
def test_the_server_completes_requests_and_stops_on_sigterm(folder: Path, tmp_path: Path, processes: int) -> None:
    serve = [override.replace("task=decode", "task=serve") for override in DECODE]
    serve += [f"task.http_processes={processes}"]
    serve += ["data.tokenizer.chat_template=chat.jinja", "task.port=0", "task.api_key_env=KEY", "task.model_name=mine"]
    program = str(fork_server.write_script(tmp_path / "maxhydra", compile_cache.PREFIX))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([program, *serve], cwd=folder, env=environment(KEY="sesame-1234"), **pipes)
    assert process.stdout is not None
    line = process.stdout.readline().decode()
    address = re.search(r"serving mine on (http://127\.0\.0\.1:\d+/v1)", line)
    assert address, line
    client = openai.OpenAI(base_url=address[1], api_key="sesame-1234", max_retries=0, timeout=SECONDS)
    hello = [{"role": "user", "content": "hello"}]
    request = {"model": "mine", "messages": hello, "max_tokens": 12, "n": 2, "temperature": 0.8, "seed": 4}
    complete = client.chat.completions.create(**request, logprobs=True, top_logprobs=3)  # type: ignore[call-overload]
    texts = ["", ""]
    for chunk in client.chat.completions.create(**request, stream=True):  # type: ignore[call-overload]
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in complete.choices] and texts[0] != texts[1]
    for choice in complete.choices:
        assert 0 < len(choice.logprobs.content) <= 12 and len(choice.logprobs.content[0].top_logprobs) == 3
        best = [top.logprob for top in choice.logprobs.content[0].top_logprobs]
        assert best == sorted(best, reverse=True) and all(value <= 0 for value in best)
    with pytest.raises(openai.BadRequestError, match=r"task\.engine\.max_context"):
        client.completions.create(model="mine", prompt="x" * 5000)
    authorized = urllib.request.Request(
        address[1].replace("/v1", "/metrics"), headers={"Authorization": "Bearer sesame-1234"}
    )
    with urllib.request.urlopen(authorized, timeout=SECONDS) as response:
        assert f"\nmaxhydra_server_processes {processes}\n".encode() in response.read()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0 and b"sesame" not in out + err and b"Traceback" not in err, err.decode()


# Runs a command in a pseudo-terminal with pipes for keyboard and screen. In a new process: this one has threads, whose
# locks a fork would copy, and may be a background job, which ignores Ctrl-C.
IN_TERMINAL = """
import os, pty, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))
"""


@contextmanager
def killed_at_exit(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill the process at the end of the block, whatever happens inside."""
    try:
        yield
    finally:
        process.kill()


@pytest.mark.exhaustive
def test_a_chat_at_a_terminal(folder: Path) -> None:
    overrides = [
        *DECODE,
        "task.sampling.max_tokens=900",
        "task.sampling.ignore_eos=true",
        "task.sampling.temperature=1",
    ]
    in_terminal = [sys.executable, "-c", IN_TERMINAL, *command(*overrides)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    with (
        subprocess.Popen(in_terminal, cwd=folder, env=environment(TERM="xterm"), **pipes) as process,
        killed_at_exit(process),
    ):
        shown = ""

        def until(text: str, *, after: int = 0, more: int = 0) -> None:
            """Read until the text is shown, followed by `more` characters."""
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
            process.stdin.write(b"carry on\n")
            until("carry on", after=start, more=20)
            process.stdin.write(b"\x03")
            until("[stopped]", after=start)
            until("> ", after=shown.index("[stopped]", start))
        process.stdin.write(b"/exit\n")
        process.stdout.read()
        assert process.wait() == 0
