"""Every experiment and every debug overlay runs, with a model small enough for a test."""

import json
import re
from pathlib import Path

import pytest

from tests.support.cli import ROOT, SMALL, facts, losses, run_ok

# tests/tasks/test_tutorials.py runs these.
IN_TUTORIALS = {
    name
    for page in (ROOT / "docs" / "tutorials").glob("*.md")
    for name in re.findall(r"^\$ maxhydra experiment=([\w.-]+) .*train\.steps=", page.read_text(), re.MULTILINE)
}
EXPERIMENTS = sorted({path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml")} - IN_TUTORIALS)
# overfit has a separate test, and every experiment runs with one_step.
OVERLAYS = sorted({path.stem for path in (ROOT / "conf" / "debug").glob("*.yaml")} - {"overfit", "one_step"})
SIZES = [override for override in SMALL if override.startswith(("model.", "train.seq_len"))]
# Sizes that other models set and the small one must not inherit.
SIZES += ["model.dtypes.compute=float32", "model.vocab_size=320", "model.context_length=64", "train.loss_chunk=0"]


# Inputs of experiments that do not exist in a test, or that a small model does not support.
INSTEAD = {
    "llama3.1-8b_text": ["data.path=text.txt"],
    "smollm2_lora": [
        *("checkpoint.load_parameters=null", "data.tokenizer.kind=byte", "data.tokenizer.path=null"),
        "data.tokenizer.chat_template=lines",
    ],
}
INSTEAD["smollm2_grpo"] = [
    *INSTEAD["smollm2_lora"],
    *("model.context_length=256", "train.seq_len=192", "train.per_device_batch_size=8", "task.max_tokens=8"),
]
RANDOM = ["checkpoint.load_parameters=null", "data.tokenizer.kind=byte", "data.tokenizer.path=null"]
TEXTS = [*RANDOM, "data.path=texts.jsonl", "data.record_type=text", "train.grad_accum=1"]
CHAT = [*RANDOM, "data.tokenizer.chat_template=lines"]
INSTEAD["llama3.2-1b_pretrain"] = TEXTS
INSTEAD["llama3.2-1b_continue"] = [
    *RANDOM,
    *(f"data.sources.{name}.path=texts.jsonl" for name in ("domain", "general")),
    *(f"data.sources.{name}.record_type=text" for name in ("domain", "general")),
    "train.grad_accum=1",
]
INSTEAD["llama3.2-1b_distill"] = [
    *TEXTS,
    *("task.teacher.weights=outputs/llama3.2-1b_pretrain", "task.teacher.model=null"),
]
INSTEAD["llama3.1-8b_lora"] = [*CHAT, "data.path=chat.jsonl"]
INSTEAD["llama3.1-8b_dpo"] = [*CHAT, "data.path=pairs.jsonl", "train.grad_accum=1"]
INSTEAD["llama3.2-1b_grpo"] = [
    *(override for override in INSTEAD["smollm2_grpo"] if "batch_size" not in override),
    *("train.per_device_batch_size=8", "train.grad_accum=1", "task.engine.max_context=256"),
    *("task.engine.max_batch=8", "task.engine.cache_tokens=4096"),
]
# A tool call is longer than the sequences of the others.
INSTEAD["calculator_sft"] = ["model.context_length=128", "train.seq_len=112", "train.per_device_batch_size=8"]
INSTEAD["calculator_grpo"] = INSTEAD["calculator_sft"]
# Images take more tokens than the sequences of the others have.
INSTEAD["shapes_sft"] = ["train.seq_len=48"]
INSTEAD["tones_sft"] = ["train.seq_len=32"]
# A run of another experiment that one begins with.
BEFORE = re.compile(r"(?:\$\{run\.outputs\}|=outputs)/([\w.-]+)")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experiments")
    (folder / "text.txt").write_text("to be or not to be, that is the question\n" * 400)
    messages = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
    pair = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    records = {"texts": {"text": "to be or not to be"}, "chat": {"messages": messages}, "pairs": pair}
    for name, record in records.items():
        (folder / f"{name}.jsonl").write_text(f"{json.dumps(record)}\n" * 200)
    return folder


def run_experiment(name: str, here: Path) -> Path:
    """The folder of its run, made after those that it needs, each once."""
    folder = here / "outputs" / name
    if not folder.exists():
        inputs = [(ROOT / "conf/experiment" / f"{name}.yaml").read_text(), *INSTEAD.get(name, [])]
        for needed in BEFORE.findall("\n".join(inputs)):
            run_experiment(needed, here)
        # A run of one step saves no checkpoint by default, and later experiments need one.
        saved = ["debug=one_step", "checkpoint.mode=synchronous", f"run.name={name}"]
        run_ok(f"experiment={name}", *SIZES, *INSTEAD.get(name, []), *saved, cwd=here)
    return folder


@pytest.mark.slow
@pytest.mark.default_cases("shakespeare")
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs(name: str, here: Path) -> None:
    run = facts(run_experiment(name, here))
    assert run["status"] == "finished"
    assert run["choices"]["experiment"] == name


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OVERLAYS)
def test_every_overlay_runs(name: str, tmp_path: Path) -> None:
    run_ok(*SIZES, "train.steps=3", f"debug={name}", "run.name=it", cwd=tmp_path)
    assert facts(tmp_path / "outputs" / "it")["status"] == "finished"


@pytest.mark.exhaustive
def test_overfit_fits_its_batch(tmp_path: Path) -> None:
    """One batch of 8 x 32 bytes, learned by heart: the loss falls far under what text in general allows."""
    run_ok(*SIZES, "debug=overfit", "train.steps=150", "train.per_device_batch_size=2", "run.name=it", cwd=tmp_path)
    assert facts(tmp_path / "outputs" / "it")["status"] == "finished"
    seen = losses(tmp_path / "outputs" / "it")
    assert seen[150] < 1.0 < 5.0 < seen[1]
