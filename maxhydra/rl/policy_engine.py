"""The decode engine that samples completions from the policy with the trainer's current weights."""

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
from maxhydra.train.loss import Tree


class PolicyEngine:
    """Samples completions. It uses the weights only during a call; the trainer may donate them afterwards.

    On the trainer's mesh the weights are used in place, on another mesh they are resharded; a single CPU keeps its own
    copy in the engine's weight layout.
    """

    def __init__(self, model: ModelDef, prompts: PromptEncoder, config: EngineConfig, *, sharder: Sharder, seed: int):
        self._model, self._prompts, self._config, self._sharder = model, prompts, config, sharder
        self._seed = seed
        sharder.check(model.axes, model.shapes)
        self._shardings = sharder.tree(model.axes)
        self._engine: Engine | None = None
        # Rollouts in a background thread and evaluations take turns.
        self._lock = threading.Lock()

    def generate(
        self, weights: Tree, prompts: Sequence[Sequence[int]], sampling: Sampling, *, samples: int, number: int
    ) -> list[list[Completion]]:
        """`samples` completions per prompt; seeds derive from `number`, the index of the first prompt in the run."""
        with self._lock:
            engine = self._engine_with(weights)
            requests = [
                request
                for index, prompt in enumerate(prompts)
                for request in make_requests(
                    prompt, sampling, samples=samples, seed=self._seed, number=number + index, logprobs=0
                )
            ]
            completions = [handle.result() for handle in engine.submit_all(requests)]
        failed = next((item for item in completions if item.finish in ("error", "cancelled")), None)
        if failed is not None:
            raise RuntimeError(f"sampling a completion failed: {failed.error or failed.finish}")
        return [completions[start : start + samples] for start in range(0, len(completions), samples)]

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _engine_with(self, weights: Tree) -> Engine:
        weights = jax.device_put(weights, self._shardings)
        if self._engine is None:
            self._engine = Engine(
                self._model,
                weights,
                self._prompts.tokenizer,
                self._config,
                sharder=self._sharder,
                eos=self._prompts.eos_ids,
            )
        else:
            self._engine.update_params(weights)
        return self._engine
