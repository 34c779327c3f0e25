"""The model under evaluation: log-likelihoods by the scorer, completions by the engine.

Results of a checkpoint are cached on disk, so that an interrupted command resumes.
"""

import dataclasses
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from maxhydra.config import Config
from maxhydra.config.schema.decode import Sampling
from maxhydra.config.schema.tasks.evaluation import EvalTask
from maxhydra.convert.load import load_weights
from maxhydra.decode.engine import Engine
from maxhydra.decode.offline_files import fingerprint
from maxhydra.decode.open import model_values, reject_stages, weight_quantization
from maxhydra.decode.open_draft import open_draft_model
from maxhydra.decode.request import Request
from maxhydra.decode.sampling_params import PromptEncoder, make_requests
from maxhydra.model import ModelDef, build, without_capacity_limit
from maxhydra.record.atomic_io import to_json
from maxhydra.runtime.channel import broadcast, is_main
from maxhydra.runtime.progress import open_item_progress
from maxhydra.score.scorer import SequenceScore, SequenceScorer
from maxhydra.sharding import Sharder


class RequestCache:
    """Results of requests by key, appended to a file as soon as each is known; a torn last line is dropped."""

    def __init__(self, path: Path):
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        content = path.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        os.ftruncate(self._file, len(complete))
        self._values: dict[str, Any] = dict(json.loads(line) for line in complete.splitlines())

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def add(self, key: str, value: Any) -> None:
        self._values[key] = value
        os.write(self._file, (to_json([key, value]) + "\n").encode())

    def close(self) -> None:
        os.fsync(self._file)
        os.close(self._file)


class MemoryCache(dict[str, Any]):
    """Results of requests by key, for a model whose weights change."""

    def add(self, key: str, value: Any) -> None:
        self[key] = value


@dataclasses.dataclass(frozen=True)
class Scored:
    """A continuation of a context: its log-probability, and whether greedy decoding would give it."""

    logprob: float
    is_greedy: bool


class EvalModel(ABC):
    """A model with its tokenizer. A request whose result is in the cache is not computed again."""

    def __init__(self, prompts: PromptEncoder, cache: RequestCache | MemoryCache, *, max_length: int, seed: int):
        self.prompts, self.max_length = prompts, max_length
        self._cache, self._seed = cache, seed

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Scored]:
        """Log-likelihoods of continuations of contexts of at least one token.

        A context loses its start if there are more than max_length tokens, not counting the last one, which the model
        does not read.
        """
        keys = [self._key("score", list(context), list(continuation)) for context, continuation in pairs]
        missing = [index for index in self._first_of(keys) if keys[index] not in self._cache]
        rows = [np.array([*pairs[index][0], *pairs[index][1]], np.int64)[-self.max_length - 1 :] for index in missing]
        with self._progress(len(rows), "scored") as progress:
            tokens = 0
            for done, score in enumerate(self._scorer(rows) if rows else (), 1):
                index = missing[score.number]
                tokens += len(rows[score.number])
                count = len(pairs[index][1])
                assert score.is_greedy is not None
                is_greedy = bool(score.is_greedy[-count:].all())
                value = [float(score.logprobs[-count:].sum(dtype=np.float64)), is_greedy]
                self._cache.add(keys[index], value)
                progress.update(done, tokens)
        return [Scored(*self._cache[key]) for key in keys]

    def generate(self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> list[str]:
        """Completions of prompts; a prompt that leaves no space for max_tokens loses its start."""
        plain = [[sampling.max_tokens, sampling.temperature, *sampling.stop] for sampling in samplings]
        keys = [self._key("generate", list(prompt), key) for prompt, key in zip(prompts, plain, strict=True)]
        missing = [index for index in self._first_of(keys) if keys[index] not in self._cache]
        requests = []
        for index in missing:
            sampling = samplings[index]
            ids = list(prompts[index])[-max(1, self.max_length - sampling.max_tokens) :]
            (request,) = make_requests(ids, sampling, samples=1, seed=self._seed, number=index, logprobs=None)
            requests.append(dataclasses.replace(request, stream=False))
        with self._progress(len(requests), "completed") as progress:
            tokens = 0
            for done, (text, num_tokens) in enumerate(self._complete(requests) if requests else (), 1):
                self._cache.add(keys[missing[done - 1]], text)
                tokens += num_tokens
                progress.update(done, tokens)
        return [self._cache[key] for key in keys]

    @abstractmethod
    def _key(self, *request: Any) -> str:
        """Key of a request in the cache."""

    @abstractmethod
    def _progress(self, total: int, verb: str) -> Any:
        """A display of the progress."""

    @abstractmethod
    def _scorer(self, rows: list[np.ndarray]) -> Iterator[SequenceScore]:
        """A score per sequence of token ids, in any order."""

    @abstractmethod
    def _complete(self, requests: Sequence[Request]) -> Iterator[tuple[str, int]]:
        """Text and number of tokens of each completion, in order."""

    @staticmethod
    def _first_of(keys: Sequence[str]) -> list[int]:
        """Indices of the first occurrence of each key."""
        return list({key: index for index, key in reversed(list(enumerate(keys)))}.values())


class CheckpointModel(EvalModel):
    """One checkpoint. Weights are loaded with the first request that is not in the cache.

    Process 0 has the cache and makes the requests; the other processes compute them together with it (`follow`).
    """

    def __init__(self, config: Config, prompts: PromptEncoder, cache: RequestCache | MemoryCache, *, weights: str):
        assert isinstance(config.task, EvalTask)
        max_length = config.task.engine.max_context or config.model.context_length
        super().__init__(prompts, cache, max_length=max_length, seed=config.run.seed)
        self._config, self._task, self._source = config, config.task, weights
        settings = {"weights": weights, **model_values(config), "compute": config.model.dtypes.compute}
        self._identity = fingerprint(settings)

    def follow(self) -> None:
        """Compute the requests of process 0 until it closes the model; for all other processes."""
        while (work := broadcast()) is not None:
            if work["rows"]:
                # Each batch is a collective computation, whose results process 0 uses.
                for _ in self._sequence_scorer(work["rows"]):
                    pass
            else:
                self._engine.synchronize()

    def close(self) -> None:
        """Free the engine, and end `follow` in the other processes."""
        if is_main():
            broadcast(None)
        if "_engine" in self.__dict__:
            self._engine.close()

    def _key(self, *request: Any) -> str:
        return fingerprint({"model": self._identity, "request": request})

    def _progress(self, total: int, verb: str) -> Any:
        return open_item_progress(self._config.train.progress, total=total, start=0, verb=verb)

    def _scorer(self, rows: list[np.ndarray]) -> Iterator[SequenceScore]:
        broadcast({"rows": rows})
        return self._sequence_scorer(rows)

    def _complete(self, requests: Sequence[Request]) -> Iterator[tuple[str, int]]:
        broadcast({"rows": []})
        handles = [self._engine.submit(request) for request in requests]
        for handle in handles:
            completion = handle.result()
            if completion.error:
                raise RuntimeError(f"the engine failed: {completion.error}")
            yield completion.text, len(completion.tokens)
        self._engine.synchronize()

    @cached_property
    def _sharder(self) -> Sharder:
        sharder = Sharder.from_config(self._config.mesh)
        reject_stages(sharder, "mesh.stage")
        return sharder

    @cached_property
    def _model(self) -> ModelDef:
        model = build(without_capacity_limit(self._config.model), quantization=weight_quantization(self._config))
        model.check_mesh(self._sharder)
        return model

    @cached_property
    def _weights(self) -> Any:
        shardings = self._sharder.tree(self._model.base.axes)
        dtype = jnp.dtype(self._config.model.dtypes.compute.value)
        return load_weights(self._source, self._model, shardings=shardings, dtype=dtype)

    @cached_property
    def _sequence_scorer(self) -> SequenceScorer:
        return SequenceScorer(self._model, self._weights, self._sharder, self._task.batch, False, with_greedy=True)

    @cached_property
    def _engine(self) -> Engine:
        tokenizer, eos = self.prompts.tokenizer, self.prompts.eos_ids
        engine, sharder = self._task.engine, self._sharder
        draft_model = open_draft_model(self._config, engine, sharder)
        return Engine(self._model, self._weights, tokenizer, engine, sharder=sharder, eos=eos, draft_model=draft_model)
