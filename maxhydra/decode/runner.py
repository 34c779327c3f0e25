"""The runner of one mesh: weights, KV cache and slot state on its devices, and the calls that read and update them."""

from typing import Any

import jax
import numpy as np

from maxhydra.decode.request import Request
from maxhydra.decode.sampler import SampledTokens, SamplingFeatures
from maxhydra.decode.step_inputs import StepShape
from maxhydra.decode.steps import CompiledSteps, MultiStepKey
from maxhydra.decode.weight_layout import choose_weight_layout
from maxhydra.layers import PagedCacheSpec
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder

Tree = Any


class Runner:
    """Dispatches steps; all results stay on the devices."""

    def __init__(
        self, model: ModelDef, params: Tree, cache_spec: PagedCacheSpec, *, sharder: Sharder, deterministic: bool
    ):
        """`params`: in the standard layout. `deterministic`: as in CompiledSteps."""
        self._layout = choose_weight_layout(model, sharder, jax.default_backend())
        self._params = self._layout.keep(params)
        self.programs = CompiledSteps(
            self._layout, self._params, cache_spec, sharder=sharder, deterministic=deterministic
        )
        self._cache, self._slot_state = self.programs.init_state()

    @property
    def padding_slot(self) -> int:
        return self.programs.padding_slot

    def prepare_params(self, params: Tree) -> Tree:
        """Convert weights of the standard layout to those that `set_params` takes."""
        return self._layout.keep(params)

    def set_params(self, params: Tree) -> None:
        """Use other weights of the same shapes from the next call on."""
        self._params = params

    def forward(self, shape: StepShape, inputs_BC: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Return the logits of the rows, and the columns of the inputs that sampling needs."""
        logits_BV, self._cache, head_BC = self.programs.forward(
            shape, self._params, self._cache, self._slot_state, inputs_BC
        )
        return logits_BV, head_BC

    def sample(self, logits_BV: jax.Array, head_BC: jax.Array, features: SamplingFeatures) -> SampledTokens:
        self._slot_state, sampled = self.programs.sample(self._slot_state, logits_BV, head_BC, features)
        return sampled

    def decode_multi(self, key: MultiStepKey, inputs_BC: np.ndarray | jax.Array) -> tuple[jax.Array, SampledTokens]:
        """Decode several tokens per row; return the inputs of the next call, and the tokens [steps, B]."""
        self._cache, self._slot_state, inputs_BC, sampled = self.programs.decode_multi(
            key, self._params, self._cache, self._slot_state, inputs_BC
        )
        return inputs_BC, sampled

    def mark_prompt(self, slot: int, request: Request) -> None:
        """Set the seen tokens of a slot to those of the prompt, if the request has a repetition penalty."""
        if request.repetition_penalty != 1:
            self._slot_state = self.programs.mark_prompt(self._slot_state, slot, request.prompt)

    def wait(self) -> None:
        """Wait until all dispatched calls have finished."""
        jax.block_until_ready(self._slot_state)

    def close(self) -> None:
        self.programs.close()
