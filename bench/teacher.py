"""A teacher in place of a trained model: it makes random weights write given texts, with errors at a given rate.

The programs are those of the engine, with two additions to the logits before sampling: the largest for the next token
of the text, and at a part of the positions a larger one for a token that no JSON has. A mask excludes the latter, so
that the text is the same at every rate, and only the number of rejected tokens differs. The seed of a request selects
its text and its rate, so that all of them use the same programs.
"""

import random
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from maxhydra.decode import step_functions

# Texts, and tokens per text.
TEXTS, LENGTH = 32, 1024
# Larger than any logit of random weights, and exact in float32.
BIAS = 2.0**14
RATE_BITS = 2**32 - 1
VOCABULARY = ['[{"', "id", '":', " ", ",", ' "', "text", '"},', ' {"', ".", *map(str, range(100, 1000))]


def seed_of(text: int, rate: float) -> int:
    """The seed of a request that follows a text with this part of errors."""
    return int(rate * RATE_BITS) << 32 | text


def write_texts(ids: dict[bytes, int], count: int = TEXTS) -> np.ndarray:
    """Tokens [count, LENGTH] of JSON lists whose strings have random parts of the vocabulary. `ids`: token by bytes."""
    choices = [token for token in ids if token.isalpha() and token.islower() and len(token) > 2]
    texts = np.empty((count, LENGTH), np.int32)
    for number, choose in enumerate(map(random.Random, range(count))):
        pieces: list[bytes] = []
        while len(pieces) < LENGTH:
            begin = b' {"' if pieces else b'[{"'
            pieces += [begin, b"id", b'":', b" ", b"%d" % choose.randrange(100, 1000), b","]
            pieces += [b' "', b"text", b'":', b' "', *choose.choices(choices, k=choose.randrange(8, 24)), b'"},']
        texts[number] = [ids[piece] for piece in pieces[:LENGTH]]
    return texts


def use_teacher(tokens: np.ndarray, wrong_token: int, prompt_length: int) -> None:
    """Let programs that are compiled from now on follow these texts [N, LENGTH]."""
    sample_slots: Callable[..., Any] = step_functions.sample_slots
    texts, count = jnp.asarray(tokens), len(tokens)

    def sample_taught(features: Any, state: Any, logits_BV: Any, slots_B: Any, sampling: Any, *masks: Any) -> Any:
        rate_B, text_B = sampling.seed_B2.T
        at_B, column_V = jnp.clip(sampling.position_B - prompt_length, 0, LENGTH - 1), jnp.arange(logits_BV.shape[1])
        token_B = texts[text_B.astype(jnp.int32) % count, at_B]
        noise_B = _hash(text_B * jnp.uint32(LENGTH) + at_B.astype(jnp.uint32))
        wrong_B = jnp.where(noise_B < rate_B, 2 * BIAS, 0)
        # Sums, which are computed together with what samples: a scatter would copy logits that are kept.
        added_BV = jnp.where(column_V == token_B[:, None], BIAS, 0)
        added_BV += jnp.where(column_V == wrong_token, wrong_B[:, None], 0)
        logits_BV += added_BV.astype(logits_BV.dtype)
        return sample_slots(features, state, logits_BV, slots_B, sampling, *masks)

    step_functions.sample_slots = sample_taught


def _hash(values: Any) -> Any:
    for shift, factor in ((16, 2246822519), (13, 3266489917)):
        values = (values ^ (values >> shift)) * jnp.uint32(factor)
    return values ^ (values >> 16)
