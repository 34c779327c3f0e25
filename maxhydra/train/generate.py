"""A little text from the model at the end of a run, through the same forward with a cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.config import Config
from maxhydra.config.schema.data import Data
from maxhydra.config.schema.kernels import ModelKernels
from maxhydra.config.schema.run import Sample
from maxhydra.data import Tokenizer, tokenizer
from maxhydra.data.chat import render_prompt
from maxhydra.layers import Context, DenseCacheSpec
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder
from maxhydra.train.loop import TrainResult
from maxhydra.train.state import StateFactory, Tree


def final_sample(config: Config, states: StateFactory, ending: TrainResult) -> dict[str, object]:
    """`sample`, where the config asks for one and the run came to its end."""
    if not config.train.sample.tokens or ending.status != "finished":
        return {}
    # A backend or a tile that is named is for training, and few tokens with a cache are another call.
    freely = dataclasses.replace(states.model.config, kernels=ModelKernels())  # type: ignore[call-arg]
    text = write_sample(
        dataclasses.replace(states.model, config=freely),
        ending.state.weights,
        config.data,
        config.train.sample,
        sharder=states.sharder,
        seed=config.run.seed,
    )
    return {"sample": text}


def write_sample(model: ModelDef, params: Tree, data: Data, sample: Sample, *, sharder: Sharder, seed: int) -> str:
    """Prompt and continuation, at most as long as the model's context; ends at the end-of-text token."""
    words = tokenizer(data)
    prompt = _prompt(data, words, sample.prompt) or [words.pad if words.bos is None else words.bos]
    length = min(len(prompt) + sample.tokens, model.config.context_length)
    rows = sharder.ways("act_batch")
    replicated = sharder.sharding((None, None))

    def forward(
        params: Tree, cache: Tree, tokens: jax.Array, start: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, Tree]:
        positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
        context = Context(positions=positions, segments=None, sharder=sharder, cache=cache, dropout_key=None)
        hidden, cache = model.hidden(params, tokens, context)
        logits = model.logits(params, hidden[:, -1:], sharder)[:, 0]
        if sample.temperature == 0:
            chosen = jnp.argmax(logits, axis=-1)
        else:
            chosen = jax.random.categorical(
                jax.random.fold_in(jax.random.wrap_key_data(key), start), logits / sample.temperature
            )
        return jnp.broadcast_to(chosen[:1, None], (rows, 1)).astype(jnp.int32), cache

    def begin(params: Tree, tokens: jax.Array, key: jax.Array) -> tuple[jax.Array, Tree]:
        return forward(params, model.empty_cache(DenseCacheSpec(rows, length)), tokens, jnp.int32(0), key)

    key = np.asarray(jax.random.key_data(jax.random.key(seed)))
    written: list[int] = []
    for position in range(len(prompt), length):
        if not written:
            first = np.tile(np.array([prompt], np.int32), (rows, 1))
            chosen, cache = jax.jit(begin, out_shardings=(replicated, None))(params, first, key)
            advance = jax.jit(forward, donate_argnums=1, out_shardings=(replicated, None))
        else:
            chosen, cache = advance(params, cache, chosen, np.int32(position - 1), key)
        written.append(int(chosen[0, 0]))
        if written[-1] == words.eos:
            break
    return words.decode([*prompt, *written])


def _prompt(data: Data, words: Tokenizer, text: str) -> list[int]:
    """Text to go on from; where a model learns conversations, what a user says in one."""
    if data.record_type != "chat":
        return words.encode(text)
    return words.encode_marked(render_prompt([{"role": "user", "content": text}], words))[0].tolist()
