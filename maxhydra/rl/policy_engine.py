"""Answers of the decode engine under given weights: those that training has at the time."""

import threading
from collections.abc import Sequence

import jax

from maxhydra.config.schema.decode import Engine as EngineConfig
from maxhydra.config.schema.decode import Sampling
from maxhydra.decode.engine import Engine
from maxhydra.decode.prompts import PromptEncoder
from maxhydra.decode.request import Completion
from maxhydra.decode.sampling_params import make_requests
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder
from maxhydra.train.state import Tree


class Sampler:
    """Writes answers. The weights are the engine's only for the time of a call: the trainer may give theirs up after.

    On the trainer's mesh they are used where they lie, on another they are moved over; one CPU alone keeps them in a
    layout of its own.
    """

    def __init__(self, model: ModelDef, prompts: PromptEncoder, config: EngineConfig, *, sharder: Sharder, seed: int):
        self._model, self._prompts, self._config, self._sharder = model, prompts, config, sharder
        self._seed = seed
        sharder.check(model.axes, model.shapes)
        self._shardings = sharder.tree(model.axes)
        self._engine: Engine | None = None
        # Training and evaluation take turns.
        self._turn = threading.Lock()

    def answers(
        self, weights: Tree, prompts: Sequence[Sequence[int]], sampling: Sampling, *, samples: int, number: int
    ) -> list[list[Completion]]:
        """So many answers to each prompt. `number`: of the first prompt in the run, from which its seeds are drawn."""
        with self._turn:
            engine = self._with(weights)
            requests = [
                request
                for index, prompt in enumerate(prompts)
                for request in make_requests(
                    prompt, sampling, samples=samples, seed=self._seed, number=number + index, logprobs=0
                )
            ]
            found = [handle.result() for handle in engine.submit_all(requests)]
        if failed := next((one for one in found if one.finish in ("error", "cancelled")), None):
            raise RuntimeError(f"an answer could not be written: {failed.error or failed.finish}")
        return [found[start : start + samples] for start in range(0, len(found), samples)]

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _with(self, weights: Tree) -> Engine:
        weights = jax.device_put(weights, self._shardings)
        if self._engine is None:
            self._engine = Engine(
                self._model,
                weights,
                self._prompts.tokenizer,
                self._config,
                sharder=self._sharder,
                eos=self._prompts.ends,
            )
        else:
            self._engine.update_params(weights)
        return self._engine
