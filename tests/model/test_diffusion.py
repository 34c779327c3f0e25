"""Block diffusion: the noise of training and rejected configs. tests/parity has the loss and decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.diffusion import Diffusion
from maxhydra.model.diffusion import add_noise

SIZE, MASK, ROWS, LENGTH = 4, 259, 50, 64
DIFFUSION = Diffusion(block_size=SIZE, mask_token=MASK)  # type: ignore[call-arg]
ON = [f"model.diffusion.block_size={SIZE}", f"model.diffusion.mask_token={MASK}"]


@pytest.mark.slow
def test_noise_masks_each_token_with_the_level_of_its_block() -> None:
    tokens = jnp.ones((ROWS, LENGTH), jnp.int32)
    positions = jnp.tile(1 + jnp.arange(LENGTH), (ROWS, 1))
    weights = jnp.ones((ROWS, LENGTH)).at[:, :3].set(0)
    noise = jax.jit(lambda key: add_noise(tokens, positions, weights, DIFFUSION, key))
    samples = [noise(jax.random.key(seed)) for seed in range(40)]
    masked, scale = (np.stack([np.asarray(sample[part]) for sample in samples]) for part in (0, 1))
    masked = masked == MASK
    assert not masked[:, :, :3].any()
    assert np.array_equal(scale > 0, masked)
    # Masked tokens of a block share their level.
    blocks = scale.reshape(40, ROWS, -1, SIZE)
    top = blocks.max(axis=-1, keepdims=True)
    assert np.all((blocks == 0) | (blocks == top))
    # The weight 1 / t makes every token count once on average, and half of all tokens are masked.
    np.testing.assert_allclose(masked[:, :, SIZE:].mean(), 0.5, atol=0.01)
    np.testing.assert_allclose(scale[:, :, SIZE:].mean(), 1.0, atol=0.02)
    # Each row has another stratum: of the levels of a block over the rows, about half are under 1/2 in every sample.
    levels = 1 / np.where(top[..., 0] > 0, top[..., 0], np.inf)
    middle = 0.5 + DIFFUSION.min_noise
    assert np.all(np.sum(levels > middle, axis=1)[:, 1:] <= ROWS // 2)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["task=serve", "checkpoint.load_parameters=x"], "model.diffusion.block_size"),
        (["task=grpo"], "model.diffusion.block_size"),
        (["task=plan"], "model.diffusion.block_size"),
        (["model.mtp.depth=1"], "model.mtp.depth"),
        (["model=qwen3-next-tiny"], "model.kinds.delta.mixer"),
        (["model=gemma3-tiny"], "model.kinds.local.attention.window"),
        (["train.evals.tasks=[arc_easy]"], "train.evals.tasks"),
        (["mesh.sequence=2"], "mesh.sequence"),
        (["model.diffusion.mask_token=320"], "model.diffusion.mask_token"),
        (["model.diffusion.mask_token=null"], "model.diffusion.mask_token"),
        (["task=decode", "checkpoint.load_parameters=x", "task.denoise_steps=5"], "task.denoise_steps"),
        (["task=decode", "checkpoint.load_parameters=x", "task.sampling.top_p=0.5"], "task.sampling.top_p"),
        (["task=decode", "checkpoint.load_parameters=x", "task.engine.burst=2"], "task.engine.burst"),
        (
            ["task=decode", "checkpoint.load_parameters=x", "task.engine.speculation.method=ngram"],
            "task.engine.speculation.method",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_unsupported_combinations_are_rejected(overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose([*ON, *overrides])
    assert key in [problem.path for problem in error.value.problems]


def test_keys_of_diffusion_need_a_block_size() -> None:
    with pytest.raises(ConfigError) as error:
        compose(["model.diffusion.mask_token=3"])
    assert [problem.path for problem in error.value.problems] == ["model.diffusion.mask_token"]
