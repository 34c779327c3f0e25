"""Measures the decode engine's speed on this machine, with any config overrides. One JSON line per batch size.

    python bench/decode.py model=smollm2-135m-instruct model.dtypes.compute=float32
    python bench/decode.py model=llama3.2-1b batch=1,8,64 prompt=64 new=64       # random weights

Same method as bench/peers/decode_hf.py for transformers: all prompts are submitted at once. `tokens_per_second` is over
the whole call, `tokens_per_second_after_first` over the tokens after each sequence's first, `tokens_per_second_steady`
over the time in which all sequences run, from the first token of the last one to the end of the first one, and
`first_token_s` is the time until the first token of the last sequence. Best of `repeats`, after warm-up calls until one
of them compiles nothing. `maxhydra task=bench task.what=[decode]` measures the same and records it as a run.
"""

import json
import os
import sys

from arguments import split_arguments
from target import open_target

from maxhydra.measure.decoding import measure_decoding

TASK_KEYS = {"batch": "batches", "prompt": "prompt", "new": "new", "repeats": "repeats"}


def main(arguments: list[str]) -> None:
    own, overrides = split_arguments(arguments, TASK_KEYS)
    load = [f"task.load.{TASK_KEYS[name]}={f'[{value}]' if name == 'batch' else value}" for name, value in own.items()]
    target, task = open_target(overrides, "task.what=[decode]", *load)
    for line in measure_decoding(target, task.load, task.engine):
        print(json.dumps({**line, "load": os.getloadavg()[0]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
