"""Random weights in place of a checkpoint, with a vocabulary of the model's size: for measurements of the engine.

python bench/random_weights.py OVERRIDES...   runs maxhydra with weights that are not read from anywhere
"""

import random
import runpy
from collections.abc import Collection
from pathlib import Path


def use_random_weights() -> None:
    """Replace the function that loads the weights of inference tasks, in this process."""
    from maxhydra.decode import open as opened
    from maxhydra.measure import decoding

    opened.load_params = decoding.random_params
    opened.check_weights_source = lambda config: None


def write_tokenizer(folder: str, vocab_size: int, *, extra: str = "", tokens: Collection[str] = ()) -> list[str]:
    """Write a byte-level tokenizer with tokens of a few random letters, so that random tokens decode to text.

    Returns the overrides that select it. `extra`: characters that tokens may contain in addition to small letters.
    `tokens`: further tokens; a part of a text that is one of them is encoded as such.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    choose, vocabulary = (
        random.Random(0),
        dict.fromkeys([*letters, *(token.replace(" ", "\u0120") for token in tokens)]),
    )
    while len(vocabulary) < vocab_size - 1:
        vocabulary["".join(choose.choices("abcdefghijklmnopqrstuvwxyz" + extra, k=choose.randrange(2, 8)))] = None
    ids = {token: id for id, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(ids, [], ignore_merges=bool(tokens)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(f"{folder}/tokenizer.json")
    Path(folder, "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    return ["data.tokenizer.kind=hf", f"data.tokenizer.path={folder}"]


if __name__ == "__main__":
    use_random_weights()
    runpy.run_module("maxhydra", run_name="__main__", alter_sys=True)
