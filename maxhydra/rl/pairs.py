"""Pairs of online DPO: the best and the worst completion of each prompt, by their rewards.

P prompts, S positions. The columns are those of data.record_type=preference, so the loss is that of task=dpo.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from maxhydra.config.schema.tasks.training import GrpoTask
from maxhydra.rl.loss import REFERENCE_LOGPROBS
from maxhydra.rl.rollout import Group, columns, row_weights

CHOSEN, REJECTED = ROLES = ("chosen", "rejected")
# Columns [P, S] of each completion of a pair; `reference`, [P], is the log-prob of the completion under the reference.
TOKEN_COLUMNS = {"tokens": np.int32, "targets": np.int32, "positions": np.int32, "weights": np.float32}
TOKEN_COLUMNS |= {"sampled_logprobs": np.float32}


def choose_pair(group: Group, task: GrpoTask) -> tuple[int, int] | None:
    """Indices of the best and the worst episode of a group, the first of equal ones; None if all rewards are equal.

    Episodes whose environment failed or that task.mask_truncated excludes are not compared.
    """
    (compared,) = np.nonzero(row_weights([group], task))
    rewards = np.array(group.rewards)[compared]
    if not len(compared) or rewards.max() == rewards.min():
        return None
    return int(compared[rewards.argmax()]), int(compared[rewards.argmin()])


def interleaved_rows(
    groups: Sequence[Group], pairs: Sequence[tuple[int, int] | None], task: GrpoTask, seq_len: int
) -> dict[str, np.ndarray]:
    """Columns [2 P, S] in which the completions of a pair are adjacent; a group without a pair has weight 0."""
    chosen = [
        Group([group.episodes[index] for index in pair or (0, 0)], [group.results[index] for index in pair or (0, 0)])
        for group, pair in zip(groups, pairs, strict=True)
    ]
    arrays = columns(chosen, task, seq_len)
    return {name: arrays[name] for name in TOKEN_COLUMNS}


def pair_columns(rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The columns of the loss, from those of `interleaved_rows` and their reference log-probs."""
    reference = (rows[REFERENCE_LOGPROBS] * rows["weights"]).sum(axis=1)
    both = {**{name: rows[name] for name in TOKEN_COLUMNS}, "reference": reference}
    return {f"{role}_{name}": column[index::2] for index, role in enumerate(ROLES) for name, column in both.items()}


def with_sampler_columns(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Columns of a batch; pairs in checkpoints of earlier versions get unknown log-probs of their sampler, NaN."""
    pairs = [role for role in ROLES if f"{role}_weights" in columns]
    unknown = {f"{role}_sampled_logprobs": np.full_like(columns[f"{role}_weights"], np.nan) for role in pairs}
    return {**unknown, **columns}
