"""A run that resumes with a changed input or config is rejected, and resumes when a key accepts the change.

The fast tests prepare sessions without training. The slow ones train every combination as a user would.
"""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from maxhydra.config import Config, ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.checkpoint import Checkpoint
from maxhydra.config.schema.quantization import Adapter
from maxhydra.config.schema.run import INPUT_KINDS
from maxhydra.config.serialize import to_yaml, with_overrides
from maxhydra.convert.adapter_lineage import find_adapter_lineage
from maxhydra.record import RunDirectory
from maxhydra.tasks._resume import Session, prepare_session
from tests.support.cli import ROOT, SMALL, facts, losses, parameter_hash, run, run_ok
from tests.support.vocabularies import MARKS, byte_level, save

CONVERSATION = '{"messages": [{"role": "user", "content": "%d?"}, {"role": "assistant", "content": "%d."}]}\n'
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"
FORMAT = "def same(record):\n    return dict(record)\n"
REWARD = "def score(text, **known):\n    return float(len(text) % 2)\n"

CHAT = ["data=grain", "data.path=chat.jsonl", "data.record_type=chat", "data.tokenizer.chat_template=chat.jinja"]
CHAT += ["data.formatting=formats_of_test:same"]
TOKENS = ["data.tokenizer.kind=hf", "data.tokenizer.path=words", "model.vocab_size=600"]
PROMPTS = ["data=arithmetic", "data.record_type=prompts", "reward=function"]
PROMPTS += ["reward.terms.own.function=rewards_of_test:score", "task.kl.beta=0.1"]
# Every kind of input, in a task that has it.
TASKS = {
    "sft": ["task=sft", "adapter=lora", "checkpoint.load_parameters=outputs/base", *CHAT],
    "distill": ["task=distill", "task.teacher.weights=outputs/teacher", "data=grain", "data.path=texts.jsonl", *TOKENS],
    "grpo": ["task=grpo", "checkpoint.load_parameters=outputs/base", *PROMPTS],
    "dpo": ["task=dpo", "checkpoint.load_parameters=outputs/base", "data=grain", "data.path=pairs.jsonl"],
}
TASKS["dpo"] += ["data.record_type=preference"]
TASKS["episodes"] = [*TASKS["grpo"], "environment=function", "environment.function=worlds_of_test:World"]
# The module is imported with the config, so only one case has it.
TASKS["own_loss"] = [*TASKS["sft"], "train.loss.function=losses_of_test:loss"]


def change_weights(name: str) -> Callable[[Path], None]:
    """The run has trained on and its earlier checkpoint is gone."""

    def change(cwd: Path) -> None:
        (checkpoint,) = (cwd / "outputs" / name / "checkpoints").iterdir()
        newer = checkpoint.with_name(str(int(checkpoint.name) + 10))
        checkpoint.rename(newer)
        change_arrays(newer)

    return change


def change_arrays(checkpoint: Path) -> None:
    """Other content with a valid manifest, or without one, as a later step would have."""
    (checkpoint / "params" / "array").write_bytes(os.urandom(64))


def rewrite(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(cwd: Path) -> None:
        text = (cwd / name).read_text()
        assert old in text
        (cwd / name).write_text(text.replace(old, new, 1))

    return change


def append_text(name: str, text: str) -> Callable[[Path], None]:
    def change(cwd: Path) -> None:
        with (cwd / name).open("a") as file:
            file.write(text)

    return change


def train_tokenizer(cwd: Path) -> None:
    """Another tokenizer in the same folder."""
    save(byte_level(MARKS["chatml"], vocab_size=500), cwd / "words")


APPENDED = append_text("chat.jsonl", CONVERSATION % (9, 9))
# Kind, task, config key, change, and what the message says about it.
CASES = [
    ("base", "sft", "checkpoint.load_parameters", change_weights("base"), "it was step 30 of"),
    ("teacher", "distill", "task.teacher.weights", change_weights("teacher"), "and is now step 40 of"),
    ("reference", "grpo", "checkpoint.load_parameters", change_weights("base"), "it was step 30 of"),
    ("reference", "dpo", "checkpoint.load_parameters", change_weights("base"), "it was step 30 of"),
    ("data", "sft", "data.path", APPENDED, "were appended to chat.jsonl"),
    ("data", "sft", "data.path", rewrite("chat.jsonl", "1?", "2?"), "chat.jsonl was replaced by other content"),
    ("data", "sft", "data.formatting", append_text("formats_of_test.py", "# new\n"), "appended to formats_of_test.py"),
    (
        "tokenizer",
        "distill",
        "data.tokenizer.path",
        train_tokenizer,
        "tokenizer.json was replaced",
    ),
    ("template", "sft", "data.tokenizer.chat_template", rewrite("chat.jinja", "<{{", "[{{"), "chat.jinja was replaced"),
    (
        "reward",
        "grpo",
        "reward.terms.own.function",
        rewrite("rewards_of_test.py", "% 2", "% 3"),
        "rewards_of_test.py",
    ),
    (
        "environment",
        "episodes",
        "environment.function",
        append_text("worlds_of_test.py", "# new\n"),
        "worlds_of_test.py",
    ),
    ("code", "own_loss", "train.loss.function", append_text("losses_of_test.py", "# new\n"), "losses_of_test.py"),
]
IDS = [f"{kind}-{task}-{number}" for number, (kind, task, *_) in enumerate(CASES)]


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all inputs. Weights are folders that are never loaded."""
    write_inputs(tmp_path)
    for name in ("base", "teacher"):
        write_weights(tmp_path / "outputs" / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def write_inputs(folder: Path) -> None:
    (folder / "chat.jsonl").write_text("".join(CONVERSATION % (n, n) for n in range(200)))
    (folder / "chat.jinja").write_text(TEMPLATE)
    texts = [json.dumps({"text": f"the number {n} of the text"}) for n in range(200)]
    (folder / "texts.jsonl").write_text("\n".join(texts) + "\n")
    pairs = [json.dumps({"prompt": f"{n} ", "chosen": "yes", "rejected": "no"}) for n in range(200)]
    (folder / "pairs.jsonl").write_text("\n".join(pairs) + "\n")
    (folder / "formats_of_test.py").write_text(FORMAT)
    (folder / "rewards_of_test.py").write_text(REWARD)
    (folder / "worlds_of_test.py").write_text("class World: ...\n")
    (folder / "losses_of_test.py").write_text("def loss(model, sharder, train): ...\n")
    save(tokenizer(), folder / "words")


@functools.cache
def tokenizer() -> Tokenizer:
    return byte_level(MARKS["chatml"])


def write_weights(run_path: Path) -> None:
    (run_path / "checkpoints" / "30" / "params").mkdir(parents=True)
    change_arrays(run_path / "checkpoints" / "30")


def config_of(task: str, *overrides: str) -> Config:
    return with_overrides(composed(task), list(overrides)) if overrides else composed(task)


@functools.cache
def composed(task: str) -> Config:
    return compose(TASKS[task]).config


def accepting(config: Config, *kinds: str) -> Config:
    return dataclasses.replace(config, run=dataclasses.replace(config.run, accept_changed_inputs=list(kinds)))


def prepare(config: Config, devices: int = 1) -> Session:
    return prepare_session(config, RunDirectory("outputs/it"), devices=devices, processes=1)


def train(config: Config, devices: int = 1) -> Session:
    """Record a session that has saved a checkpoint."""
    session, folder = prepare(config, devices), RunDirectory("outputs/it")
    folder.start(to_yaml(config), session.facts)
    folder.finish("finished")
    (folder.checkpoints / "4").mkdir(parents=True, exist_ok=True)
    return session


@pytest.mark.slow
@pytest.mark.default_cases(
    "base-sft-0", "data-sft-5", "tokenizer-distill-7", "environment-episodes-10", "code-own_loss-11"
)
@pytest.mark.parametrize(("kind", "task", "key", "change", "message"), CASES, ids=IDS)
def test_a_changed_input_is_named_and_can_be_accepted(
    kind: str, task: str, key: str, change: Callable[[Path], None], message: str, cwd: Path
) -> None:
    config = config_of(task)
    first = train(config)
    assert prepare(config).facts["inputs"] == first.facts["inputs"], "unchanged"
    change(cwd)
    with pytest.raises(ConfigError) as error:
        prepare(config)
    (problem,) = error.value.problems
    assert problem.path == key and message in problem.reason
    assert f"run.accept_changed_inputs=[{kind}]" in problem.hint
    with pytest.raises(ConfigError):
        prepare(accepting(config, *(other for other in INPUT_KINDS if other != kind)))
    (accepted,) = train(accepting(config, kind)).facts["accepted_changes"]
    assert accepted["session"] == 2 and kind in accepted["change"] and message in accepted["change"]
    assert "accepted_changes" not in prepare(config).facts, "the new content is recorded"
    assert facts(cwd / "outputs/it")["accepted_changes"] == [accepted]


def test_every_kind_of_input_is_tried() -> None:
    assert {kind for kind, *_ in CASES} == set(INPUT_KINDS)


@pytest.mark.slow
def test_touched_and_moved_files_are_unchanged(cwd: Path) -> None:
    train(config_of("sft"))
    os.utime(cwd / "chat.jsonl", (1, 1))
    os.utime(cwd / "chat.jinja", (1, 1))
    prepare(config_of("sft"))
    (cwd / "chat.jsonl").rename(cwd / "moved.jsonl")
    prepare(config_of("sft", "data.path=moved.jsonl"))
    shutil.move(cwd / "outputs/base", cwd / "elsewhere")
    session = prepare(config_of("sft", "data.path=moved.jsonl", "checkpoint.load_parameters=elsewhere"))
    assert session.config.checkpoint.load_parameters == str(cwd / "elsewhere/checkpoints/30")


@pytest.mark.slow
def test_a_base_that_trains_on_is_loaded_at_its_pinned_step(cwd: Path) -> None:
    first = train(config_of("sft"))
    assert first.config.checkpoint.load_parameters == str(cwd / "outputs/base/checkpoints/30")
    shutil.copytree(cwd / "outputs/base/checkpoints/30", cwd / "outputs/base/checkpoints/40")
    change_arrays(cwd / "outputs/base/checkpoints/40")
    assert prepare(config_of("sft")).config == first.config
    lineage = find_adapter_lineage("checkpoint.load_parameters", "outputs/it")
    assert lineage is not None and lineage.base == str(cwd / "outputs/base/checkpoints/30")
    # Its content has changed in place.
    change_arrays(cwd / "outputs/base/checkpoints/30")
    with pytest.raises(ConfigError, match=r"it was step 30 of .*, and is now step 40"):
        prepare(config_of("sft"))
    with pytest.raises(ConfigError, match=r"have changed: it was step 30 of .*, and is now step 40"):
        find_adapter_lineage("checkpoint.load_parameters", "outputs/it")


@pytest.mark.slow
@pytest.mark.default_cases("format")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"run\.json: is not JSON"),
        ('{"inputs": 5}', r"run\.json: has no 'status'"),
        ('{"format": 99, "maxhydra": "7.0"}', r"run\.json: has format 99.*install maxhydra 7\.0"),
    ],
    ids=["text", "facts", "format"],
)
def test_the_base_of_an_adapter_is_unknown_without_a_readable_run_json(cwd: Path, content: str, message: str) -> None:
    train(config_of("sft"))
    (cwd / "outputs/it/run.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        find_adapter_lineage("checkpoint.load_parameters", "outputs/it")


def test_initial_weights_are_not_needed_again_once_a_run_has_its_own(cwd: Path) -> None:
    config = dataclasses.replace(config_of("sft"), adapter=Adapter())
    train(config)
    shutil.rmtree(cwd / "outputs/base")
    prepare(config)
    with pytest.raises(ConfigError, match="outputs/teacher"):
        prepare(dataclasses.replace(config, checkpoint=Checkpoint(load_parameters="outputs/teacher")))
    with pytest.raises(ConfigError, match="it was outputs/base"):
        prepare(dataclasses.replace(config, checkpoint=Checkpoint()))


@pytest.mark.slow
def test_an_accepted_reference_discards_the_cached_log_probs(cwd: Path) -> None:
    train(config_of("dpo"))
    cache = cwd / "outputs/it/reference/0.logprobs"
    cache.parent.mkdir()
    cache.touch()
    shutil.rmtree(cwd / "outputs/it/checkpoints")
    change_weights("base")(cwd)
    with pytest.raises(ConfigError, match="has changed since"):
        prepare(config_of("dpo"))
    assert cache.exists()
    prepare(config_of("dpo", "run.accept_changed_inputs=[reference]"))
    assert not cache.exists()


@pytest.mark.slow
def test_a_run_without_results_starts_over(cwd: Path) -> None:
    train(config_of("sft"))
    shutil.rmtree(cwd / "outputs/it/checkpoints")
    append_text("chat.jsonl", CONVERSATION % (9, 9))(cwd)
    session = prepare(config_of("sft", "run.seed=4"))
    assert session.config.run.seed == 4 and "accepted_changes" not in session.facts


def test_a_run_of_an_earlier_version_has_no_record_to_compare(cwd: Path) -> None:
    train(config_of("sft"))
    path = cwd / "outputs/it/run.json"
    known = {name: fact for name, fact in facts(path.parent).items() if name not in ("inputs", "sequences_per_step")}
    path.write_text(json.dumps(known))
    append_text("chat.jsonl", CONVERSATION % (9, 9))(cwd)
    assert prepare(config_of("sft")).facts["inputs"].keys() == {"base", "data", "template"}


@pytest.mark.slow
def test_another_source_is_one_problem_and_one_key_accepts_it(cwd: Path) -> None:
    train(config_of("distill"))
    other = [option for option in TASKS["distill"] if option != "data.path=texts.jsonl"]
    other += ["data=text", "data.path=words.txt"]
    (cwd / "words.txt").write_text("words\n" * 1000)
    with pytest.raises(ConfigError) as error:
        prepare(compose(other).config)
    assert {problem.path for problem in error.value.problems} == {"data.source"}
    accepted = prepare(compose([*other, "run.accept_changed_config=[data.source]"]).config).facts["accepted_changes"]
    assert [entry["change"] for entry in accepted] == ["data.source grain -> text"]


@pytest.mark.slow
def test_the_batch_over_all_devices_stays(cwd: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(config_of("sft", "train.per_device_batch_size=8"), devices=1)
    with caplog.at_level("INFO", "maxhydra"):
        prepare(config_of("sft", "train.per_device_batch_size=1", "train.grad_accum=2"), devices=4)
    assert "changed since the last session: " in caplog.text and "train.grad_accum 1 -> 2" in caplog.text
    with pytest.raises(ConfigError, match=r"makes 32.* sequences per step .* but the run has used 8"):
        prepare(config_of("sft", "train.per_device_batch_size=8"), devices=4)
    key = "run.accept_changed_config=[train.per_device_batch_size]"
    assert prepare(config_of("sft", "train.per_device_batch_size=8", key), devices=4).facts["accepted_changes"]


@pytest.mark.slow
def test_a_new_run_has_the_model_of_the_run_whose_weights_it_loads(cwd: Path) -> None:
    """Weights of the same shapes with another activation or RoPE would load without an error."""
    trained = dataclasses.replace(config_of("sft"), adapter=Adapter(), checkpoint=Checkpoint())
    folder = RunDirectory("outputs/base")
    folder.start(to_yaml(trained), {})
    folder.finish("finished")
    theta = "model.kinds.layer.attention.rope.theta"
    changed = ["model.kinds.layer.mlp.activation=gelu", f"{theta}=500000", "model.dropout=0.1"]
    with pytest.raises(ConfigError) as error:
        prepare(config_of("sft", *changed))
    assert {problem.path for problem in error.value.problems} == {"model.kinds.layer.mlp.activation", theta}
    assert f"is 10000.0 in the run of checkpoint.load_parameters={cwd / 'outputs/base'}" in str(error.value)
    prepare(config_of("sft", changed[1], f"run.accept_changed_config=[{theta}]"))


@pytest.mark.slow
def test_unknown_names_are_rejected(cwd: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"contains an unknown kind\s+accepted: base, teacher, .*\s+did you mean 'data'"
    ):
        config_of("sft", "run.accept_changed_inputs=[dta]")
    with pytest.raises(ConfigError, match=r"did you mean 'run\.seed'"):
        prepare(config_of("sft", "run.accept_changed_config=[run.sed]"))


# The same as a user would do it, with training.

SIZES = [*SMALL, "model.vocab_size=600", "optimizer/schedule=constant", "train.eval_batches=0", "checkpoint.every=2"]
GROUPS = ["train.seq_len=20", "task.max_tokens=8", "task.group_size=4", "task.engine.max_batch=16"]
GROUPS += ["task.engine.cache_tokens=1024", "train.per_device_batch_size=16"]
RUNS = {
    "sft": [*TASKS["sft"], *SIZES, "data.packing.overlong=truncate"],
    "grpo": [*TASKS["grpo"], *SIZES, *GROUPS],
}
TRAIN_BASE = [*SIZES, "data=synthetic", "checkpoint.keep=1", "run.name=base"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with inputs, a run whose weights others load, and the first half of a run of each task."""
    folder = tmp_path_factory.mktemp("trained")
    write_inputs(folder)
    run_ok(*TRAIN_BASE, "train.steps=2", cwd=folder)
    for task, command in RUNS.items():
        done = start(command, f"half_{task}", folder, steps=2)
        assert done.returncode == 0, done.stderr
    return folder


def start(command: list[str], name: str, folder: Path, *more: str, steps: int) -> subprocess.CompletedProcess[str]:
    path = f"{ROOT}:{folder}"
    return run(*command, f"run.name={name}", f"train.steps={steps}", *more, cwd=folder, PYTHONPATH=path)


def train_base(folder: Path) -> None:
    """Train the run on, which replaces its only checkpoint."""
    run_ok(*TRAIN_BASE, "train.steps=4", cwd=folder)


TRAIN_ON = {"base": train_base, "reference": train_base}


@pytest.mark.exhaustive
@pytest.mark.parametrize("task", RUNS)
def test_a_trained_run_with_changed_inputs(task: str, trained: Path, tmp_path: Path) -> None:
    """All inputs change at once. That each is compared and accepted alone is tested above, without training."""
    changed: dict[str, tuple[str, Callable[[Path], None]]] = {}
    for kind, of, key, change, _ in CASES:
        if of == task:
            changed.setdefault(kind, (key, change))
    shutil.copytree(trained, tmp_path / "before")
    folder = trained / f"outputs/half_{task}"
    try:
        for kind, (_, change) in changed.items():
            TRAIN_ON.get(kind, change)(trained)
        before = contents(folder)
        done = start(RUNS[task], folder.name, trained, steps=4)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        for kind, (key, _) in changed.items():
            assert f"{key}=" in done.stderr and f"run.accept_changed_inputs=[{kind}]" in done.stderr, done.stderr
        assert contents(folder) == before, "a rejected command leaves the run as it was"
        done = start(RUNS[task], folder.name, trained, f"run.accept_changed_inputs=[{','.join(changed)}]", steps=4)
        assert done.returncode == 0 and "resuming from step 2" in done.stderr, done.stderr
        for kind, (key, _) in changed.items():
            assert f"accepted: {kind} ({key}=" in done.stderr, done.stderr
        assert list(losses(folder)) == [1, 2, 3, 4]
    finally:
        shutil.rmtree(trained)
        (tmp_path / "before").rename(trained)


@pytest.mark.exhaustive
def test_an_adapter_keeps_its_base_while_that_trains_on(trained: Path, tmp_path: Path) -> None:
    """Resuming, and converting the finished run, load the step of the base that the run started from."""
    first, later = (trained / "outputs" / name for name in ("first", "later"))
    for folder, steps in ((first, 2), (later, 3)):
        run_ok(*TRAIN_BASE, f"train.steps={steps}", "checkpoint.keep=3", cwd=trained)
        shutil.copytree(trained / "outputs/half_sft", folder)
        done = start(RUNS["sft"], folder.name, trained, steps=4)
        assert done.returncode == 0 and "resuming from step 2" in done.stderr, done.stderr
        convert = ["task=convert", *SIZES[:6], "model.vocab_size=600", "checkpoint.load_parameters=outputs/first"]
        run_ok(*convert, f"task.output=merged_{folder.name}", cwd=trained)
    assert losses(later) == losses(first) and parameter_hash(later, 4) == parameter_hash(first, 4)
    assert facts(later)["inputs"]["base"]["checkpoint.load_parameters"]["step"] == 2
    before, after = ((trained / f"merged_{name}" / "model.safetensors").read_bytes() for name in ("first", "later"))
    assert before == after


@pytest.mark.exhaustive
def test_a_rejected_command_leaves_the_run_as_it_was(trained: Path) -> None:
    folder = trained / "outputs/base"
    before = contents(folder)
    done = run(*TRAIN_BASE, "train.steps=4", "model.kinds.layer.mlp.activation=gelu", cwd=trained)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "model.kinds.layer.mlp.activation=gelu: was silu in the last session of this run" in done.stderr
    assert before == contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.*") if path.name != "log.txt"}


@pytest.mark.slow
def test_a_session_that_could_not_start_does_not_change_the_run(cwd: Path) -> None:
    """It was accepted, but something else is wrong, such as too little memory for its batch."""
    train(config_of("sft"))
    other = config_of("sft", "run.seed=4", "run.accept_changed_config=[run.seed]", "run.accept_changed_inputs=[data]")
    APPENDED(cwd)
    session, folder = prepare(other), RunDirectory("outputs/it")
    folder.start(to_yaml(other), session.facts)
    folder.withdraw("too large")
    with pytest.raises(ConfigError, match=r"data\.path"):
        prepare(config_of("sft"))
    prepare(config_of("sft", "run.accept_changed_inputs=[data]"))
