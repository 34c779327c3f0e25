"""Inference tasks and task=grpo in several processes, on a mesh that spans them, against one process.

Commands of a test run one after the other in the same processes, which saves most of their time.
"""

import json
import re
import signal
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from array_record.python.array_record_module import ArrayRecordReader

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.errors import last_of_each_key, quoted
from maxhydra.data.formats.payload import decode_arrays
from maxhydra.model import build
from maxhydra.rl.setup import check
from maxhydra.runtime.peers import EXIT_LOST
from tests.support.cli import ROOT, SMALL, run_processes, start_processes
from tests.support.pictures import frames, picture
from tests.support.polling import wait_for
from tests.support.skips import import_optional

soundfile = import_optional("soundfile", extra="audio")

MODEL = [*SMALL, "model.num_heads=4", "model.num_kv_heads=4", "train.per_device_batch_size=2"]
# The keys of it that tasks use which do not train.
LOADED = [item for item in MODEL if item.startswith(("model.", "train.seq_len="))]
LOAD = "checkpoint.load_parameters=weights"
ENGINE = ["task.engine.max_batch=2", "task.engine.cache_tokens=256", "task.engine.page_size=32"]
NAMES = ("one", "two")
MESH = ["mesh.fsdp=2"]
SAMPLING = ["task.sampling.ignore_eos=true", "task.sampling.temperature=1"]


def score(output: str) -> list[str]:
    return ["task=score", *LOADED, LOAD, "task.input=ids.jsonl", f"task.output={output}", "task.batch=4"]


def decode(output: str) -> list[str]:
    files = ["task.input=prompts.jsonl", f"task.output={output}", "task.samples=2"]
    return ["task=decode", *LOADED, LOAD, *ENGINE, *files, "task.sampling.max_tokens=5", *SAMPLING]


def teacher_logits(output: str) -> list[str]:
    data = ["data=grain", "data.path=text.jsonl", "data.eval_fraction=0.1"]
    return [
        "task=teacher_logits",
        *LOADED,
        MODEL[-1],
        LOAD,
        *data,
        "task.k=4",
        "task.shards=2",
        f"task.output={output}",
    ]


def evaluate(name: str) -> list[str]:
    """Log-likelihoods, completions and log-likelihoods again, of two checkpoints."""
    tasks = ["task.tasks=[cloze,arithmetic,plays]", "task.limit=2", "task.shots=0", "task.batch=2"]
    engine = ["task.engine.max_batch=2", "task.engine.max_context=64", "task.engine.page_size=32"]
    checkpoints = [f"checkpoint.load_parameters=outputs/{name}", "task.steps=[2,3]"]
    return ["task=eval", *LOADED, *checkpoints, *tasks, *engine, f"run.name={name}_eval"]


def grpo(name: str) -> list[str]:
    prompts = ["data=arithmetic", "data.record_type=prompts", "train.seq_len=20", "train.per_device_batch_size=4"]
    reward = ["reward=function", "reward.terms.own.function=reward_functions:vowels", "reward.workers=1"]
    updates = ["train.steps=3", "task.iterations=2", "checkpoint.every=2", "train.eval_every=2"]
    # As many completions as in a batch, so that the same programs sample them.
    updates += ["train.eval_batches=1", "task.evaluation.samples=4", "task.evaluation.temperature=1"]
    task = ["task=grpo", "task.max_tokens=4", "task.group_size=4", "task.rounds=2", f"run.name={name}"]
    return [*task, *MODEL, *ENGINE, *prompts, *reward, *updates, "task.engine.max_batch=8"]


def episodes(name: str) -> list[str]:
    """task=grpo with an environment, whose processes only process 0 has."""
    environment = ["environment=function", "environment.function=environment_functions:Echo", "environment.max_turns=3"]
    environment += ["environment.turn_tokens=3", "data.tokenizer.chat_template=lines_tools", "task.max_tokens=44"]
    fewer = ["train.seq_len=64", "train.steps=2", "train.eval_batches=0", "task.iterations=1", "task.rounds=1"]
    return last_of_each_key([*grpo(f"{name}_episodes"), *environment, *fewer, "task.engine.cache_tokens=1024"])


def run_commands(*commands: list[str]) -> None:
    """Program of each process."""
    from maxhydra import tasks

    for overrides in commands:
        resolved = compose(overrides)
        result = tasks.run(resolved.config, choices=resolved.choices, overrides=overrides, path=None)
        assert result.status == "finished", result.reason


def run(processes: int, *commands: list[str], cwd: Path, devices: int) -> str:
    """Run commands and return the stderr of process 0."""
    paths = f"{ROOT}:{ROOT / 'tests/support'}"
    settings = {"module": "tests.tasks.test_processes", "PYTHONPATH": paths}
    done = run_processes(processes, json.dumps(commands), cwd=cwd, devices=devices, timeout=600, **settings)
    return done[0].stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs of all tasks, random weights, and the completions of one process and of two."""
    folder = tmp_path_factory.mktemp("inputs")
    model = build(compose(MODEL).config.model)
    with ocp.StandardCheckpointer() as writer:
        writer.save(folder / "weights" / "params", jax.jit(model.init)(jax.random.key(7)))
    numbers = np.random.default_rng(0)
    ids = [{"ids": numbers.integers(0, 256, length).tolist(), "name": length} for length in (9, 1, 15, 5, 12)]
    write_lines(folder / "ids.jsonl", ids)
    text = (ROOT / "maxhydra/data/text/shakespeare.txt").read_text().splitlines()[300:380]
    # Of similar length, since every bucket is compiled.
    prompts = [{"prompt": line[: 9 + number], "sampling": {"seed": number}} for number, line in enumerate(text[1:4])]
    write_lines(folder / "prompts.jsonl", prompts)
    write_lines(folder / "text.jsonl", [{"text": line} for line in text])
    for processes, name in enumerate(NAMES, start=1):
        run(processes, [*decode(f"{name}.texts.jsonl"), *MESH], cwd=folder, devices=2 // processes)
    return folder


@pytest.fixture(scope="module")
def scored(folder: Path) -> Path:
    """The scores of one process and of two."""
    for processes, name in enumerate(NAMES, start=1):
        run(processes, [*score(f"{name}.scores.jsonl"), *MESH], cwd=folder, devices=2 // processes)
    return folder


@pytest.fixture(scope="module")
def more_results(folder: Path) -> Path:
    """The results of task=grpo, which scores and decodes in the same way, and of tasks that use its checkpoints."""
    for processes, name in enumerate(NAMES, start=1):
        commands = [[*command, *MESH] for command in (grpo(name), teacher_logits(name), evaluate(name))]
        run(processes, *commands, cwd=folder, devices=2 // processes)
    return folder


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def lines(path: Path) -> list[dict[str, Any]]:
    return sorted(map(json.loads, path.read_text().splitlines()), key=lambda row: (row["index"], row.get("sample")))


def documents(folder: Path) -> list[dict[str, np.ndarray]]:
    readers = [ArrayRecordReader(str(path)) for path in sorted(folder.glob("*.array_record"))]
    return [decode_arrays(content) for reader in readers for content in reader.read_all()]


def metrics(folder: Path, name: str) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row[name] for row in rows if name in row]


def compare_scores(one: Path, other: Path) -> None:
    for expected, found in zip(lines(one), lines(other), strict=True):
        np.testing.assert_allclose(found.pop("logprobs"), expected.pop("logprobs"), atol=1e-5)
        np.testing.assert_allclose(found.pop("perplexity") or 0, expected.pop("perplexity") or 0, rtol=1e-5)
        assert found == expected


def compare_numbers(found: Any, expected: Any) -> None:
    """The same JSON but for rounding errors."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            compare_numbers(found[key], value)
    else:
        assert found == pytest.approx(expected, rel=1e-4)


def benchmarks(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "outputs" / f"{name}_eval" / "eval.json").read_text())


def completions(path: Path) -> list[tuple[int, int, str]]:
    return [(row["index"], row["sample"], row["text"]) for row in lines(path)]


@pytest.mark.exhaustive
def test_scores_of_two_processes_are_those_of_one(scored: Path) -> None:
    compare_scores(scored / "one.scores.jsonl", scored / "two.scores.jsonl")


@pytest.mark.exhaustive
def test_scores_of_four_processes_are_those_of_one(scored: Path) -> None:
    run(4, [*score("four.scores.jsonl"), *MESH, "mesh.tensor=2"], cwd=scored, devices=1)
    compare_scores(scored / "one.scores.jsonl", scored / "four.scores.jsonl")


@pytest.mark.slow
def test_completions_of_two_processes_are_those_of_one(folder: Path) -> None:
    one, two = (completions(folder / f"{name}.texts.jsonl") for name in NAMES)
    assert two == one and len({text for _, _, text in one}) == 6


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["ngram", "model"])
def test_speculative_completions_of_two_processes_are_those_of_one(folder: Path, method: str) -> None:
    """Of a text that repeats: both processes choose drafts for the same calls."""
    longer = ["model.context_length=64", "task.engine.cache_tokens=512", "task.sampling.max_tokens=48"]
    longer += ["task.sampling.temperature=0", "task.sampling.repetition_penalty=0.5"]
    drafting = [f"task.engine.speculation.method={method}", "task.engine.speculation.tokens=2", "task.engine.burst=2"]
    if method == "model":
        own = [quoted(item) for item in [*LOADED, longer[0]] if item.startswith("model.")]
        settings = {"weights": "weights", "model": "tiny", "overrides": f"[{','.join(own)}]"}
        drafting += [f"task.engine.speculation.{name}={value}" for name, value in settings.items()]
    run(1, [*decode(f"plain.{method}.jsonl"), *longer, *MESH], cwd=folder, devices=2)
    printed = run(2, [*decode(f"drafted.{method}.jsonl"), *longer, *drafting, *MESH], cwd=folder, devices=1)
    assert completions(folder / f"drafted.{method}.jsonl") == completions(folder / f"plain.{method}.jsonl")
    found = re.findall(r"drafted tokens accepted, in (\d+) of (\d+) steps", printed)
    # A model that drafts for itself has no plain steps.
    assert len(found) == 1 and 0 < int(found[0][0]) < int(found[0][1]) + (method == "model")


@pytest.mark.exhaustive
def test_completions_after_a_kill_of_one_process_are_those_of_one(folder: Path) -> None:
    one = completions(folder / "one.texts.jsonl")
    output, command = folder / "killed.jsonl", [*decode("killed.jsonl"), *MESH]
    # Of an earlier attempt of this test.
    output.unlink(missing_ok=True)
    processes = start_processes(2, *command, cwd=folder)
    wait_for(lambda: output.exists() and output.stat().st_size)
    processes[1].kill()
    assert processes[0].wait(240) == EXIT_LOST
    assert 0 < len(lines(output)) < len(one), "killed too late"
    run(2, command, cwd=folder, devices=1)
    assert completions(output) == one


@pytest.mark.exhaustive
def test_teacher_logits_of_two_processes_are_those_of_one(more_results: Path) -> None:
    one, two = (documents(more_results / name) for name in NAMES)
    for expected, found in zip(one, two, strict=True):
        np.testing.assert_array_equal(found["tokens"], expected["tokens"])
        np.testing.assert_allclose(found["teacher_logits"], expected["teacher_logits"], atol=2e-3)
    assert len(one) > 50


@pytest.mark.exhaustive
def test_grpo_in_two_processes_learns_as_in_one(more_results: Path) -> None:
    for key in ("reward/mean", "answers/tokens", "loss", "eval/reward"):
        one, two = (metrics(more_results / "outputs" / name, key) for name in NAMES)
        np.testing.assert_allclose(two, one, atol=1e-5)
    assert len(set(metrics(more_results / "outputs" / "two", "loss"))) == 3


@pytest.mark.exhaustive
def test_benchmarks_of_two_processes_are_those_of_one(more_results: Path) -> None:
    one, two = (benchmarks(more_results, name) for name in NAMES)
    assert list(one) == ["2", "3"] and one["2"] != one["3"]
    compare_numbers(two, one)


@pytest.mark.exhaustive
def test_benchmarks_of_four_processes_are_those_of_one(more_results: Path) -> None:
    """Four processes evaluate the run of two; with all results in the cache, no process loads weights."""
    commands = [[*evaluate("two"), "run.name=four_eval", *MESH, "mesh.tensor=2"]] * 2
    run(4, *commands, cwd=more_results, devices=1)
    compare_numbers(benchmarks(more_results, "four"), benchmarks(more_results, "one"))


@pytest.mark.exhaustive
def test_episodes_with_an_environment_are_those_of_one_process(tmp_path: Path) -> None:
    for processes, name in enumerate(NAMES, start=1):
        run(processes, [*episodes(name), *MESH], cwd=tmp_path, devices=2 // processes)
    runs = [tmp_path / "outputs" / f"{name}_episodes" for name in NAMES]
    for key in ("reward/mean", "answers/tokens", "loss"):
        one, two = (metrics(run, key) for run in runs)
        np.testing.assert_allclose(two, one, atol=1e-5)
    assert metrics(runs[1], "environment/turns") == [3, 3]
    one, two = ((run / "rollouts" / "train-00000.jsonl").read_text().splitlines() for run in runs)
    assert [json.loads(line)["turns"] for line in two] == [json.loads(line)["turns"] for line in one]


@pytest.mark.exhaustive
def test_a_server_of_two_processes_completes_as_task_decode(folder: Path) -> None:
    """Process 0 has the server; SIGTERM to both, as from a launcher, ends both after the last request."""
    command = ["task=serve", *LOADED, LOAD, *ENGINE, *MESH, "task.port=0"]
    processes = start_processes(2, *command, cwd=folder)
    console = folder / "console.0"
    wait_for(lambda: "serving" in console.read_text())
    prompt, sampling = json.loads((folder / "prompts.jsonl").read_text().splitlines()[0]).values()
    body = {"prompt": prompt, "max_tokens": 5, "temperature": 1, "ignore_eos": True, **sampling}
    url = re.findall(r"http://\S+", console.read_text())[0] + "/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=240) as reply:
        text = json.load(reply)["choices"][0]["text"]
    assert text == completions(folder / "two.texts.jsonl")[0][2]
    for process in reversed(processes):
        process.signal(signal.SIGTERM)
    assert [process.wait(240) for process in processes] == [0, 0]


@pytest.mark.exhaustive
def test_grammars_restart_the_same_rows_in_both_processes(folder: Path) -> None:
    """Tokens that grammars verify are those of masks in every step."""
    command = ["task=serve", *LOADED, LOAD, *ENGINE, *MESH, "task.port=0"]
    texts, rejected, console = [], [], folder / "console.0"
    for burst in (1, 4):
        processes = start_processes(2, *command, f"task.engine.burst={burst}", cwd=folder)
        wait_for(lambda: "serving" in console.read_text())
        url = re.findall(r"http://\S+", console.read_text())[0]
        with ThreadPoolExecutor(6) as threads:
            texts.append(list(threads.map(partial(constrained_text, url), range(12))))
        with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics", timeout=60) as reply:
            rejected.append(re.findall(r"grammar_tokens_rejected\S* (\d+)", reply.read().decode())[0])
        for process in reversed(processes):
            process.signal(signal.SIGTERM)
        assert [process.wait(240) for process in processes] == [0, 0]
    assert texts[1] == texts[0] and all(re.fullmatch("[a-z ,.]{12}", text) for text in texts[0])
    assert rejected[0] == "0" and int(rejected[1]) > 0


def constrained_text(url: str, seed: int) -> str:
    body = {"prompt": "To be", "max_tokens": 16, "temperature": 1, "seed": seed, "guided_regex": "[a-z ,.]{12}"}
    request = urllib.request.Request(
        f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=240) as reply:
        return json.load(reply)["choices"][0]["text"]


@pytest.mark.exhaustive
def test_completions_with_images_a_video_and_audio_are_those_of_one_process(tmp_path: Path) -> None:
    """Process 0 sends pixels and audio frames; with tensor parallelism every process needs them for every token."""
    model = ["model=qwen3-omni-tiny-media", "train.seq_len=64"]
    with ocp.StandardCheckpointer() as writer:
        weights = jax.jit(build(compose(model).config.model).init)(jax.random.key(7))
        writer.save(tmp_path / "weights" / "params", jax.tree.map(lambda weight: 3 * weight, weights))
    picture(23, 17).save(tmp_path / "a.png")
    np.save(tmp_path / "v.npy", np.stack([np.asarray(frame) for frame in frames(4, 9, 21)]))
    soundfile.write(tmp_path / "c.wav", np.random.default_rng(0).uniform(-0.5, 0.5, 6400), 16000)
    media = ["task.images=[a.png]", "task.videos=[v.npy]", "task.audios=[c.wav]", "data.tokenizer.chat_template=lines"]
    engine = [*ENGINE, "task.engine.max_context=96", "task.engine.prefill_chunk=96", "mesh.tensor=2"]
    command = ["task=decode", *model, LOAD, *media, *engine, "task.prompt=What?", "task.sampling.max_tokens=12"]
    command += ["task.sampling.temperature=0", "task.sampling.ignore_eos=true"]
    one, two = (run_processes(count, *command, cwd=tmp_path, devices=2 // count)[0].stdout for count in (1, 2))
    assert two == one and len(one) > 5
    other = [*command, "task.images=[]"]
    assert run_processes(1, *other, cwd=tmp_path, devices=2)[0].stdout != one


@pytest.mark.parametrize("key", ["off_policy_steps", "max_staleness"])
def test_rollouts_concurrent_with_training_are_rejected(key: str) -> None:
    changes = ["task.rounds=1", "task.engine.deterministic=false", f"task.{key}=1"]
    config = compose(last_of_each_key([*grpo("it"), *changes])).config
    with pytest.raises(ConfigError, match=rf"task\.{key}.*several processes"):
        check(config, config.task, processes=2)


if __name__ == "__main__":
    run_commands(*json.loads(sys.argv[1]))
