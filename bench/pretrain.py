"""Speed of the training step on this machine, with any overrides of the command line. One JSON line.

python bench/pretrain.py model=llama3.2-1b train.seq_len=4096 train.per_device_batch_size=8 model.remat.policy=minimal

`maxhydra task=bench` measures the same, and keeps it as a run. XLA_FLAGS of the shell are told in the line.
"""

import json
import os
import sys

from subject import opened

from maxhydra.measure.training import Prepared, measure_training
from maxhydra.measure.training import prepare as prepare_step


def prepare(overrides: list[str]) -> Prepared:
    """The training step of these overrides, compiled."""
    subject, _ = opened(overrides)
    return prepare_step(subject.config, subject.machine)


def main(overrides: list[str]) -> None:
    # Before the hardware's own are added.
    flags = os.environ.get("XLA_FLAGS", "").split()
    subject, task = opened(overrides)
    line = measure_training(subject, warm_up=task.warm_up, steps=task.steps)
    print(json.dumps({**line, "xla_flags": " ".join(flags)} if flags else line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
