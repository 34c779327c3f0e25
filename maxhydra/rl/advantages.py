"""Advantages: rewards of completions relative to a baseline.

P prompts, G completions of each, B = P * G completions, S positions.
"""

import numpy as np

from maxhydra.config.schema.tasks.training import Baseline, GrpoTask, PolicyLoss, Scale, baseline_of, scale_of

# Added to the standard deviation, so that rounding differences between rewards do not become advantages.
EPSILON = 1e-4


def advantages(
    rewards_PG: np.ndarray, mask_BS: np.ndarray, task: GrpoTask, log_ratio_BS: np.ndarray | None = None
) -> np.ndarray:
    """Advantages [B, S] of the tokens where `mask_BS` is 1.

    `log_ratio_BS`, the log of policy over reference probability, is penalized with task.kl.beta if it is given.
    """
    penalty_BS = np.zeros(mask_BS.shape) if log_ratio_BS is None else task.kl.beta * log_ratio_BS * mask_BS
    if baseline_of(task) is Baseline.batch:
        # The sum from a token to the end: a token is not responsible for the penalties before it.
        to_go_BS = np.cumsum(penalty_BS[:, ::-1], axis=1)[:, ::-1]
        penalties = to_go_BS if task.loss is PolicyLoss.reinforce_pp else penalty_BS.sum(axis=1, keepdims=True)
        return _relative_to_batch(rewards_PG.reshape(-1, 1) - penalties, mask_BS, scale_of(task))
    net_PG = rewards_PG - penalty_BS.sum(axis=1).reshape(rewards_PG.shape)
    values_B1 = _relative_to_group(net_PG, baseline_of(task), scale_of(task)).reshape(-1, 1)
    return np.broadcast_to(values_B1, mask_BS.shape).astype(np.float32)


def _relative_to_batch(returns: np.ndarray, mask_BS: np.ndarray, scale: Scale) -> np.ndarray:
    """Returns minus their mean over all tokens of the batch, divided by their standard deviation unless scale=none."""
    returns_BS = np.broadcast_to(returns, mask_BS.shape)
    tokens = returns_BS[mask_BS > 0]
    if not tokens.size or tokens.max() == tokens.min():
        return np.zeros(mask_BS.shape, np.float32)
    deviation = 1.0 if scale is Scale.none else tokens.std(ddof=1) + EPSILON
    return ((returns_BS - tokens.mean()) / deviation).astype(np.float32)


def _relative_to_group(rewards_PG: np.ndarray, baseline: Baseline, scale: Scale) -> np.ndarray:
    """Rewards minus the mean of their group, or of the others in it; exactly 0 if all rewards of a group are equal."""
    size = rewards_PG.shape[1]
    centred = rewards_PG - rewards_PG.mean(axis=1, keepdims=True)
    if baseline is Baseline.leave_one_out:
        # r - (sum - r) / (G - 1) = (r - sum / G) G / (G - 1)
        centred = centred * size / (size - 1)
    if scale is Scale.group:
        centred = centred / (rewards_PG.std(axis=1, keepdims=True, ddof=1) + EPSILON)
    elif scale is Scale.batch:
        centred = centred / (rewards_PG.std(ddof=1) + EPSILON)
    return np.where(is_degenerate(rewards_PG)[:, None], 0.0, centred)


def is_degenerate(rewards_PG: np.ndarray, baseline: Baseline = Baseline.group) -> np.ndarray:
    """[P]: groups that give no learning signal, because all rewards that share a baseline are equal."""
    if baseline is Baseline.batch:
        return np.full(len(rewards_PG), rewards_PG.max() == rewards_PG.min())
    return rewards_PG.max(axis=1) == rewards_PG.min(axis=1)
