"""The engine's speed on this machine, with any overrides of the command line. One line of JSON per batch.

    python bench/decode.py model=smollm2-135m-instruct model.dtypes.compute=float32
    python bench/decode.py model=llama3.2-1b batch=1,8,64 prompt=64 new=64       # without weights: fresh ones

As bench/peers/decode_hf.py measures transformers: all prompts are asked at once, `tokens_per_second` is over the whole
call, `tokens_per_second_after_first` over the tokens after each sequence's first, `tokens_per_second_steady` over the
time in which all sequences run, from the first token of the last to the end of the first, and `first_token_s` the time
until the first token of the last sequence; the best of `repeats`, after calls in which programs are compiled, until one
had all it needs. `maxhydra task=bench task.what=[decode]` measures the same, and keeps it as a run.
"""

import json
import os
import sys

from own import split_own
from subject import opened

from maxhydra.measure.decoding import measure_decoding

OWN = {"batch": "batches", "prompt": "prompt", "new": "new", "repeats": "repeats"}


def main(arguments: list[str]) -> None:
    own, overrides = split_own(arguments, OWN)
    load = [f"task.load.{OWN[name]}={f'[{value}]' if name == 'batch' else value}" for name, value in own.items()]
    subject, task = opened(overrides, "task.what=[decode]", *load)
    for line in measure_decoding(subject, task.load, task.engine):
        print(json.dumps({**line, "load": os.getloadavg()[0]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
