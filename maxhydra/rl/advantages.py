"""How much better than its group an answer is. P prompts, G answers to each."""

import numpy as np

from maxhydra.config.schema.tasks.grpo import GrpoTask, PolicyLoss, Scale

# Added to a standard deviation, so that differences in the last bits of rewards do not become advantages.
TINY = 1e-4


def scale_of(task: GrpoTask) -> Scale:
    """What task.scale says, or what belongs to the loss."""
    return task.scale or (Scale.none if task.loss is PolicyLoss.dr_grpo else Scale.group)


def advantages(rewards_PG: np.ndarray, scale: Scale) -> np.ndarray:
    """Rewards less the mean of their group, divided as `scale` says; exactly 0 where all of a group are equal."""
    centred = rewards_PG - rewards_PG.mean(axis=1, keepdims=True)
    if scale is Scale.group:
        centred = centred / (rewards_PG.std(axis=1, keepdims=True, ddof=1) + TINY)
    elif scale is Scale.batch:
        centred = centred / (rewards_PG.std(ddof=1) + TINY)
    return np.where(is_degenerate(rewards_PG)[:, None], 0.0, centred).astype(np.float32)


def is_degenerate(rewards_PG: np.ndarray) -> np.ndarray:
    """[P]: groups from which nothing can be learned, since all their rewards are equal."""
    return rewards_PG.max(axis=1) == rewards_PG.min(axis=1)
