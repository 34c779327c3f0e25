"""Transfer of the learning rate over widths with model.transfer: coordinate check, and loss by width and rate.

python bench/transfer.py --out build/transfer    # two tables in Markdown and two plots, minutes on two cores
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
from maxhydra.sharding import Sharder
from maxhydra.train import next_token_loss, plan_batches, plan_states
from maxhydra.train.state import StateFactory, TrainState
from maxhydra.train.step import make_step

BASE = 32
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


def plot(
    path: Path, title: str, x: Sequence[float], lines: dict[str, Sequence[float]], *, labels: tuple[str, str]
) -> None:
    """Write a plot with logarithmic axes."""
    import matplotlib  # not a dependency of maxhydra

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3.5))
    for name, values in lines.items():
        axes.plot(x, values, marker="o", label=name)
    axes.set(xscale="log", xlabel=labels[0], ylabel=labels[1], title=title)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0**-n for n in range(10, 3, -1)])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--check-steps", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for is_transferred, name in ((True, "transfer"), (False, "standard")):
        seen = {width: coordinates(width, args.check_steps, is_transferred=is_transferred) for width in args.widths}
        lines = {f"step {n}": [seen[width][n]["logits"] for width in args.widths] for n in range(args.check_steps)}
        plot(
            args.out / f"coordinates_{name}.png", f"{name}: RMS of logits", args.widths, lines, labels=("width", "RMS")
        )
        print(f"\n{name}: RMS of the logits by width and step\n")
        print("| width | " + " | ".join(lines) + " |\n|---|" + "---|" * len(lines))
        for at, width in enumerate(args.widths):
            print(f"| {width} | " + " | ".join(f"{values[at]:.3f}" for values in lines.values()) + " |")
        losses = {
            width: losses_by_rate(width, args.rates, args.steps, is_transferred=is_transferred) for width in args.widths
        }
        curves = {f"width {width}": values for width, values in losses.items()}
        plot(args.out / f"rates_{name}.png", f"{name}: loss", args.rates, curves, labels=("learning rate", "loss"))
        print(f"\n{name}: loss by width and learning rate\n")
        print("| width | " + " | ".join(f"{rate:.4f}" for rate in args.rates) + " | best |")
        print("|---|" + "---|" * (len(args.rates) + 1))
        for width, values in losses.items():
            best = args.rates[int(np.nanargmin(values))]
            print(f"| {width} | " + " | ".join(f"{value:.3f}" for value in values) + f" | {best:.4f} |", flush=True)


if __name__ == "__main__":
    main()
