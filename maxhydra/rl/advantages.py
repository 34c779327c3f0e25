"""Group-relative advantages of completions. P prompts, G completions of each."""

import numpy as np

from maxhydra.config.schema.tasks.grpo import GrpoTask, PolicyLoss, Scale

# Added to the standard deviation, so that rounding differences between rewards do not become advantages.
EPSILON = 1e-4


def scale_of(task: GrpoTask) -> Scale:
    """task.scale, or the default of the loss."""
    return task.scale or (Scale.none if task.loss is PolicyLoss.dr_grpo else Scale.group)


def advantages(rewards_PG: np.ndarray, scale: Scale) -> np.ndarray:
    """Rewards minus their group mean, scaled as `scale` says; exactly 0 if all rewards of a group are equal."""
    centred = rewards_PG - rewards_PG.mean(axis=1, keepdims=True)
    if scale is Scale.group:
        centred = centred / (rewards_PG.std(axis=1, keepdims=True, ddof=1) + EPSILON)
    elif scale is Scale.batch:
        centred = centred / (rewards_PG.std(ddof=1) + EPSILON)
    return np.where(is_degenerate(rewards_PG)[:, None], 0.0, centred).astype(np.float32)


def is_degenerate(rewards_PG: np.ndarray) -> np.ndarray:
    """[P]: groups whose rewards are all equal, which give no learning signal."""
    return rewards_PG.max(axis=1) == rewards_PG.min(axis=1)
