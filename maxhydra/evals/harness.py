"""lm-eval on our engine and scorer. Imported only for tasks of lm-eval, which is an optional package."""

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.benchmarks import Benchmarks
from maxhydra.config.schema.decode import Sampling
from maxhydra.evals.model import EvalModel
from maxhydra.rl.rollout import unfiltered_sampling

# Arguments of lm-eval's generation requests that we support, and names for the maximum number of tokens.
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
GENERATION = ("until", "do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", *LENGTHS)
DEFAULT_MAX_TOKENS = 256
# Accuracies, of which a task has one; `error` is 1 minus that, since sweeps minimize.
ACCURACIES = ("acc", "exact_match")


class HarnessModel(TemplateLM):
    """The model as lm-eval sees it."""

    def __init__(self, model: EvalModel):
        super().__init__()
        self._model, self._tokenizer = model, model.prompts.tokenizer
        bos = self._tokenizer.bos if model.prompts.data.tokenizer.add_bos else None
        self._bos = [] if bos is None else [bos]

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.pad if self._tokenizer.eos is None else self._tokenizer.eos

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id if self._tokenizer.bos is None else self._tokenizer.bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        return [*([] if add_special_tokens is False else self._bos), *self._tokenizer.encode(string)]

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **options: Any) -> Any:
        scores = self._model.score([(context, continuation) for _, context, continuation in requests])
        return [(score.logprob, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in windows of the context length without overlap."""
        pairs, owners = [], []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._model.max_length,
                context_len=1,
            )
            for window in map(make_disjoint_window, windows):
                pairs.append(window)
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, score in zip(owners, self._model.score(pairs), strict=True):
            totals[owner] += score.logprob
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        return self._model.generate(prompts, [_sampling(request.args[1]) for request in requests])


def _sampling(arguments: dict[str, Any]) -> Sampling:
    """Sampling parameters of a generation request; without do_sample it is greedy."""
    if unsupported := [name for name in arguments if name not in GENERATION]:
        reason = f"has a task with the generation argument {unsupported[0]}"
        raise ConfigError(Problem("task.tasks", reason, accepted=", ".join(GENERATION)))
    until = arguments.get("until") or []
    stop = [until] if isinstance(until, str) else [text for text in until if text]
    given = {name: arguments[name] for name in ("top_p", "top_k", "min_p", "repetition_penalty") if name in arguments}
    temperature = float(arguments.get("temperature", 1.0)) if arguments.get("do_sample") else 0.0
    max_tokens = next((int(arguments[name]) for name in LENGTHS if name in arguments), DEFAULT_MAX_TOKENS)
    return dataclasses.replace(unfiltered_sampling(max_tokens, temperature), stop=stop, **given)


@cache
def open_tasks(path: str | None) -> TaskManager:
    """The index of lm-eval's tasks and of those in a folder. It takes seconds: lm-eval has thousands of files."""
    return TaskManager(include_path=path)


def evaluate(
    model: EvalModel, names: Sequence[str], manager: TaskManager, task: Benchmarks
) -> dict[str, dict[str, float]]:
    """Run tasks of lm-eval; metrics by task (or subtask of a group), such as acc and acc_stderr."""
    results = simple_evaluate(
        model=HarnessModel(model),
        tasks=list(names),
        num_fewshot=task.shots,
        limit=task.limit,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=1000,
    )
    assert results is not None
    return {name: dict(_metrics(values)) for name, values in results["results"].items()}


def _metrics(values: dict[str, Any]) -> Any:
    """Metrics without the name of the filter, unless a task has several filters."""
    filters = {key.partition(",")[2] for key in values if "," in key}
    for key, value in values.items():
        metric, _, name = key.partition(",")
        if name and isinstance(value, (int, float)):
            yield (metric if len(filters) == 1 else f"{metric}-{name}"), float(value)
            if metric in ACCURACIES and len(filters) == 1:
                yield "error", 1 - float(value)
