"""Short samples from the model, at evaluations and at the end of a run, from its forward pass with a KV cache."""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from itertools import islice

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
from maxhydra.record import RunDirectory
from maxhydra.record.rollout_store import RolloutWriter
from maxhydra.record.rollouts import EVAL, FOLDER
from maxhydra.runtime import signals
from maxhydra.sharding import Sharder
from maxhydra.train.evaluate import Evaluate
from maxhydra.train.loop import TrainResult
from maxhydra.train.loss import Tree
from maxhydra.train.state import StateFactory, TrainState

log = logging.getLogger("maxhydra")


# Samples of evaluations that a run keeps.
STORED_SAMPLES = 100_000
# (weights, seed) -> a sampled text, and its new tokens.
Sampler = Callable[[Tree, int], "SampledText"]
TokenFn = Callable[[Tree, int], Iterator[int]]


@dataclasses.dataclass(frozen=True)
class SampledText:
    """A prompt as the model reads it and its continuation, without EOS."""

    prompt: str
    text: str
    """Both."""
    num_tokens: int
    finish: str
    """`stop` after EOS, `length` after sample.tokens tokens or at the model's context length."""

    def record(self) -> dict[str, object]:
        """A line of the run's rollouts; see record/rollout_store.py. It has no reward."""
        completion = self.text.removeprefix(self.prompt)
        fields = {"prompt_number": -1, "sample": 0, "prompt": self.prompt, "completion": completion, "reward": 0.0}
        return {**fields, "tokens": self.num_tokens, "finish": self.finish}


def final_sample(config: Config, states: StateFactory, result: TrainResult) -> dict[str, object]:
    """The entry `sample` of run.json, if the config requests one and the run finished."""
    if not config.train.sample.tokens or result.status != "finished":
        return {}
    signals.set_phase("during the final sample")
    signals.check()
    try:
        sampled = _make_sampler(config, states)(result.state.exchange_average().weights, config.run.seed)
    except ConfigError as error:  # A mixer of the user without a cache, which trains but does not decode.
        log.warning("no sample: %s", error.problems[0])
        return {}
    return {"sample": sampled.text}


def with_samples(evaluate: Evaluate | None, config: Config, states: StateFactory, run: RunDirectory) -> Evaluate | None:
    """`evaluate`, which with train.sample.at_evaluations also adds a sample to the run's rollouts of evaluations.

    All samples of a run have the same prompt and seed, so that they differ only by the weights. A session that repeats
    an evaluation replaces its sample.
    """
    section = config.train.sample
    if not (section.tokens and section.at_evaluations):
        return evaluate
    sampler = _make_sampler(config, states)
    writer = RolloutWriter(run.path / FOLDER, EVAL, keep=STORED_SAMPLES) if run.writes else None

    def evaluate_and_sample(state: TrainState) -> dict[str, float]:
        metrics = {} if evaluate is None else evaluate(state)
        sampled = sampler(state.weights, config.run.seed)
        if writer is not None:
            writer.append(int(state.step), [sampled.record()])
        return metrics

    return evaluate_and_sample


def _make_sampler(config: Config, states: StateFactory) -> Sampler:
    # Named backends and tiles are chosen for training; decoding a few tokens with a cache has other shapes.
    model_config = dataclasses.replace(states.model.config, kernels=ModelKernels())  # type: ignore[call-arg]
    model = dataclasses.replace(states.model, config=model_config)
    return make_sampler(model, config.data, config.train.sample, sharder=states.sharder)


def write_sample(model: ModelDef, params: Tree, data: Data, sample: Sample, *, sharder: Sharder, seed: int) -> str:
    """Prompt and continuation, up to EOS, sample.tokens new tokens or the model's context length."""
    return make_sampler(model, data, sample, sharder=sharder)(params, seed).text


def make_sampler(model: ModelDef, data: Data, sample: Sample, *, sharder: Sharder) -> Sampler:
    """A function that samples a continuation of sample.prompt; it is compiled once."""
    text_tokenizer = load_tokenizer(data)
    first_token = text_tokenizer.pad if text_tokenizer.bos is None else text_tokenizer.bos
    prompt = _encode_prompt(data, text_tokenizer, sample.prompt) or [first_token]
    length = min(len(prompt) + sample.tokens, model.config.context_length)
    continue_prompt = _block_sampler if model.config.diffusion.block_size is not None else _token_sampler
    tokens_of = continue_prompt(model, prompt, sample, length=length, sharder=sharder)

    def sample_text(params: Tree, seed: int) -> SampledText:
        generated: list[int] = []
        for token in islice(tokens_of(params, seed), length - len(prompt)):
            generated.append(token)
            if token == text_tokenizer.eos:
                break
        finish = "stop" if text_tokenizer.eos in generated else "length"
        texts = text_tokenizer.decode(prompt), text_tokenizer.decode([*prompt, *generated])
        return SampledText(*texts, num_tokens=len(generated), finish=finish)

    return sample_text


def _block_sampler(model: ModelDef, prompt: list[int], sample: Sample, *, length: int, sharder: Sharder) -> TokenFn:
    """Tokens of a block diffusion model."""

    def tokens_of(params: Tree, seed: int) -> Iterator[int]:
        decoder = BlockDecoder(model, params, sharder, None)
        for block in decoder.blocks(prompt, length, temperature=sample.temperature, seed=seed):
            yield from block

    return tokens_of


def _token_sampler(model: ModelDef, prompt: list[int], sample: Sample, *, length: int, sharder: Sharder) -> TokenFn:
    """Tokens of a model that predicts the next one, with a dense cache. All rows of the batch are the same."""
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

    prefill_step = jax.jit(prefill, out_shardings=(replicated, None))
    decode_step = jax.jit(forward, donate_argnums=1, out_shardings=(replicated, None))

    def tokens_of(params: Tree, seed: int) -> Iterator[int]:
        key = np.asarray(jax.random.key_data(jax.random.key(seed)))
        token, cache = prefill_step(params, np.tile(np.array([prompt], np.int32), (rows, 1)), key)
        for position in range(len(prompt), length):
            yield int(token[0, 0])
            token, cache = decode_step(params, cache, token, np.int32(position), key)

    return tokens_of


def _encode_prompt(data: Data, text_tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of the prompt; for chat data, and prompts of a chat model, of a conversation with one user message."""
    is_chat = data.record_type == "chat" or (data.record_type == "prompts" and text_tokenizer.chat_template is not None)
    if not is_chat:
        return text_tokenizer.encode(text)
    return text_tokenizer.encode_with_special_tokens(
        render_prompt([{"role": "user", "content": text}], text_tokenizer)
    )[0].tolist()
