"""Benchmarks during training: train.evals on the weights in memory."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np

from maxhydra.config import Config, ConfigError
from maxhydra.config.schema.benchmarks import TrainEvals
from maxhydra.config.schema.decode import Engine as EngineConfig
from maxhydra.config.schema.kernels import ModelKernels
from maxhydra.config.schema.run import Train
from maxhydra.decode.engine import Engine
from maxhydra.decode.request import Request
from maxhydra.decode.sampling_params import PromptEncoder
from maxhydra.evals import report
from maxhydra.evals.model import EvalModel, MemoryCache
from maxhydra.evals.run import OwnQuestions, TaskSet, evaluate, find_tasks, read_task
from maxhydra.model import ModelDef, without_capacity_limit
from maxhydra.rl.episodes import Episode
from maxhydra.rl.policy_engine import PolicyEngine
from maxhydra.runtime import signals
from maxhydra.score.scorer import SequenceScore, SequenceScorer
from maxhydra.sharding import Sharder
from maxhydra.train import StateFactory
from maxhydra.train.evaluate import Evaluate
from maxhydra.train.loss import Tree
from maxhydra.train.state import TrainState


@dataclasses.dataclass(frozen=True)
class TrainingBenchmarks:
    """The tasks of train.evals with their questions."""

    config: Config
    tasks: TaskSet
    own: list[OwnQuestions]
    prompts: PromptEncoder

    def join(self, held_out: Evaluate | None, states: StateFactory) -> Evaluate:
        """`held_out` together with the tasks, at the steps at which they are due."""
        train, section = self.config.train, self.config.train.evals
        model = WeightsModel(
            _inference_model(states.model),
            self.prompts,
            section,
            states.sharder,
            max_length=section.max_context or train.seq_len,
            seed=self.config.run.seed,
        )

        def evaluate_state(state: TrainState) -> dict[str, float]:
            metrics = {} if held_out is None else held_out(state)
            if not _is_due(train, int(state.step)):
                return metrics
            with model.loaded(state.weights):
                return {**metrics, **report.metrics(evaluate(model, self.own, self.tasks, section))}

        return evaluate_state


class NoBenchmarks:
    """Null object of TrainingBenchmarks, if train.evals has no tasks."""

    def join(self, held_out: Evaluate | None, states: StateFactory) -> Evaluate | None:
        """`held_out` alone."""
        return held_out


def find_benchmarks(config: Config) -> TrainingBenchmarks | NoBenchmarks:
    """Find the tasks of train.evals and read their questions; ConfigError names a task that does not exist.

    A task calls it first: a wrong name is reported before anything is computed.
    """
    section = config.train.evals
    if not section.tasks:
        return NoBenchmarks()
    with _paths_of_training():
        tasks = find_tasks(section)
        prompts = PromptEncoder(config.data, vocab_size=config.model.vocab_size)
        return TrainingBenchmarks(config, tasks, [read_task(own, section, prompts) for own in tasks.own], prompts)


def _is_due(train: Train, step: int) -> bool:
    return train.evals.every is None or step % train.evals.every == 0 or step == train.steps


@contextmanager
def _paths_of_training() -> Iterator[None]:
    """Problems of task=eval with the keys of train.evals."""
    try:
        yield
    except ConfigError as error:
        problems = [
            dataclasses.replace(problem, path=problem.path.replace("task.", "train.evals.", 1))
            for problem in error.problems
        ]
        raise ConfigError(problems) from None


def _inference_model(model: ModelDef) -> ModelDef:
    """The model without a value head, with dropless experts and automatic kernels: named ones are for training."""
    config = dataclasses.replace(without_capacity_limit(model.config), kernels=ModelKernels())  # type: ignore[call-arg]
    return dataclasses.replace(model, config=config, has_value_head=False)


class WeightsModel(EvalModel):
    """The model that is being trained, with the weights of one evaluation at a time.

    Each evaluation has a separate engine, whose KV cache is freed afterwards, and in which the batches do not depend
    on earlier evaluations: a run that resumes repeats an evaluation exactly.
    """

    def __init__(
        self,
        model: ModelDef,
        prompts: PromptEncoder,
        section: TrainEvals,
        sharder: Sharder,
        *,
        max_length: int,
        seed: int,
    ):
        super().__init__(prompts, MemoryCache(), max_length=max_length, seed=seed)
        self._model, self._sharder = model, sharder
        self._template = SequenceScorer(model, None, sharder, section.batch, False, with_greedy=True)
        self._engine_config = EngineConfig(  # type: ignore[call-arg]
            max_batch=section.batch,
            max_context=max_length,
            cache_tokens=section.batch * max_length,
            deterministic=True,
        )
        self._weights: Tree = None

    @contextmanager
    def loaded(self, weights: Tree) -> Iterator[None]:
        """Use these weights inside; other entries of the tree, such as a teacher's, are ignored."""
        self._weights = {name: weights[name] for name in self._model.axes}
        self._cache = MemoryCache()
        try:
            yield
        finally:
            self._weights = None

    def _key(self, *request: Any) -> str:
        return repr(request)

    def _progress(self, total: int, verb: str) -> Any:
        return nullcontext(SimpleNamespace(update=lambda done, tokens: None))

    def _scorer(self, rows: list[np.ndarray]) -> Iterator[SequenceScore]:
        for score in self._template.with_weights(self._weights)(rows):
            yield score
            _end_if_requested()

    def _complete(self, requests: Sequence[Request]) -> Iterator[tuple[str, int]]:
        def complete(engine: Engine) -> list[Episode]:
            episodes = []
            for request, handle in zip(requests, engine.submit_all(requests), strict=True):
                episodes.append(Episode.from_completion(request.prompt, handle.result()))
                _end_if_requested()
            return episodes

        tokenizer, eos = self.prompts.tokenizer, self.prompts.eos_ids
        engine = PolicyEngine(
            self._model, tokenizer, self._engine_config, sharder=self._sharder, eos=eos, seed=self._seed
        )
        with closing(engine):
            for episode in engine.run(self._weights, complete):
                yield episode.text, len(episode.tokens)


def _end_if_requested() -> None:
    """Raise Interrupted after a signal. Several processes agree on that only between evaluations."""
    if not signals.is_distributed():
        signals.check()
