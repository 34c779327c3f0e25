"""Speed of the training step on this machine, with any overrides of the command line. One JSON line.

python bench/pretrain.py model=llama3.2-1b train.seq_len=4096 train.per_device_batch_size=8 model.remat.policy=minimal

`maxhydra task=bench` measures the same, and keeps it as a run.
"""

import json
import sys

from subject import opened

from maxhydra.measure.training import CompiledStep, measure_training
from maxhydra.measure.training import prepare as prepare_step


def prepare(overrides: list[str]) -> CompiledStep:
    """The training step of these overrides, compiled."""
    subject, _ = opened(overrides)
    return prepare_step(subject.config, subject.machine)


def main(overrides: list[str]) -> None:
    subject, task = opened(overrides)
    print(json.dumps(measure_training(subject, warm_up=task.warm_up, steps=task.steps)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
