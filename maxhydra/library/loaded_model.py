"""The model of a run with its weights."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from maxhydra import runtime
from maxhydra.config.schema.config import Config
from maxhydra.config.schema.quantization import Quantization
from maxhydra.config.schema.run import Sample
from maxhydra.data import Tokenizer, load_tokenizer
from maxhydra.decode.open import build_model, load_params
from maxhydra.layers import Context
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder
from maxhydra.train import write_sample


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model, its weights as a tree of arrays in the compute dtype, and its tokenizer."""

    config: Config
    model: ModelDef
    params: Any
    sharder: Sharder

    @property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.config.data)

    def logits(self, tokens: Any) -> jax.Array:
        """Logits [B, T, V] of the next token at every position of token ids [B, T]."""
        given = jnp.asarray(tokens, jnp.int32)
        # All devices that share a batch get the same number of rows.
        padding = -len(given) % self.sharder.num_shards("act_batch")
        ids = jnp.pad(given, ((0, padding), (0, 0)))
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        context = Context(positions=positions, segments=None, sharder=self.sharder, cache=None, dropout_key=None)
        hidden_BTD, _ = self.model.hidden(self.params, ids, context)
        return self.model.logits(self.params, hidden_BTD, self.sharder)[: len(given)]

    def generate(self, prompt: str, *, tokens: int = 100, temperature: float = 0.8, seed: int = 0) -> str:
        """Prompt and continuation; for many prompts use task=decode, which batches them."""
        sample = Sample(tokens=tokens, prompt=prompt, temperature=temperature)
        return write_sample(self.model, self.params, self.config.data, sample, sharder=self.sharder, seed=seed)


def load_model(config: Config, checkpoint: Path) -> LoadedModel:
    """Load the weights of a checkpoint of a run with this config."""
    runtime.start(config.hardware)
    weights = dataclasses.replace(config.checkpoint, load_parameters=str(checkpoint))
    # The format in which a run computes is not that of its weights.
    config = dataclasses.replace(config, checkpoint=weights, quantization=Quantization())  # type: ignore[call-arg]
    model, sharder = build_model(config)
    return LoadedModel(config, model, load_params(config, model, sharder), sharder)
