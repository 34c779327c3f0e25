"""Inference tasks and task=grpo in several processes, on a mesh that spans them, against one process.

Commands of a test run one after the other in the same processes, which saves most of their time.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from array_record.python.array_record_module import ArrayRecordReader

from maxhydra.config.compose.composer import compose
from maxhydra.data.formats.payload import decode_arrays
from maxhydra.model import build
from tests.support.cli import ROOT, SMALL, run_processes

MODEL = [*SMALL, "model.num_heads=4", "model.num_kv_heads=4", "train.per_device_batch_size=2"]
LOAD = "checkpoint.load_parameters=weights"
ENGINE = ["task.engine.max_batch=2", "task.engine.cache_tokens=256", "task.engine.page_size=32"]


NAMES = ("one", "two")
SAMPLING = ["task.sampling.ignore_eos=true", "task.sampling.temperature=1"]


def score(output: str) -> list[str]:
    return ["task=score", *MODEL, LOAD, "task.input=ids.jsonl", f"task.output={output}", "task.batch=4"]


def decode(output: str) -> list[str]:
    files = ["task.input=prompts.jsonl", f"task.output={output}", "task.samples=2", "task.logprobs=1"]
    return ["task=decode", *MODEL, LOAD, *ENGINE, *files, "task.sampling.max_tokens=5", *SAMPLING]


def teacher_logits(output: str) -> list[str]:
    data = ["data=grain", "data.path=text.jsonl", "data.eval_fraction=0.1"]
    return ["task=teacher_logits", *MODEL, LOAD, *data, "task.k=4", "task.shards=2", f"task.output={output}"]


def grpo(name: str) -> list[str]:
    prompts = ["data=arithmetic", "data.record_type=prompts", "train.seq_len=20", "train.per_device_batch_size=2"]
    reward = ["reward=function", "reward.terms.own.function=reward_functions:vowels", "reward.workers=1"]
    updates = ["train.steps=3", "task.kl.beta=0.01", "task.iterations=2", "checkpoint.every=2", "train.eval_every=2"]
    # As many completions as in a batch, so that the same programs sample them.
    updates += ["train.eval_batches=1", "task.evaluation.samples=4", "task.evaluation.temperature=1"]
    task = ["task=grpo", "task.max_tokens=4", "task.group_size=4", "task.rounds=2", f"run.name={name}"]
    return [*task, *MODEL, *ENGINE, *prompts, *reward, *updates, "task.engine.max_batch=8"]


def run_commands(*commands: list[str]) -> None:
    """Program of each process."""
    from maxhydra import tasks

    for overrides in commands:
        resolved = compose(overrides)
        result = tasks.run(resolved.config, choices=resolved.choices, overrides=overrides, path=None)
        assert result.status == "finished", result.reason


def run(processes: int, *commands: list[str], cwd: Path, devices: int) -> None:
    paths = f"{ROOT}:{ROOT / 'tests/support'}"
    settings = {"module": "tests.tasks.test_processes", "PYTHONPATH": paths}
    run_processes(processes, json.dumps(commands), cwd=cwd, devices=devices, timeout=600, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs of all tasks, and random weights."""
    folder = tmp_path_factory.mktemp("inputs")
    model = build(compose(MODEL).config.model)
    with ocp.StandardCheckpointer() as writer:
        writer.save(folder / "weights" / "params", jax.jit(model.init)(jax.random.key(7)))
    numbers = np.random.default_rng(0)
    ids = [{"ids": numbers.integers(0, 256, length).tolist(), "name": length} for length in (9, 1, 30, 17, 5)]
    (folder / "ids.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ids))
    lines = (ROOT / "maxhydra/data/text/shakespeare.txt").read_text().splitlines()[300:380]
    # Of similar length, since every bucket is compiled.
    prompts = [{"prompt": line[: 9 + number]} for number, line in enumerate(lines[1:4])]
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in prompts))
    (folder / "text.jsonl").write_text("".join(f"{json.dumps({'text': line})}\n" for line in lines))
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return sorted(map(json.loads, path.read_text().splitlines()), key=lambda row: (row["index"], row.get("sample")))


def documents(folder: Path) -> list[dict[str, np.ndarray]]:
    readers = [ArrayRecordReader(str(path)) for path in sorted(folder.glob("*.array_record"))]
    return [decode_arrays(content) for reader in readers for content in reader.read_all()]


def metrics(folder: Path, name: str) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row[name] for row in rows if name in row]


@pytest.mark.slow
def test_two_processes_give_the_results_of_one(folder: Path) -> None:
    """The model is sharded over both processes: by fsdp across them, by tensor within each."""
    mesh = ["mesh.fsdp=2", "mesh.tensor=2"]
    for processes, name in ((1, "one"), (2, "two")):
        commands = [score(f"{name}.scores.jsonl"), decode(f"{name}.texts.jsonl"), teacher_logits(name), grpo(name)]
        run(processes, *[[*command, *mesh] for command in commands], cwd=folder, devices=4 // processes)
    for one, two in zip(lines(folder / "one.scores.jsonl"), lines(folder / "two.scores.jsonl"), strict=True):
        np.testing.assert_allclose(two.pop("logprobs"), one.pop("logprobs"), atol=1e-5)
        np.testing.assert_allclose(two.pop("perplexity") or 0, one.pop("perplexity") or 0, rtol=1e-5)
        assert two == one
    texts = [
        [(row["index"], row["sample"], row["text"]) for row in lines(folder / f"{name}.texts.jsonl")] for name in NAMES
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 6
    for one, two in zip(*(documents(folder / name) for name in NAMES), strict=True):
        np.testing.assert_array_equal(two["tokens"], one["tokens"])
        np.testing.assert_allclose(two["teacher_logits"], one["teacher_logits"], atol=2e-3)
    for key in ("reward/mean", "answers/tokens", "loss", "kl", "eval/reward"):
        one, two = (metrics(folder / "outputs" / name, key) for name in NAMES)
        np.testing.assert_allclose(two, one, atol=1e-5)
    assert len(set(metrics(folder / "outputs" / "two", "loss"))) == 3


if __name__ == "__main__":
    run_commands(*json.loads(sys.argv[1]))
