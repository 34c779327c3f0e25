"""The decode engine as the sampler of a policy whose weights are being trained."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp

from maxhydra.config.schema.decode import Engine as EngineConfig
from maxhydra.config.schema.decode import Sampling
from maxhydra.data import Tokenizer
from maxhydra.decode.draft_model import DraftModel
from maxhydra.decode.engine import Engine
from maxhydra.decode.open import reject_stages
from maxhydra.decode.sampling_params import make_requests
from maxhydra.model import ModelDef
from maxhydra.rl.episodes import Episode
from maxhydra.runtime.channel import broadcast, is_main
from maxhydra.sharding import Sharder
from maxhydra.train.loss import Tree


class PolicyEngine:
    """Samples episodes. It uses the weights only during a call; the trainer may donate them afterwards.

    On the trainer's mesh the weights are used in place, on another mesh they are resharded; a single CPU keeps its own
    copy in the engine's weight layout. Calls with weights take turns; calls without use those that were loaded last,
    concurrently, and `push` replaces the weights in the middle of their episodes.
    """

    def __init__(
        self,
        model: ModelDef,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        sharder: Sharder,
        eos: frozenset[int],
        seed: int,
        records_experts: bool = False,
        draft_model: DraftModel | None = None,
    ):
        """`eos`: token ids that end a turn. `records_experts`: episodes contain the experts of their tokens.
        `draft_model`: on the mesh of `sharder`, with speculation.method=model."""
        self._draft_model, self._records_experts = draft_model, records_experts
        self._model, self._tokenizer, self._config, self._sharder = model, tokenizer, config, sharder
        self._eos, self._seed = eos, seed
        model.check_mesh(sharder)
        reject_stages(sharder, "task.rollout_mesh")
        self._shardings = sharder.tree(model.axes)
        self._engine: Engine | None = None
        self._version = 0
        # Rollouts in a background thread and evaluations take turns.
        self._lock = threading.Lock()
        self._pusher = ThreadPoolExecutor(1, thread_name_prefix="push-weights")

    def generate(
        self,
        weights: Tree | None,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        samples: int,
        number: int,
        version: int = 0,
    ) -> list[Episode]:
        """`samples` completions per prompt; seeds derive from `number`, the index of the first prompt in the run."""
        requests = [
            dataclasses.replace(request, stream=False)
            for index, prompt in enumerate(prompts)
            for request in make_requests(
                prompt, sampling, samples=samples, seed=self._seed, number=number + index, logprobs=0
            )
        ]

        def sample(engine: Engine) -> list[Episode]:
            handles = engine.submit_all(requests)
            return [
                Episode.from_completion(request.prompt, handle.result())
                for request, handle in zip(requests, handles, strict=True)
            ]

        return self.run(weights, sample, version=version)

    def run(
        self, weights: Tree | None, sample: Callable[[Engine], list[Episode]], *, version: int = 0
    ) -> list[Episode]:
        """What `sample` returns in process 0, which submits the requests of all. A collective call."""
        with contextlib.nullcontext() if weights is None else self._lock:
            engine = self._engine if weights is None else self._load(weights, version)
            assert engine is not None, "no weights were pushed"
            episodes = sample(engine) if is_main() else []
            engine.synchronize()
        episodes = broadcast(
            episodes,
            encode=lambda items: [dataclasses.asdict(item) for item in items],
            decode=lambda items: [Episode.from_json(item) for item in items],
        )
        failed = next((item for item in episodes if item.finish in ("error", "cancelled")), None)
        if failed is not None:
            raise RuntimeError(f"sampling a completion failed: {failed.error or failed.finish}")
        return episodes

    def push(self, weights: Tree, version: int) -> "Future[None]":
        """Copy weights to the engine's devices, and load them once they are computed: until then it keeps sampling."""
        trainer = jax.tree.leaves(weights)[0].sharding.device_set
        if not trainer.isdisjoint(self._sharder.mesh.devices.flat):
            weights = jax.tree.map(jnp.copy, weights)
        copy = jax.device_put(weights, self._shardings)

        def load() -> None:
            jax.block_until_ready(copy)
            with self._lock:
                # An evaluation may have loaded newer ones meanwhile.
                if version >= self._version:
                    self._load(copy, version)

        return self._pusher.submit(load)

    @property
    def expert_shape(self) -> tuple[int, int]:
        """Layers, and the largest number of experts per token."""
        return self._model.config.num_layers, self._model.most_experts

    @property
    def num_sampled(self) -> float:
        """Tokens that the engine has sampled so far."""
        return 0.0 if self._engine is None else self._engine.stats()["tokens_written"]

    def close(self) -> None:
        """End all episodes with an error."""
        self._pusher.shutdown(wait=True, cancel_futures=True)
        if self._engine is not None:
            self._engine.close()

    def _load(self, weights: Tree, version: int) -> Engine:
        self._version = version
        weights = jax.device_put(weights, self._shardings)
        if self._engine is None:
            self._engine = Engine(
                self._model,
                weights,
                self._tokenizer,
                self._config,
                sharder=self._sharder,
                eos=self._eos,
                version=version,
                records_experts=self._records_experts,
                draft_model=self._draft_model,
            )
        else:
            self._engine.update_params(weights, version)
        return self._engine
