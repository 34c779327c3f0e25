"""Measures the speed of the training step on this machine, with any config overrides. Prints one JSON line.

python bench/pretrain.py model=llama3.2-1b train.seq_len=4096 train.per_device_batch_size=8 model.remat.policy=minimal

`maxhydra task=bench` measures the same and records it as a run.
"""

import json
import sys

from target import open_target

from maxhydra.measure.training import CompiledStep, measure_training
from maxhydra.measure.training import prepare as prepare_step


def prepare(overrides: list[str]) -> CompiledStep:
    """Compile the training step of these overrides."""
    target, _ = open_target(overrides)
    return prepare_step(target.config, target.machine)


def main(overrides: list[str]) -> None:
    target, task = open_target(overrides)
    print(json.dumps(measure_training(target, warm_up=task.warm_up, steps=task.steps)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
