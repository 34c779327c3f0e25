"""Programs that compute nothing, for measurements of the host's work: scheduling, masks, text, JSON and HTTP.

python bench/stub_steps.py OVERRIDES...   runs maxhydra with random weights and StubSteps

Tokens are random. StubSteps dispatches no programs, and a decode call takes STUB_STEP_MS milliseconds per step (default
0), during which the host is free. EmptySteps dispatches programs with the arguments and results of the engine's, which
take the masks of structured output, and whose tokens are copied back.
"""

import os
import runpy
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import random_weights

from maxhydra.decode import runner
from maxhydra.decode.sampler import SampledTokens
from maxhydra.decode.step_functions import Decoded, Forwarded
from maxhydra.decode.step_inputs import HEAD, START, TARGET, advance, num_columns
from maxhydra.decode.steps import CompiledSteps

STEP_SECONDS = float(os.environ.get("STUB_STEP_MS", "0")) / 1e3
WORD = 32
# Odd constants of a multiplicative hash.
STEP, SPREAD = np.uint32(2654435761), np.uint32(2246822519)


class Tokens:
    """Tokens that are available at a given time, as an array of a device is."""

    def __init__(self, values: np.ndarray, ready: float):
        self._values, self._ready, self.shape = values, ready, values.shape

    def copy_to_host_async(self) -> None:
        """Nothing to copy."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        time.sleep(max(0.0, self._ready - time.monotonic()))
        return self._values


def sampled(tokens: Any) -> SampledTokens:
    """Tokens without log-probabilities."""
    return SampledTokens(tokens, *[None] * (len(SampledTokens._fields) - 1))


class StubSteps(CompiledSteps):
    """Steps on the host alone, whose tokens follow no mask."""

    free_at = 0.0
    random = np.random.default_rng(0)

    def _sample(self, shape: tuple[int, ...], steps: int) -> SampledTokens:
        type(self).free_at = max(self.free_at, time.monotonic()) + steps * STEP_SECONDS
        values = self.random.integers(256, self._model.config.vocab_size - 1, shape, np.int32)
        return sampled(Tokens(values, self.free_at))

    def warm_up(self, *args: Any) -> list[Any]:
        return []

    def forward(self, shape: Any, weights: Any, cache: Any, slots: Any, inputs: Any, *media: Any) -> Any:
        return Forwarded(inputs[:, :1], cache, inputs, None, None, None if shape.is_prefill else inputs)

    def sample(self, slot_state: Any, logits: Any, *args: Any) -> Any:
        return slot_state, self._sample((logits.shape[-2],), 1)

    def choose_multi_step(self, key: Any) -> Any:
        return key

    def decode_multi(self, key: Any, weights: Any, state: Any, inputs_BC: Any) -> Any:
        tokens = self._sample((key.num_steps, key.shape.rows), key.num_steps)
        return Decoded(*state, inputs_BC, tokens, None, np.empty((*tokens.token_B.shape, 1)))


class EmptySteps(CompiledSteps):
    """Compiled programs that sample tokens from a hash."""

    def _compile_forward(self, shape: Any) -> Any:
        def forward(weights: Any, cache: Any, last_token_N: Any, inputs_BC: Any) -> Any:
            head_BC = advance(inputs_BC[:, :HEAD], shape.tokens)
            next_BC = None if shape.is_prefill else advance(inputs_BC, shape.tokens)
            return Forwarded(inputs_BC[:, :1], cache, head_BC, None, None, next_BC)

        inputs = self._abstract_inputs(shape.rows, num_columns(shape))
        arguments = self._abstract_weights, self.cache.abstract, self._abstract_slots().last_token_N, inputs
        return jax.jit(forward, donate_argnums=1, keep_unused=True).lower(*arguments).compile()

    def _compile_sample(self, key: Any) -> Any:
        vocab_size = self._model.config.vocab_size

        def sample(state: Any, logits_BV: Any, head_BC: Any, mask_BW: Any = None) -> Any:
            token_B, last_token_N = random_tokens(state.last_token_N, head_BC, mask_BW, vocab_size)
            return state._replace(last_token_N=last_token_N), sampled(token_B)

        logits, head = self._abstract_inputs(key.rows, 1), self._abstract_inputs(key.rows, HEAD)
        if key.logit_steps:
            logits = jax.ShapeDtypeStruct((key.logit_steps, *logits.shape), logits.dtype, sharding=self.replicated)
        masks = [self._abstract_inputs(*self._mask_shape(key.rows))] if key.features.mask else []
        arguments = self._abstract_slots(), logits, head, *masks
        return jax.jit(sample, donate_argnums=0, keep_unused=True).lower(*arguments).compile()

    def _compile_multi_step(self, key: Any) -> Any:
        vocab_size = self._model.config.vocab_size

        def decode(weights: Any, cache: Any, state: Any, inputs_BC: Any) -> Any:
            def step(last_token_N: Any, number: Any) -> Any:
                head_BC = inputs_BC.at[:, START].add(number)
                return random_tokens(last_token_N, head_BC, None, vocab_size)[::-1]

            steps = jnp.arange(key.num_steps, dtype=jnp.uint32)
            last_token_N, token_SB = jax.lax.scan(step, state.last_token_N, steps)
            state = state._replace(last_token_N=last_token_N)
            logits_SBV = jnp.zeros((*token_SB.shape, 1), jnp.uint32)
            return Decoded(cache, state, advance(inputs_BC, key.num_steps), sampled(token_SB), None, logits_SBV)

        inputs = self._abstract_inputs(key.shape.rows, num_columns(key.shape))
        arguments = self._abstract_weights, self.cache.abstract, self._abstract_slots(), inputs
        return jax.jit(decode, donate_argnums=(1, 2), keep_unused=True).lower(*arguments).compile()


def random_tokens(last_token_N: jax.Array, head_BC: jax.Array, mask_BW: Any, vocab_size: int) -> tuple[Any, Any]:
    """Random tokens that the masks allow, also stored in the slot state."""
    rows, slots_B = head_BC.shape[0], head_BC[:, TARGET].astype(jnp.int32)
    noise_B = _hash(jnp.arange(rows, dtype=jnp.uint32) * STEP + head_BC[:, START] + last_token_N[slots_B])
    if mask_BW is None:
        token_B = 256 + (noise_B >> 1).astype(jnp.int32) % (vocab_size - 512)
    else:
        order_BW = _hash(noise_B[:, None] + jnp.arange(mask_BW.shape[1], dtype=jnp.uint32)) >> 1
        word_B = jnp.argmax(jnp.where(mask_BW != 0, order_BW + 1, 0), axis=1).astype(jnp.int32)
        bits_BW = (jnp.take_along_axis(mask_BW, word_B[:, None], axis=1) >> jnp.arange(WORD, dtype=jnp.uint32)) & 1
        order_BW = _hash(noise_B[:, None] ^ jnp.arange(WORD, dtype=jnp.uint32)) >> 1
        token_B = WORD * word_B + jnp.argmax(jnp.where(bits_BW == 1, order_BW + 1, 0), axis=1).astype(jnp.int32)
    return token_B, last_token_N.at[slots_B].set(token_B.astype(last_token_N.dtype))


def _hash(values: jax.Array) -> jax.Array:
    values = (values ^ (values >> 16)) * SPREAD
    return values ^ (values >> 13)


def use_steps(steps: type[CompiledSteps]) -> None:
    """Replace the programs of engines, in this process."""
    runner.CompiledSteps = steps  # type: ignore[misc]


if __name__ == "__main__":
    random_weights.use_random_weights()
    use_steps(StubSteps)
    runpy.run_module("maxhydra", run_name="__main__", alter_sys=True)
