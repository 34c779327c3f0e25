"""Programs with the arguments and results of the engine's, which compute next to nothing: the host's work is as usual.

Unlike those of stub_steps, they are dispatched, take the masks of structured output, and their tokens are copied back.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WORD = 32
# Odd constants of a multiplicative hash.
STEP, SPREAD = np.uint32(2654435761), np.uint32(2246822519)


def use_empty_programs() -> None:
    """Replace the programs of engines, in this process."""
    from maxhydra.decode import runner
    from maxhydra.decode.sampler import SampledTokens
    from maxhydra.decode.step_functions import Forwarded
    from maxhydra.decode.step_inputs import HEAD, START, TARGET, advance, num_columns
    from maxhydra.decode.steps import CompiledSteps

    def draw(last_token_N: jax.Array, head_BC: jax.Array, mask_BW: Any, vocab_size: int) -> tuple[Any, Any]:
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

    class EmptySteps(CompiledSteps):
        def _compile_forward(self, shape: Any) -> Any:
            def forward(weights: Any, cache: Any, last_token_N: Any, inputs_BC: Any) -> Any:
                head_BC = advance(inputs_BC[:, :HEAD], shape.tokens)
                next_BC = None if shape.is_prefill else advance(inputs_BC, shape.tokens)
                return Forwarded(inputs_BC[:, :1], cache, head_BC, None, None, next_BC)

            inputs = self._abstract_inputs(shape.rows, num_columns(shape))
            arguments = self._abstract_weights, self._abstract_caches, self._abstract_slots().last_token_N, inputs
            return jax.jit(forward, donate_argnums=1, keep_unused=True).lower(*arguments).compile()

        def _compile_sample(self, key: Any) -> Any:
            vocab_size = self._model.config.vocab_size

            def sample(state: Any, logits_BV: Any, head_BC: Any, mask_BW: Any = None) -> Any:
                token_B, last_token_N = draw(state.last_token_N, head_BC, mask_BW, vocab_size)
                return state._replace(last_token_N=last_token_N), SampledTokens(token_B, None, None, None)

            logits, head = self._abstract_inputs(key.rows, 1), self._abstract_inputs(key.rows, HEAD)
            masks = [self._abstract_inputs(*self._mask_shape(key.rows))] if key.features.mask else []
            lowered = jax.jit(sample, donate_argnums=0, keep_unused=True).lower(
                self._abstract_slots(), logits, head, *masks
            )
            return lowered.compile()

        def _compile_multi_step(self, key: Any) -> Any:
            vocab_size = self._model.config.vocab_size

            def decode(weights: Any, cache: Any, state: Any, inputs_BC: Any) -> Any:
                def step(last_token_N: Any, number: Any) -> Any:
                    token_B, last_token_N = draw(last_token_N, inputs_BC.at[:, START].add(number), None, vocab_size)
                    return last_token_N, token_B

                steps = jnp.arange(key.num_steps, dtype=jnp.uint32)
                last_token_N, token_SB = jax.lax.scan(step, state.last_token_N, steps)
                sampled = SampledTokens(token_SB, None, None, None)
                state = state._replace(last_token_N=last_token_N)
                return cache, state, advance(inputs_BC, key.num_steps), sampled, None

            inputs = self._abstract_inputs(key.shape.rows, num_columns(key.shape))
            arguments = self._abstract_weights, self._abstract_caches, self._abstract_slots(), inputs
            return jax.jit(decode, donate_argnums=(1, 2), keep_unused=True).lower(*arguments).compile()

    runner.CompiledSteps = EmptySteps  # type: ignore[misc]


def _hash(values: jax.Array) -> jax.Array:
    values = (values ^ (values >> 16)) * SPREAD
    return values ^ (values >> 13)
