"""A short sample from the model at the end of a run, decoded through the same forward pass with a KV cache."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.config import Config, ConfigError
from maxhydra.config.schema.data import Data
from maxhydra.config.schema.kernels import ModelKernels
from maxhydra.config.schema.run import Sample
from maxhydra.data import Tokenizer, load_tokenizer
from maxhydra.data.chat import render_prompt
from maxhydra.layers import Context, DenseCacheSpec
from maxhydra.model import ModelDef
from maxhydra.model.block_decoder import BlockDecoder
from maxhydra.runtime import signals
from maxhydra.sharding import Sharder
from maxhydra.train.loop import TrainResult
from maxhydra.train.loss import Tree
from maxhydra.train.state import StateFactory

log = logging.getLogger("maxhydra")


def final_sample(config: Config, states: StateFactory, result: TrainResult) -> dict[str, object]:
    """The entry `sample` of run.json, if the config requests one and the run finished."""
    if not config.train.sample.tokens or result.status != "finished":
        return {}
    signals.set_phase("during the final sample")
    signals.check()
    # Named backends and tiles are chosen for training; decoding a few tokens with a cache has other shapes.
    model_config = dataclasses.replace(states.model.config, kernels=ModelKernels())  # type: ignore[call-arg]
    try:
        text = write_sample(
            dataclasses.replace(states.model, config=model_config),
            result.state.exchange_average().weights,
            config.data,
            config.train.sample,
            sharder=states.sharder,
            seed=config.run.seed,
        )
    except ConfigError as error:  # A mixer of the user without a cache, which trains but does not decode.
        log.warning("no sample: %s", error.problems[0])
        return {}
    return {"sample": text}


def write_sample(model: ModelDef, params: Tree, data: Data, sample: Sample, *, sharder: Sharder, seed: int) -> str:
    """Prompt and continuation, up to EOS, sample.tokens new tokens or the model's context length."""
    text_tokenizer = load_tokenizer(data)
    first_token = text_tokenizer.pad if text_tokenizer.bos is None else text_tokenizer.bos
    prompt = _encode_prompt(data, text_tokenizer, sample.prompt) or [first_token]
    length = min(len(prompt) + sample.tokens, model.config.context_length)
    if model.config.diffusion.block_size is not None:
        blocks = BlockDecoder(model, params, sharder, None).blocks(
            prompt, length, temperature=sample.temperature, seed=seed
        )
        generated = [token for block in blocks for token in block][: length - len(prompt)]
        end = generated.index(text_tokenizer.eos) if text_tokenizer.eos in generated else len(generated)
        return text_tokenizer.decode([*prompt, *generated[:end]])
    rows = sharder.num_shards("act_batch")
    replicated = sharder.sharding((None, None))

    def forward(
        params: Tree, cache: Tree, tokens: jax.Array, start: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, Tree]:
        positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
        context = Context(positions=positions, segments=None, sharder=sharder, cache=cache, dropout_key=None)
        hidden, cache = model.hidden(params, tokens, context)
        logits = model.logits(params, hidden[:, -1:], sharder)[:, 0]
        if sample.temperature == 0:
            token = jnp.argmax(logits, axis=-1)
        else:
            token = jax.random.categorical(
                jax.random.fold_in(jax.random.wrap_key_data(key), start), logits / sample.temperature
            )
        return jnp.broadcast_to(token[:1, None], (rows, 1)).astype(jnp.int32), cache

    def prefill(params: Tree, tokens: jax.Array, key: jax.Array) -> tuple[jax.Array, Tree]:
        return forward(params, model.empty_cache(DenseCacheSpec(rows, length)), tokens, jnp.int32(0), key)

    key = np.asarray(jax.random.key_data(jax.random.key(seed)))
    new_tokens: list[int] = []
    for position in range(len(prompt), length):
        if not new_tokens:
            prompt_rows = np.tile(np.array([prompt], np.int32), (rows, 1))
            token, cache = jax.jit(prefill, out_shardings=(replicated, None))(params, prompt_rows, key)
            decode_step = jax.jit(forward, donate_argnums=1, out_shardings=(replicated, None))
        else:
            token, cache = decode_step(params, cache, token, np.int32(position - 1), key)
        new_tokens.append(int(token[0, 0]))
        if new_tokens[-1] == text_tokenizer.eos:
            break
    return text_tokenizer.decode([*prompt, *new_tokens])


def _encode_prompt(data: Data, text_tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of the prompt; for chat data, and prompts of a chat model, of a conversation with one user message."""
    is_chat = data.record_type == "chat" or (data.record_type == "prompts" and text_tokenizer.chat_template is not None)
    if not is_chat:
        return text_tokenizer.encode(text)
    return text_tokenizer.encode_with_special_tokens(
        render_prompt([{"role": "user", "content": text}], text_tokenizer)
    )[0].tolist()
