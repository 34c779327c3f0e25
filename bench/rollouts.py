"""Measures on-policy rollouts of task=grpo without the training step, with random weights. Prints one JSON line.

    python bench/rollouts.py model=llama3.2-1b
    python bench/rollouts.py model=micro completions=16 group=4 prompt=8 new=8     # on a CPU

Each round loads the weights in the trainer's dtype, and samples `completions` of `new` tokens, `group` per random
prompt, in the engine of the task, which is deterministic by default. `tokens_per_second` is the median over the rounds
after `WARM_UP` others, `is_identical` whether all rounds sampled the same tokens and log-probabilities.
"""

import dataclasses
import json
import logging
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing

import jax
import numpy as np
from arguments import split_arguments
from turn import wait_for_turn

from maxhydra import runtime
from maxhydra.config import Config
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.tasks.training import GrpoTask
from maxhydra.data import load_tokenizer
from maxhydra.decode.open import build_model
from maxhydra.measure.record import BenchTarget, peak_gib
from maxhydra.rl.episodes import Episode
from maxhydra.rl.policy_engine import PolicyEngine
from maxhydra.rl.rollout import unfiltered_sampling

SIZES = {"completions": 128, "group": 8, "prompt": 64, "new": 130, "rounds": 4}
TASK = ("task=grpo", "reward=exact", "data=arithmetic", "data.record_type=prompts")
# The first call compiles the programs, the second those that depend on the state after it.
WARM_UP = 2


def sample_rounds(config: Config, sizes: Mapping[str, int]) -> Iterator[tuple[float, list[Episode]]]:
    """Seconds and episodes of each round, with the same prompts and seeds."""
    task, length = config.task, sizes["prompt"] + sizes["new"]
    assert isinstance(task, GrpoTask)
    model, sharder = build_model(config)
    weights = jax.jit(model.init, out_shardings=sharder.tree(model.axes))(jax.random.key(config.run.seed))
    batch = sizes["completions"]
    engine = dataclasses.replace(task.engine, max_batch=batch, cache_tokens=2 * batch * length, max_context=length)
    groups = (batch // sizes["group"], sizes["prompt"])
    prompts = np.random.default_rng(0).integers(0, config.model.vocab_size, groups).tolist()
    sampling = unfiltered_sampling(sizes["new"], temperature=1.0)
    # No end-of-sequence token, so that all completions have the same length.
    policy = PolicyEngine(
        model, load_tokenizer(config.data), engine, sharder=sharder, eos=frozenset(), seed=config.run.seed
    )
    with closing(policy):
        for _ in range(WARM_UP + sizes["rounds"]):
            start = time.perf_counter()
            episodes = policy.generate(weights, prompts, sampling, samples=sizes["group"], number=0)
            yield time.perf_counter() - start, episodes


def main(arguments: list[str]) -> None:
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    own, overrides = split_arguments(arguments, SIZES)
    sizes = {**SIZES, **{name: int(value) for name, value in own.items()}}
    lengths = (f"train.seq_len={sizes['prompt'] + sizes['new']}", f"task.max_tokens={sizes['new']}")
    composed = compose([*TASK, *lengths, *overrides])
    wait_for_turn()
    machine = runtime.start(composed.config.hardware)
    target = BenchTarget(composed.config, machine, composed.choices, tuple(overrides))
    rounds = list(sample_rounds(composed.config, sizes))[WARM_UP:]
    tokens = sum(len(episode.tokens) for episode in rounds[0][1])
    speeds = [round(tokens / seconds, 1) for seconds, _ in rounds]
    sampled = [[(episode.tokens, episode.logprobs) for episode in episodes] for _, episodes in rounds]
    figures = {"tokens_per_second": statistics.median(speeds), "rounds_tokens_per_second": speeds}
    is_identical = all(each == sampled[0] for each in sampled)
    memory = {} if (peak := peak_gib()) is None else {"peak_memory_gib": round(peak, 2)}
    line = target.line("rollouts", **{**sizes, **figures, **memory}, is_identical=is_identical)
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
