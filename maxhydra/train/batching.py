"""How many sequences a step takes, and how they lie on the mesh."""

import math

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.data import BatchSpec, RowSpec
from maxhydra.sharding import Sharder


def plan_batches(config: Config, sharder: Sharder) -> BatchSpec:
    """The global batch: per_device_batch_size x devices x grad_accum, checked against how the mesh splits it."""
    train, devices = config.train, sharder.mesh.size
    micro_batch = train.per_device_batch_size * devices
    ways = sharder.ways("act_batch")
    if micro_batch != int(micro_batch) or int(micro_batch) % ways:
        fits = f"a multiple of {ways}/{devices}" if ways != devices else "a whole number"
        raise ConfigError(
            Problem(
                "train.per_device_batch_size",
                f"makes {micro_batch:g} sequences on {devices} devices, which the mesh splits {ways} ways",
                value=train.per_device_batch_size,
                accepted=fits,
            )
        )
    length_ways = sharder.ways("act_length")
    if train.seq_len % length_ways:
        raise ConfigError(
            Problem(
                "train.seq_len",
                f"is split {length_ways} ways by mesh.sequence={length_ways}",
                value=train.seq_len,
                accepted=f"a multiple of {length_ways}",
                hint=f"{math.ceil(train.seq_len / length_ways) * length_ways} is the next",
            )
        )
    return BatchSpec(
        rows=RowSpec(seq_len=train.seq_len, vocab_size=config.model.vocab_size, seed=config.run.seed),
        batch=int(micro_batch) * train.grad_accum,
        sharding=sharder.sharding(("act_batch", "act_length")),
    )
