"""Runs evaluation tasks on a model: finds them by name, asks the questions, and computes metrics."""

import dataclasses
import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError, safe_load

from maxhydra.config import ConfigError, Problem
from maxhydra.config.compose.validate import section_from
from maxhydra.config.errors import did_you_mean
from maxhydra.config.schema.benchmarks import Benchmarks
from maxhydra.config.schema.evals import EvalKind, EvalSpec, QuestionSource
from maxhydra.config.yaml_files import check_yaml, read_yaml_text
from maxhydra.data.records import need
from maxhydra.decode.sampling_params import PromptEncoder
from maxhydra.evals.model import EvalModel
from maxhydra.evals.questions import Question, read_questions
from maxhydra.rl.rewards import Sample, build_score, extract_answer
from maxhydra.rl.rollout import unfiltered_sampling

SUITE = Path(__file__).parent / "suite"
KEY = "task.tasks"
Metrics = dict[str, float]


@dataclasses.dataclass(frozen=True)
class OwnTask:
    """A task that a YAML file describes."""

    name: str
    spec: EvalSpec
    folder: Path


@dataclasses.dataclass(frozen=True)
class OwnQuestions:
    """The questions of such a task; `spec` with the changes of the command."""

    name: str
    spec: EvalSpec
    questions: list[Question]


@dataclasses.dataclass(frozen=True)
class TaskSet:
    """The tasks of a command: those of YAML files, and names of lm-eval tasks with lm-eval's index of them."""

    own: list[OwnTask]
    harness: list[str]
    manager: Any = None


@dataclasses.dataclass(frozen=True)
class Result:
    """Metrics of one task; `grid` has the accuracy by context length and depth of a needle task."""

    metrics: Metrics
    questions: int
    grid: dict[tuple[int, float], float] = dataclasses.field(default_factory=dict)


def find_tasks(task: Benchmarks) -> TaskSet:
    """Find all tasks by name; ConfigError with the nearest names for one that does not exist."""
    included = {path.stem: path for path in sorted(SUITE.glob("*.yaml"))}
    own, others = [], []
    for name in task.tasks:
        if name in included or name.endswith((".yaml", ".yml")):
            own.append(_read_task(included.get(name, Path(name).expanduser())))
        else:
            others.append(name)
    if repeated := sorted({found.name for found in own if [other.name for other in own].count(found.name) > 1}):
        raise ConfigError(Problem(KEY, f"names {repeated[0]} more than once", value=task.tasks))
    if task.harness_path is not None and not Path(task.harness_path).is_dir():
        raise ConfigError(Problem("task.harness_path", "is not a folder", value=task.harness_path))
    if not others:
        return TaskSet(own, [])
    try:
        need("lm_eval", f"{KEY}={others[0]}", extra="eval")
    except ConfigError as error:
        (problem,) = error.problems
        accepted = f"{', '.join(included)}, a .yaml file, or a task of lm-eval"
        raise ConfigError(dataclasses.replace(problem, accepted=accepted)) from None
    manager = _harness().open_tasks(task.harness_path)
    known = [*included, *manager.all_tasks]
    for name in others:
        if not manager.match_tasks([name]):
            reason, hint = "is neither an included task nor one of lm-eval", did_you_mean(name, known)
            accepted = f"{', '.join(included)}, a .yaml file, or one of {len(manager.all_tasks)} tasks of lm-eval"
            raise ConfigError(Problem(KEY, reason, value=name, accepted=accepted, hint=hint))
    return TaskSet(own, manager.match_tasks(others), manager)


def _harness() -> Any:
    return importlib.import_module("maxhydra.evals.harness")


def _read_task(path: Path) -> OwnTask:
    if not path.is_file():
        raise ConfigError(Problem(KEY, "names a file that does not exist", value=str(path)))
    text = read_yaml_text(path)
    check_yaml(text, str(path))
    try:
        values = safe_load(text)
        if not isinstance(values, dict):
            raise ConfigError(Problem(KEY, "names a file that is not a mapping", value=str(path)))
        spec = section_from(EvalSpec, values, path="", source=str(path))
    except (YAMLError, OmegaConfBaseException) as error:
        reason = f"names a file that is not an evaluation task: {str(error).splitlines()[0]}"
        accepted = f"keys {', '.join(field.name for field in dataclasses.fields(EvalSpec))}"
        raise ConfigError(Problem(KEY, reason, value=str(path), accepted=accepted)) from None
    return OwnTask(path.stem, spec, path.parent)


def read_task(own: OwnTask, task: Benchmarks, prompts: PromptEncoder) -> OwnQuestions:
    """The questions of a task of a YAML file, each with the solved examples before it."""
    spec, limit = own.spec, task.limit
    if task.shots is not None and spec.kind is not EvalKind.perplexity:
        spec = dataclasses.replace(spec, shots=task.shots)
    if spec.source is QuestionSource.needle and limit is not None:
        # A limit per cell, so that the heat map is complete.
        spec, limit = dataclasses.replace(spec, count=min(spec.count, limit)), None
    questions = read_questions(spec, own.folder, lambda text: len(prompts.tokenizer.encode(text)))
    examples = "".join(question.solved for question in questions[: spec.shots])
    remaining = questions[spec.shots :][:limit]
    if not remaining:
        raise ConfigError(Problem(KEY, f"{own.name} has no questions", hint="lower shots, or add questions"))
    return OwnQuestions(
        own.name, spec, [dataclasses.replace(item, prompt=examples + item.prompt) for item in remaining]
    )


def evaluate(model: EvalModel, own: Sequence[OwnQuestions], tasks: TaskSet, task: Benchmarks) -> dict[str, Result]:
    """Run the tasks of YAML files, whose questions are `own`, and those of lm-eval."""
    results = {questions.name: run_task(model, questions) for questions in own}
    if tasks.harness:
        found = _harness().evaluate(model, tasks.harness, tasks.manager, task)
        results |= {name: Result(metrics, 0) for name, metrics in found.items()}
    return results


def run_task(model: EvalModel, own: OwnQuestions) -> Result:
    """Run one task of a YAML file."""
    spec, evaluated = own.spec, own.questions
    if spec.kind is EvalKind.perplexity:
        return Result(_likelihood(model, evaluated), len(evaluated))
    if spec.kind is EvalKind.multiple_choice:
        return Result(_choose(model, evaluated), len(evaluated))
    scores = _generate(model, evaluated, spec)
    cells = {question.cell: [] for question in evaluated if question.cell is not None}  # type: dict[Any, list[float]]
    for question, score in zip(evaluated, scores, strict=True):
        if question.cell is not None:
            cells[question.cell].append(score)
    return Result(
        _accuracy("acc", scores), len(evaluated), {cell: float(np.mean(values)) for cell, values in cells.items()}
    )


def _choose(model: EvalModel, questions: Sequence[Question]) -> Metrics:
    """acc: the choice with the largest log-likelihood; acc_norm: relative to its length in bytes."""
    pairs = [_encode_pair(model, question.prompt, choice) for question in questions for choice in question.choices]
    scores = iter(model.score(pairs))
    right, right_normalized = [], []
    for question in questions:
        logprobs = np.array([next(scores).logprob for _ in question.choices])
        sizes = np.array([max(1, len(choice.encode())) for choice in question.choices])
        right.append(float(np.argmax(logprobs) == question.answer))
        right_normalized.append(float(np.argmax(logprobs / sizes) == question.answer))
    return {**_accuracy("acc", right), "acc_norm": float(np.mean(right_normalized))}


def _generate(model: EvalModel, questions: Sequence[Question], spec: EvalSpec) -> list[float]:
    """The verifier's score of a greedy completion of each question."""
    sampling = dataclasses.replace(unfiltered_sampling(spec.max_tokens, 0.0), stop=spec.stop)
    prompts = [model.prompts.encode_text(question.prompt) for question in questions]
    texts = model.generate(prompts, [sampling] * len(questions))
    verify = build_score(spec.verifier)
    tokenizer = model.prompts.tokenizer
    return [
        verify(
            Sample(
                prompt=question.prompt,
                text=text,
                answer=extract_answer(text, spec.answer),
                expected=question.answer,
                record=question.record,
                tokens=len(tokenizer.encode(text)),
            )
        )
        for question, text in zip(questions, texts, strict=True)
    ]


def _likelihood(model: EvalModel, questions: Sequence[Question]) -> Metrics:
    """Bits per byte and perplexities of texts, in windows of the context length without overlap."""
    tokenizer = model.prompts.tokenizer
    prefix = tokenizer.bos if tokenizer.bos is not None else tokenizer.eos
    pairs, size = [], model.max_length
    for question in questions:
        ids = tokenizer.encode(question.prompt)
        for start in range(0, len(ids), size):
            context = ids[start - 1] if start else tokenizer.pad if prefix is None else prefix
            pairs.append(([context], ids[start : start + size]))
    nll = -sum(score.logprob for score in model.score(pairs))
    num_tokens, num_bytes = sum(len(pair[1]) for pair in pairs), sum(len(item.prompt.encode()) for item in questions)
    with np.errstate(over="ignore"):
        perplexity = float(np.exp(nll / max(1, num_tokens)))
    return {"bpb": nll / (math.log(2) * max(1, num_bytes)), "loss": nll / max(1, num_tokens), "perplexity": perplexity}


def _accuracy(name: str, scores: Sequence[float]) -> Metrics:
    """The mean, its standard error, and 1 - mean, since checkpoint.best_metric and sweeps minimize."""
    mean = float(np.mean(scores))
    error = float(np.std(scores, ddof=1) / math.sqrt(len(scores))) if len(scores) > 1 else 0.0
    return {name: mean, f"{name}_stderr": error, "error": 1 - mean}


def _encode_pair(model: EvalModel, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Encode a prompt and its continuation together; spaces at the end of the prompt belong to the continuation."""
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    ids, whole = model.prompts.encode_text(stripped), model.prompts.encode_text(stripped + continuation)
    return ids, whole[len(ids) :]
