"""Reward models as reward terms: they score the token ids of rollouts on the devices of the run.

A reward model sees the ids that the policy sampled, so it must have the policy's tokenizer; another one is rejected,
because text that is tokenized again can have other ids than those that were sampled.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from omegaconf import DictConfig, OmegaConf

from maxhydra import model
from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.data import Tokenizer
from maxhydra.config.schema.model import Head, Model
from maxhydra.config.schema.reward import RewardKind
from maxhydra.config.serialize import from_yaml
from maxhydra.convert.adapter_lineage import run_folder
from maxhydra.convert.hf_config import build_model, hf_model_section, hf_run_section, is_hf_folder
from maxhydra.convert.load import load_weights
from maxhydra.data.tokenizers import input_files, template_files
from maxhydra.modelfiles import locate
from maxhydra.record.fingerprint import fingerprint_files
from maxhydra.rl.reward_process import Score
from maxhydra.rl.rewards import Sample
from maxhydra.sharding import Sharder
from maxhydra.train.loss import SequenceScorer


class RewardModel:
    """Scores samples in batches of `rows` sequences of `length` tokens; a collective call."""

    def __init__(self, scorer: SequenceScorer, weights: Any, *, rows: int, length: int):
        sharder = scorer.sharder
        self._weights, self._shape = weights, (rows, length)
        self._row_sharding = sharder.sharding(("act_batch", "act_length"))
        self._last_sharding = sharder.sharding(("act_batch",))
        # Replicated, so that every process can read all of them.
        self._score = jax.jit(lambda weights, rows: scorer(weights, rows)[0], out_shardings=sharder.sharding(()))

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        rows = self._shape[0]
        parts = [self._score_rows(samples[start : start + rows]) for start in range(0, len(samples), rows)]
        values = np.concatenate(parts)[: len(samples)] if parts else np.zeros(0)
        return [float(value) if np.isfinite(value) else f"returned {value}" for value in values]

    def _score_rows(self, samples: Sequence[Sample]) -> np.ndarray:
        tokens, last = np.zeros(self._shape, np.int32), np.zeros(self._shape[:1], np.int32)
        for row, sample in enumerate(samples):
            tokens[row, : len(sample.ids)] = sample.ids
            last[row] = len(sample.ids) - 1
        index = np.arange(self._shape[1], dtype=np.int32)
        positions = np.where(index <= last[:, None], index, 0)
        rows = {name: self._place(column) for name, column in (("tokens", tokens), ("positions", positions))}
        return np.asarray(self._score(self._weights, {**rows, "last": self._place(last)}))

    def _place(self, column: np.ndarray) -> jax.Array:
        sharding = self._row_sharding if column.ndim > 1 else self._last_sharding
        return jax.make_array_from_callback(column.shape, sharding, lambda index: column[index])


def open_reward_models(config: Config, sharder: Sharder, *, rows: int) -> dict[str, RewardModel]:
    """The reward models of config.reward by term, with their weights in the compute dtype.

    `rows`: sequences that are scored at a time, rounded up to a multiple of the devices that share a batch.
    """
    terms = {name: term.weights for name, term in config.reward.terms.items() if term.kind is RewardKind.model}
    # Rollouts have one token more than train.seq_len; a sharded length is divisible.
    shards = sharder.num_shards("act_length")
    length = -(-(config.train.seq_len + 1) // shards) * shards
    return {
        name: _open(f"reward.terms.{name}.weights", str(location), config, sharder, rows, length)
        for name, location in terms.items()
    }


def _open(key: str, location: str, config: Config, sharder: Sharder, rows: int, length: int) -> RewardModel:
    model_config, tokenizer = _resolve(key, location)
    if problems := list(_problems(key, location, model_config, tokenizer, config)):
        raise ConfigError(problems)
    decoder = model.build(model_config)
    decoder.check_mesh(sharder)
    weights = load_weights(
        location,
        decoder,
        shardings=sharder.tree(decoder.axes),
        dtype=jnp.dtype(model_config.dtypes.compute.value),
        key=key,
    )
    shards = sharder.num_shards("act_batch")
    return RewardModel(SequenceScorer(decoder, sharder), weights, rows=-(-rows // shards) * shards, length=length)


def _resolve(key: str, location: str) -> tuple[Model, Tokenizer | None]:
    """The model and the tokenizer of a location; None if a folder has no tokenizer."""
    if is_hf_folder(locate(key, location)):
        values = build_model(key, location, hf_model_section(key, location)["model"])
        tokenizer = hf_run_section(location).get("data", {}).get("tokenizer")
        return values, None if tokenizer is None else Tokenizer(**tokenizer)
    run = run_folder(location)
    if run is None:
        accepted = "a run of task=reward_model, its checkpoint, or a Hugging Face folder"
        raise ConfigError(Problem(key, "is not a run folder, so its model is unknown", location, accepted))
    content = OmegaConf.load(run / "config.yaml")
    assert isinstance(content, DictConfig)
    # Its other data may no longer exist.
    content["data"] = {"tokenizer": content["data"]["tokenizer"]}
    trained = from_yaml(OmegaConf.to_yaml(content), str(run / "config.yaml"))
    return trained.model, trained.data.tokenizer


def _problems(
    key: str, location: str, model_config: Model, tokenizer: Tokenizer | None, config: Config
) -> Iterator[Problem]:
    if model_config.head is not Head.score:
        hint = "train one with task=reward_model model.head=score"
        yield Problem(key, "is a language model, not a reward model", value=location, hint=hint)
    if tokenizer is not None and (difference := _tokenizer_difference(tokenizer, config.data.tokenizer)):
        reason = f"has another tokenizer than the policy: {difference}"
        yield Problem(key, reason, value=location, accepted="a reward model with the policy's tokenizer")
    if tokenizer is None and model_config.vocab_size != config.model.vocab_size:
        sizes = f"a vocabulary of {model_config.vocab_size} instead of the policy's {config.model.vocab_size}"
        reason = f"has no tokenizer files, and {sizes}"
        yield Problem(key, reason, value=location, accepted="a reward model with the policy's tokenizer")
    if model_config.context_length <= config.train.seq_len:
        reason = (
            f"has a context_length of {model_config.context_length}, and rollouts have up to train.seq_len + 1 tokens"
        )
        yield Problem(
            key, reason, value=location, hint=f"set train.seq_len to {model_config.context_length - 1} or less"
        )


def _tokenizer_difference(own: Tokenizer, policy: Tokenizer) -> str:
    """How two tokenizers differ, by their settings and the content of their files; empty if they do not."""
    for name in ("kind", "bos", "eos"):
        if getattr(own, name) != getattr(policy, name):
            return f"data.tokenizer.{name} is {getattr(own, name)} there, here {getattr(policy, name)}"
    if _digest(input_files(own)) != _digest(input_files(policy)):
        return f"the files of {own.path} and {policy.path} differ"
    templates = [template_files(tokenizer) for tokenizer in (own, policy)]
    if all(templates) and _digest(templates[0]) != _digest(templates[1]):
        return f"the chat templates {templates[0][0]} and {templates[1][0]} differ"
    return ""


def _digest(paths: Any) -> str:
    return str(fingerprint_files(paths)["digest"]) if paths else ""
