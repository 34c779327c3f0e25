"""Bits per byte of held-out text do not depend on batches, packing or the tokenizer; named held-out sets."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Library

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.data import Corpus, Data, Packing, PackingMethod
from maxhydra.config.schema.data import Tokenizer as TokenizerConfig
from maxhydra.data import BatchSpec, RowSpec
from maxhydra.train import StateFactory, held_out_likelihood, next_token_loss
from tests.support.cli import SMALL
from tests.support.states import plan
from tests.support.vocabularies import byte_level, save

LINES = ["To be, or not to be", "naïve café 日本語 🎭", "that is the question:", "whether 'tis nobler", "in the mind"]
SEQ_LEN = 64


@pytest.fixture(scope="module")
def states() -> StateFactory:
    return plan("model.vocab_size=640", f"model.context_length={SEQ_LEN}", f"train.seq_len={SEQ_LEN}")[0]


def evaluate(states: StateFactory, data: Data, *, batch: int = 2) -> dict[str, float]:
    config = compose([*SMALL, f"train.seq_len={SEQ_LEN}"]).config
    sharding = states.sharder.sharding(("act_batch", None))
    spec = BatchSpec(RowSpec(seq_len=SEQ_LEN, vocab_size=640, seed=0), batch, sharding)
    loss = next_token_loss(states.model, states.sharder, config.train)
    run = held_out_likelihood(loss, data, spec, dataclasses.replace(config.train, eval_batches=100, grad_accum=1))
    assert run is not None
    return run(states.create(0))


def write_lines(path: Path, lines: Sequence[str] = LINES) -> str:
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return str(path)


def lines_data(path: str, tokenizer: TokenizerConfig, method: PackingMethod = PackingMethod.auto) -> Data:
    packing = Packing(method=method)
    return Data(source="grain", path=path, eval_path=path, tokenizer=tokenizer, packing=packing)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> TokenizerConfig:
    folder = save(byte_level(["<s>", "</s>"]), tmp_path_factory.mktemp("bpe"), bos_token="<s>", eos_token="</s>")
    return TokenizerConfig(kind="hf", path=str(folder))


@pytest.mark.slow
def test_bits_per_byte_are_those_of_the_text(states: StateFactory, bpe: TokenizerConfig, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl")
    size = sum(len(line.encode()) for line in LINES)
    for tokenizer in (TokenizerConfig(), bpe):
        found = evaluate(states, lines_data(path, tokenizer))
        expected = found["eval/loss"] * found["eval/tokens"] / math.log(2) / size
        np.testing.assert_allclose(found["eval/bpb"], expected, rtol=1e-6)
        other = evaluate(states, lines_data(path, tokenizer, PackingMethod.none), batch=4)
        np.testing.assert_allclose(other["eval/bpb"], found["eval/bpb"], rtol=1e-5)


@pytest.mark.slow
def test_files_of_text_are_counted_in_bytes(states: StateFactory, bpe: TokenizerConfig, tmp_path: Path) -> None:
    """The first token of a file is not predicted, so its bytes do not count."""
    text = "\n".join(LINES)
    (tmp_path / "x.txt").write_text(text, encoding="utf-8")
    path = str(tmp_path / "x.txt")
    for tokenizer in (TokenizerConfig(), bpe):
        found = evaluate(states, Data(source="text", path=path, eval_path=path, tokenizer=tokenizer))
        library = Library.from_file(f"{tokenizer.path}/tokenizer.json") if tokenizer.path else None
        first = library.encode(text, add_special_tokens=False).offsets[0][1] if library else 1
        size = len(text[first:].encode())
        np.testing.assert_allclose(
            found["eval/bpb"], found["eval/loss"] * found["eval/tokens"] / math.log(2) / size, rtol=1e-6
        )


@pytest.mark.slow
def test_every_source_and_named_set_has_its_own_loss(states: StateFactory, tmp_path: Path) -> None:
    paths = [write_lines(tmp_path / f"{number}.jsonl", LINES[number:]) for number in (0, 2, 3)]
    corpora = [Corpus(source="grain", path=path, eval_path=path) for path in paths]
    mixture = Data(
        source="mixture",
        sources={"a": corpora[0], "b": corpora[1]},
        eval_sets={"c": Corpus(source="grain", path=paths[2])},
    )
    found = evaluate(states, mixture)
    alone = [evaluate(states, Data(source="grain", path=path, eval_path=path)) for path in paths]
    for name, single in zip("abc", alone, strict=True):
        for metric in ("loss", "bpb"):
            np.testing.assert_allclose(found[f"eval/{name}/{metric}"], single[f"eval/{metric}"], rtol=1e-5)
    tokens = [single["eval/tokens"] for single in alone[:2]]
    combined = np.average([single["eval/loss"] for single in alone[:2]], weights=tokens)
    np.testing.assert_allclose(found["eval/loss"], combined, rtol=1e-5)
    assert found["eval/tokens"] == sum(tokens)


@pytest.mark.slow
def test_tokens_without_text_have_no_bits_per_byte(states: StateFactory) -> None:
    assert "eval/bpb" not in evaluate(states, Data(source="synthetic", eval_fraction=0.001))


@pytest.mark.parametrize(
    ("overrides", "path", "text"),
    [
        (["data=synthetic", "checkpoint.keep_best=1", "checkpoint.best_metric=eval/bpb"], "best_metric", "need data"),
        (["train.early_stop.patience=2", "train.early_stop.metric=eval/b/loss"], "early_stop.metric", "not reported"),
        (["+data.eval_sets={a/b:{source:demo}}"], "eval_sets", "metric's name"),
        (["+data.eval_sets={a:{source:mixture}}"], "eval_sets.a.source", "nested"),
    ],
)
def test_metrics_that_are_not_reported_are_rejected(overrides: list[str], path: str, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose([*SMALL, *overrides])
    assert any(path in problem.path and text in str(problem) for problem in error.value.problems)


def test_metrics_of_named_sets_are_accepted() -> None:
    names = ["train.early_stop.patience=2", "train.early_stop.metric=eval/plays/bpb", "checkpoint.keep_best=1"]
    config = compose(
        [*SMALL, "+data.eval_sets={plays:{source:demo}}", *names, "checkpoint.best_metric=eval/plays/loss"]
    )
    assert config.config.data.eval_sets["plays"].source == "demo"
