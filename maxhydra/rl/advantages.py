"""Advantages: rewards of completions relative to a baseline.

P prompts, G completions of each, B = P * G completions, S positions.
"""

import numpy as np

from maxhydra.config.schema.tasks.policy import Baseline, PolicyLoss, Scale
from maxhydra.config.schema.tasks.training import GrpoTask, baseline_of, scale_of

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


def critic_advantages(
    rewards_PG: np.ndarray,
    values_BS: np.ndarray,
    mask_BS: np.ndarray,
    task: GrpoTask,
    log_ratio_BS: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Generalized advantage estimates, and the returns that the critic learns, [B, S] each.

    The reward is that of a completion's last token, and penalties are those of each token. Tokens outside of the mask,
    such as those of an environment, are skipped: the value after a token is that of the next token of the mask.
    """
    discount, trace, mask_BS = task.critic.discount, task.critic.trace, mask_BS > 0
    penalty_BS = np.zeros(mask_BS.shape) if log_ratio_BS is None else task.kl.beta * log_ratio_BS
    advantages_BS, advantage_B, next_value_B = np.zeros(mask_BS.shape), np.zeros(len(mask_BS)), np.zeros(len(mask_BS))
    reward_B = rewards_PG.ravel().astype(np.float64)
    for position in reversed(range(mask_BS.shape[1])):
        is_token_B, value_B = mask_BS[:, position], values_BS[:, position]
        error_B = reward_B - penalty_BS[:, position] + discount * next_value_B - value_B
        advantage_B = np.where(is_token_B, error_B + discount * trace * advantage_B, advantage_B)
        next_value_B = np.where(is_token_B, value_B, next_value_B)
        reward_B = np.where(is_token_B, 0.0, reward_B)
        advantages_BS[:, position] = np.where(is_token_B, advantage_B, 0.0)
    returns_BS = np.where(mask_BS, advantages_BS + values_BS, 0.0).astype(np.float32)
    return _relative_to_batch(advantages_BS, mask_BS, scale_of(task)), returns_BS


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
    if baseline is Baseline.critic:
        return np.zeros(len(rewards_PG), bool)
    if baseline is Baseline.batch:
        return np.full(len(rewards_PG), rewards_PG.max() == rewards_PG.min())
    return rewards_PG.max(axis=1) == rewards_PG.min(axis=1)


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """Share of the variance of the returns that the values explain; 0 if all returns are equal."""
    variance = float(np.var(returns)) if returns.size else 0.0
    return 1 - float(np.var(returns - values)) / variance if variance else 0.0
