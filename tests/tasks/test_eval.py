"""task=eval: the scores of lm-eval's own `hf` model, included tasks, files of users, interrupted commands."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from maxhydra.config import Config, ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.metrics import is_maximized
from maxhydra.config.schema.tasks.evaluation import EvalTask
from maxhydra.decode.open import open_prompts
from maxhydra.evals.model import CheckpointModel, RequestCache
from maxhydra.evals.report import heat_map
from maxhydra.evals.run import SUITE, Result, find_tasks, read_task, run_task
from tests.support.cli import SMALL, run, run_ok, start_silent
from tests.support.polling import wait_for
from tests.support.skips import import_optional
from tests.support.vocabularies import byte_level, save

transformers = import_optional("transformers", extra="parity")
torch = import_optional("torch", extra="parity")
lm_eval = import_optional("lm_eval", extra="eval")

QUESTIONS = [
    {"question": "To be, or not to", "choices": [" be", " sleep", " die tonight"], "answer": 0},
    {"question": "The sky is", "choices": [" green", " blue"], "answer": 1},
    {"question": "What is in a name? ", "choices": ["nothing", "a rose", "everything that we know"], "answer": 1},
    {"question": "Once more unto the", "choices": [" breach", " beach"], "answer": 0},
]
COMMON = """
output_type: {kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a tokenizer, in the format of Hugging Face."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("llama")
    settings = transformers.LlamaConfig(
        vocab_size=600,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        initializer_range=0.3,
    )
    transformers.LlamaForCausalLM(settings).save_pretrained(path)
    return save(byte_level(["<s>", "</s>"]), path, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def harness_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two lm-eval tasks on a local file."""
    path = tmp_path_factory.mktemp("tasks")
    (path / "q.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    choice = COMMON.format(kind="multiple_choice", path=path / "q.jsonl")
    choice += 'task: local_choice\ndoc_to_choice: "{{choices}}"\ndoc_to_target: answer\ntarget_delimiter: ""\n'
    choice += "metric_list: [{metric: acc}, {metric: acc_norm}]\n"
    generate = COMMON.format(kind="generate_until", path=path / "q.jsonl") + "task: local_generate\n"
    generate += 'doc_to_target: "{{choices[answer]}}"\ngeneration_kwargs: {until: ["zz"], max_gen_toks: 6}\n'
    generate += "metric_list: [{metric: bleu}]\n"
    (path / "choice.yaml").write_text(choice)
    (path / "generate.yaml").write_text(generate)
    return path


def eval_config(folder: Path, tasks: Any, *overrides: str) -> Config:
    fixed = ["task=eval", "model=from_hf", f"model.path={folder}", "train.seq_len=64", "task.engine.max_batch=4"]
    names = f"task.tasks=[{','.join(map(str, tasks))}]"
    return compose([*fixed, "model.dtypes.compute=float32", "train.progress=none", names, *overrides]).config


def open_model(config: Config, path: Path) -> CheckpointModel:
    weights = config.checkpoint.load_parameters
    assert weights is not None
    return CheckpointModel(config, open_prompts(config), RequestCache(path / "requests.jsonl"), weights=weights)


@pytest.mark.exhaustive
@pytest.mark.parity
def test_scores_equal_those_of_the_hf_model_of_lm_eval(folder: Path, harness_tasks: Path, tmp_path: Path) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from maxhydra.evals import harness

    names = ["local_choice", "local_generate"]
    config = eval_config(folder, names, f"task.harness_path={harness_tasks}")
    assert isinstance(config.task, EvalTask)
    tasks = find_tasks(config.task)
    model = open_model(config, tmp_path)
    reference = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=2)
    try:
        pairs = [(item["question"], choice) for item in QUESTIONS for choice in item["choices"]] + [("", "To be")]
        requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
        wrapped = harness.HarnessModel(model)
        expected = reference.loglikelihood(requests, disable_tqdm=True)
        for found, value in zip(wrapped.loglikelihood(requests, disable_tqdm=True), expected, strict=True):
            assert found[0] == pytest.approx(value[0], abs=1e-3) and found[1] == value[1]
        texts = [Instance("loglikelihood_rolling", {}, ("to be or not to be, " * 30,), 0)]
        (rolling,) = reference.loglikelihood_rolling(texts, disable_tqdm=True)
        assert wrapped.loglikelihood_rolling(texts)[0] == pytest.approx(rolling, rel=1e-5)
        found = harness.evaluate(model, tasks.harness, tasks.manager, config.task)
        value = lm_eval.simple_evaluate(model=reference, tasks=names, task_manager=tasks.manager, bootstrap_iters=0)
        for name, metrics in (("local_choice", ("acc", "acc_norm")), ("local_generate", ("bleu",))):
            for metric in metrics:
                assert found[name][metric] == pytest.approx(value["results"][name][f"{metric},none"])
        arguments = {"until": ["zz"], "max_gen_toks": 6}
        prompts = [Instance("generate_until", {}, (item["question"], arguments), 0) for item in QUESTIONS]
        assert wrapped.generate_until(prompts) == reference.generate_until(prompts, disable_tqdm=True)
    finally:
        model.close()


def test_included_tasks_are_valid_and_have_questions(folder: Path, tmp_path: Path) -> None:
    names = sorted(path.stem for path in SUITE.glob("*.yaml"))
    assert {"arithmetic", "cloze", "needle", "plays", "reasoning_gym"} <= {*names}
    config = eval_config(folder, names)
    assert isinstance(config.task, EvalTask)
    assert [own.name for own in find_tasks(config.task).own] == names


@pytest.mark.exhaustive
def test_own_tasks_agree_with_lm_eval_and_give_a_heat_map(folder: Path, harness_tasks: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"kind: multiple_choice\npath: {harness_tasks / 'q.jsonl'}\n")
    needle = "source: needle\nlengths: [48, 96]\ndepths: [0, 1]\ncount: 1\nmax_tokens: 4\nanswer: '(\\d+)'\n"
    (tmp_path / "long.yaml").write_text(needle)
    names = [tmp_path / "mine.yaml", tmp_path / "long.yaml", "local_choice", "plays"]
    config = eval_config(folder, names, f"task.harness_path={harness_tasks}")
    task = config.task
    assert isinstance(task, EvalTask)
    tasks, model = find_tasks(task), open_model(config, tmp_path)
    try:
        from maxhydra.evals import harness

        mine, long, plays = (
            run_task(model, read_task(own, dataclasses.replace(task, limit=4), model.prompts)) for own in tasks.own
        )
        reference = harness.evaluate(model, tasks.harness, tasks.manager, task)["local_choice"]
        assert mine.metrics["acc"] == reference["acc"] == 1 - mine.metrics["error"]
        assert long.grid.keys() == {(48, 0.0), (48, 1.0), (96, 0.0), (96, 1.0)}
        # An untrained model has about log2(600) bits per token, of 2 to 3 bytes.
        assert 2 < plays.metrics["bpb"] < 10
    finally:
        model.close()


def test_a_heat_map_has_a_line_per_depth() -> None:
    text = heat_map(Result({}, 4, {(256, 0.0): 1.0, (256, 1.0): 0.0, (512, 0.0): 0.5, (512, 1.0): 0.25}))
    lines = text.splitlines()
    assert lines[0].split() == ["depth", "256", "512"]
    assert "1.00" in lines[1] and "0.50" in lines[1] and "0.25" in lines[2] and len(lines) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: multiple_choice\nsource: needle\n", "accepted: generation"),
        ("kin: generation\n", "not an evaluation task"),
        ("[1, 2]\n", "not a mapping"),
        ("path: x.jsonl\nverifier: {kind: judge}\n", "not a verifier"),
    ],
)
def test_files_that_are_not_tasks_are_rejected(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text)
    task = EvalTask(tasks=[str(tmp_path / "x.yaml")])  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=message):
        find_tasks(task)


@pytest.mark.exhaustive
def test_a_wrong_name_is_answered_with_the_nearest_one(harness_tasks: Path) -> None:
    for name, nearest in (("cloz", "cloze"), ("helaswag", "hellaswag"), ("local_choise", "local_choice")):
        with pytest.raises(ConfigError, match=f"did you mean '{nearest}'"):
            find_tasks(EvalTask(tasks=[name], harness_path=str(harness_tasks)))  # type: ignore[call-arg]


def test_a_cache_drops_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    cache = RequestCache(path)
    cache.add("a", [-1.5, True])
    cache.close()
    path.write_bytes(path.read_bytes() + b'["b", [-2')
    cache = RequestCache(path)
    assert "a" in cache and "b" not in cache and cache["a"] == [-1.5, True]
    cache.add("b", "text")
    cache.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [["a", [-1.5, True]], ["b", "text"]]


@pytest.mark.exhaustive
def test_a_killed_command_gives_the_same_table(folder: Path, tmp_path: Path) -> None:
    fixed = ["task=eval", "model=from_hf", f"model.path={folder}", "train.seq_len=64", "model.dtypes.compute=float32"]
    command = [*fixed, "task.tasks=[cloze,arithmetic]", "task.limit=24", "task.batch=2", "task.engine.max_batch=4"]
    whole = run_ok(*command, "run.name=whole", cwd=tmp_path)
    requests = tmp_path / "outputs" / "killed" / "requests.jsonl"
    process = start_silent(*command, "run.name=killed", cwd=tmp_path)
    wait_for(lambda: requests.exists() and requests.read_bytes().count(b"\n") > 5)
    process.kill()
    process.wait()
    before = requests.read_bytes().count(b"\n")
    resumed = run_ok(*command, "run.name=killed", cwd=tmp_path)
    results = [(tmp_path / "outputs" / name / "eval.json").read_text() for name in ("whole", "killed")]
    assert results[0] == results[1]
    assert 0 < before < requests.read_bytes().count(b"\n")
    rows = [[line for line in done.stdout.splitlines() if "acc" in line] for done in (whole, resumed)]
    assert rows[0] == rows[1] and len(rows[0]) == 3
    metrics = json.loads((tmp_path / "outputs" / "killed" / "run.json").read_text())["metrics"]
    assert metrics["eval/cloze/acc"] == pytest.approx(1 - metrics["eval/cloze/error"])
    listed = run_ok("runs", "list", "--columns", "eval/cloze/acc", cwd=tmp_path)
    assert f"{metrics['eval/cloze/acc']:.3f}"[:4] in listed.stdout


@pytest.mark.exhaustive
def test_several_checkpoints_of_a_run(tmp_path: Path) -> None:
    train = [*SMALL, "train.steps=2", "checkpoint.every=1", "optimizer.schedule.warmup_steps=0", "run.name=base"]
    run_ok(*train, cwd=tmp_path)
    command = [*SMALL[:6], "task=eval", "checkpoint.load_parameters=outputs/base", "task.tasks=[plays]", "task.limit=2"]
    done = run_ok(*command, "task.steps=[1,2]", "run.name=e", cwd=tmp_path)
    results = json.loads((tmp_path / "outputs" / "e" / "eval.json").read_text())
    assert results.keys() == {"1", "2"} and results["1"] != results["2"]
    assert "bpb" in done.stdout
    wrong = run(*command, "task.steps=[3]", "run.name=f", cwd=tmp_path)
    assert wrong.returncode == 2 and "accepted: 1, 2" in wrong.stderr


def test_directions_of_metrics_are_those_of_lm_eval() -> None:
    import lm_eval.api.metrics  # noqa: F401 (fills the registry)
    from lm_eval.api.registry import HIGHER_IS_BETTER_REGISTRY

    # `bypass` computes nothing.
    expected = {name: is_larger for name, is_larger in HIGHER_IS_BETTER_REGISTRY.items() if name != "bypass"}
    assert len(expected) > 10
    assert {name: is_maximized(f"eval/task/{name}") for name in expected} == expected
    assert is_maximized("eval/gsm8k/exact_match,strict-match") and not is_maximized("eval/plays/bpb")
