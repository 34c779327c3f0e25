"""Transfer of the learning rate over widths with model.transfer: coordinate check, and loss by width and rate.

python bench/transfer.py --out build/transfer    # tables in Markdown, and the curves of the check as run folders
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra import data
from maxhydra.config import Config
from maxhydra.config.compose.composer import compose
from maxhydra.layers.context import Context
from maxhydra.record import MetricsWriter
from maxhydra.sharding import Sharder
from maxhydra.train import next_token_loss, plan_batches, plan_states
from maxhydra.train.state import StateFactory, TrainState
from maxhydra.train.step import make_step

BASE = 32
# The two parametrizations: with model.transfer, and without.
TRANSFERRED, STANDARD = "transfer", "standard"
# Last steps over which the loss is averaged.
TAIL = 10
SMALL = ["model.num_layers=2", "model.head_dim=16", "train.seq_len=32", "train.per_device_batch_size=16"]


def config_of(width: int, *, is_transferred: bool, steps: int, rate: float = 1.0) -> Config:
    """The tiny model at a width; heads and MLP grow with it."""
    sizes = [f"model.emb_dim={width}", f"model.mlp_dim={3 * width}", f"model.num_heads={width // 16}"]
    sizes += [f"model.num_kv_heads={width // 16}", *([f"model.transfer.base_width={BASE}"] if is_transferred else [])]
    schedule = ["optimizer/schedule=linear", f"train.steps={steps}", f"optimizer.schedule.warmup_steps={steps // 10}"]
    return compose([*SMALL, *sizes, *schedule, f"optimizer.learning_rate={rate}", "mesh.fsdp=1"]).config


def setup(config: Config, steps: int) -> tuple[StateFactory, Any]:
    """The states, and all batches of a run, stacked."""
    sharder = Sharder.from_config(config.mesh)
    states, loader = plan_states(config, sharder), data.train_loader(config.data, plan_batches(config, sharder))
    batches = [next(loader) for _ in range(steps)]
    loader.close()
    return states, jax.tree.map(lambda *arrays: jnp.stack(arrays), *batches)


def losses_by_rate(width: int, rates: Sequence[float], steps: int, *, is_transferred: bool) -> list[float]:
    """Mean loss of the last steps of one run per rate."""
    config = config_of(width, is_transferred=is_transferred, steps=steps)
    states, batches = setup(config, steps)
    loss = next_token_loss(states.model, states.sharder, config.train)

    @jax.jit
    def step(state: TrainState, batch: Any, rate: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        optimizer = dataclasses.replace(states.optimizer, schedule=lambda step: rate * states.optimizer.schedule(step))
        return make_step(loss, optimizer, config.train, cast=states.cast)(state, batch)

    found, initial = [], states.create(0)
    for rate in rates:
        state, seen = initial, []
        for number in range(steps):
            state, metrics = step(state, jax.tree.map(lambda array, at=number: array[at], batches), rate)
            seen.append(metrics["loss"])
        found.append(float(np.mean(seen[-TAIL:])))
    return found


def coordinates(width: int, steps: int, *, is_transferred: bool) -> list[dict[str, float]]:
    """RMS of hidden states and logits after each of the first steps, on a fixed batch."""
    config = config_of(width, is_transferred=is_transferred, steps=1000, rate=0.01)
    config = dataclasses.replace(
        config,
        optimizer=dataclasses.replace(
            config.optimizer, schedule=dataclasses.replace(config.optimizer.schedule, warmup_steps=0)
        ),
    )
    states, batches = setup(config, steps)
    loss = next_token_loss(states.model, states.sharder, config.train)
    step = jax.jit(make_step(loss, states.optimizer, config.train, cast=states.cast))
    first = jax.tree.map(lambda array: array[0], batches)

    @jax.jit
    def measure(params: Any) -> dict[str, jax.Array]:
        ctx = Context(positions=first["positions"], segments=None, sharder=states.sharder, cache=None, dropout_key=None)
        hidden, _ = states.model.hidden(params, first["tokens"], ctx)
        logits = states.model.logits(params, hidden, states.sharder)
        return {name: jnp.sqrt(jnp.mean(jnp.square(x))) for name, x in (("hidden", hidden), ("logits", logits))}

    state, seen = states.create(0), []
    for number in range(steps):
        seen.append({name: float(value) for name, value in measure(state.weights).items()})
        state, _ = step(state, jax.tree.map(lambda array, number=number: array[number], batches))
    return seen


def write_coordinates(folder: Path, seen: Sequence[dict[str, float]]) -> None:
    """Write the RMS by step as the metrics of a run folder, which scripts/curve_svg.py plots."""
    path = folder / "metrics.jsonl"
    path.unlink(missing_ok=True)
    writer = MetricsWriter(path)
    for step, values in enumerate(seen):
        writer.write(step, values)
    writer.close()


def print_coordinates(name: str, widths: Sequence[int], *, steps: int, out: Path) -> None:
    """Print the RMS of the logits by width and step."""
    print(f"\n{name}: RMS of the logits by width and step\n")
    print("| width | " + " | ".join(f"step {n}" for n in range(steps)) + " |\n|---|" + "---|" * steps)
    for width in widths:
        seen = coordinates(width, steps, is_transferred=name == TRANSFERRED)
        write_coordinates(out / name / f"width_{width}", seen)
        print(f"| {width} | " + " | ".join(f"{values['logits']:.3f}" for values in seen) + " |", flush=True)


def print_losses(name: str, widths: Sequence[int], rates: Sequence[float], *, steps: int) -> None:
    """Print the final loss by width and learning rate, and the best rate of each width."""
    print(f"\n{name}: loss by width and learning rate\n")
    print("| width | " + " | ".join(f"{rate:.4f}" for rate in rates) + " | best |")
    print("|---|" + "---|" * (len(rates) + 1))
    for width in widths:
        values = losses_by_rate(width, rates, steps, is_transferred=name == TRANSFERRED)
        best = rates[int(np.nanargmin(values))]
        print(f"| {width} | " + " | ".join(f"{value:.3f}" for value in values) + f" | {best:.4f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parametrizations", nargs="+", choices=(TRANSFERRED, STANDARD), default=[TRANSFERRED, STANDARD]
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0**-n for n in range(10, 3, -1)])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--check-steps", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    for name in args.parametrizations:
        print_coordinates(name, args.widths, steps=args.check_steps, out=args.out)
        print_losses(name, args.widths, args.rates, steps=args.steps)


if __name__ == "__main__":
    main()
