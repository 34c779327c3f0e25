"""Generation with block diffusion: one sequence, block by block, with a cache of the finished blocks."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np

from maxhydra.layers import DenseCacheSpec
from maxhydra.model.diffusion import Denoising, denoise_block, extend
from maxhydra.model.model_def import ModelDef
from maxhydra.sharding import Sharder

Tree = Any
# Prompts and caches are padded to powers of two from this length on, so that few programs are compiled.
MIN_LENGTH = 64


@dataclasses.dataclass(frozen=True)
class BlockDecoder:
    """Generates the blocks of a sequence."""

    model: ModelDef
    params: Tree
    sharder: Sharder
    steps: int | None
    """Denoising steps per block; None: one per token."""

    @property
    def block_size(self) -> int:
        size = self.model.config.diffusion.block_size
        assert size is not None
        return size

    @property
    def mask_token(self) -> int:
        mask = self.model.config.diffusion.mask_token
        assert mask is not None
        return mask

    def blocks(self, prompt: Sequence[int], length: int, *, temperature: float, seed: int) -> Iterator[list[int]]:
        """Yield the tokens of each block behind the prompt, until the sequence has `length` tokens or more."""
        size, key = self.block_size, jax.random.key(seed)
        # The position after the last whole block of the prompt; the first block starts at position 1.
        start = 1 + (len(prompt) - 1) // size * size
        cache = self._prefill(prompt[:start], _padded_length(length + size))
        known = list(prompt[start:])
        while start + len(known) < length:
            block = np.full(size, self.mask_token, np.int32)
            block[: len(known)] = known
            block_key = jax.random.key_data(jax.random.fold_in(key, start))
            arguments = (self._rows(block), np.int32(start), np.float32(temperature), block_key)
            tokens, cache = self._denoise(self.params, cache, *arguments)
            yield np.asarray(tokens)[len(known) :].tolist()
            known, start = [], start + size

    def _rows(self, tokens: np.ndarray) -> np.ndarray:
        """The sequence once for each group of devices that share a batch."""
        return np.tile(tokens, (self.sharder.num_shards("act_batch"), 1))

    def _prefill(self, prompt: Sequence[int], length: int) -> Tree:
        padded = np.zeros(_padded_length(len(prompt)), np.int32)
        padded[: len(prompt)] = prompt
        return self._prefill_program(self.params, self._rows(padded), np.int32(len(prompt)), length)

    @cached_property
    def _prefill_program(self) -> Any:
        def prefill(params: Tree, tokens_BT: jax.Array, count: jax.Array, length: int) -> Tree:
            cache = self.model.empty_cache(DenseCacheSpec(tokens_BT.shape[0], length))
            return extend(self.model, params, cache, tokens_BT, (0, count), self.sharder)[1]

        return jax.jit(prefill, static_argnums=3)

    @cached_property
    def _denoise(self) -> Any:
        def denoise(
            params: Tree, cache: Tree, tokens_BL: jax.Array, start: jax.Array, temperature: jax.Array, key: jax.Array
        ) -> tuple[jax.Array, Tree]:
            denoising = Denoising(self.steps or self.block_size, temperature, jax.random.wrap_key_data(key))
            return denoise_block(self.model, params, cache, tokens_BL, start, denoising, sharder=self.sharder)

        return jax.jit(denoise, donate_argnums=1)


def _padded_length(length: int) -> int:
    return max(MIN_LENGTH, 1 << (length - 1).bit_length())
