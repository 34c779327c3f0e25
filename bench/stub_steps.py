"""Programs that compute nothing, for measurements of the host's work of task=serve: scheduling, text, JSON and HTTP.

python bench/stub_steps.py OVERRIDES...   runs maxhydra with random weights and these programs

Tokens are random. A decode call takes STUB_STEP_MS milliseconds per step (default 0), during which the host is free.
"""

import os
import runpy
import time
from typing import Any

import numpy as np
import random_weights

STEP_SECONDS = float(os.environ.get("STUB_STEP_MS", "0")) / 1e3


class Tokens:
    """Tokens that are available at a given time, as an array of a device is."""

    def __init__(self, values: np.ndarray, ready: float):
        self._values, self._ready = values, ready

    def copy_to_host_async(self) -> None:
        """Nothing to copy."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        time.sleep(max(0.0, self._ready - time.monotonic()))
        return self._values


def use_stub_steps() -> None:
    """Replace the programs of engines, in this process."""
    from maxhydra.decode import runner
    from maxhydra.decode.sampler import SampledTokens
    from maxhydra.decode.step_functions import Forwarded
    from maxhydra.decode.steps import CompiledSteps

    class StubSteps(CompiledSteps):
        free_at = 0.0
        random = np.random.default_rng(0)

        def _sample(self, shape: tuple[int, ...], steps: int) -> SampledTokens:
            type(self).free_at = max(self.free_at, time.monotonic()) + steps * STEP_SECONDS
            values = self.random.integers(256, self._model.config.vocab_size - 1, shape, np.int32)
            tokens: Any = Tokens(values, self.free_at)
            return SampledTokens(tokens, *[None] * (len(SampledTokens._fields) - 1))

        def warm_up(self, *args: Any) -> list[Any]:
            return []

        def forward(self, shape: Any, weights: Any, cache: Any, slots: Any, inputs: Any, *media: Any) -> Any:
            return Forwarded(inputs[:, :1], cache, inputs, None, None)

        def sample(self, slot_state: Any, output: Any, *args: Any) -> Any:
            return slot_state, self._sample((len(output.logits_BV),), 1)

        def choose_multi_step(self, key: Any) -> Any:
            return key

        def decode_multi(self, key: Any, weights: Any, cache: Any, slot_state: Any, inputs_BC: Any) -> Any:
            sampled = self._sample((key.num_steps, key.shape.rows), key.num_steps)
            return cache, slot_state, inputs_BC, sampled, None

    runner.CompiledSteps = StubSteps  # type: ignore[misc]


if __name__ == "__main__":
    random_weights.use_random_weights()
    use_stub_steps()
    runpy.run_module("maxhydra", run_name="__main__", alter_sys=True)
