"""Distillation across tokenizers: spans of text, the loss against NumPy, and rejected tokenizers and configs."""

import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import normalizers

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.data import Data
from maxhydra.config.schema.data import Tokenizer as TokenizerConfig
from maxhydra.data import Tokenizer, load_tokenizer
from maxhydra.distill.loss import TEACHER
from maxhydra.distill.on_policy import sampled_row
from maxhydra.distill.separate_teacher import logprob_outputs
from maxhydra.distill.text_alignment import LOGPROBS, TextAligner, aligned_loss, token_ends
from maxhydra.model import build
from maxhydra.sharding import Sharder
from maxhydra.train import Scorer
from tests.support.cli import SMALL, losses, parameter_hash, rewind, run_ok
from tests.support.vocabularies import MARKS, byte_level, save

BYTES = load_tokenizer(Data())
TEXTS = ["the king is dead", "naïve 日本", "12+30=42\n", ""]


def load(folder: Path) -> Tokenizer:
    return load_tokenizer(Data(tokenizer=TokenizerConfig(kind="hf", path=str(folder))))


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    bos, eos, *_ = MARKS["llama3"]
    folder = tmp_path_factory.mktemp("tokenizer")
    return save(byte_level(MARKS["llama3"], 400), folder, bos_token=bos, eos_token=eos)


def row_of(prompt: str, text: str, size: int = 40) -> dict[str, np.ndarray]:
    empty = {name: np.zeros(size, np.int32) for name in ("tokens", "targets", "positions")}
    completion = [*BYTES.encode(text), BYTES.eos]
    return sampled_row({**empty, "weights": np.zeros(size, np.float32)}, BYTES.encode(prompt), completion)


@pytest.mark.parametrize("text", TEXTS)
def test_spans_are_those_of_the_text(teacher_folder: Path, text: str) -> None:
    """Every token of the teacher that ends at a character is a span of the bytes that it covers; eos is the last."""
    teacher = load(teacher_folder)
    row = TextAligner(BYTES, teacher)(row_of("ask: ", text))
    ids = teacher.encode(text)
    ends = [len(teacher.decode(ids[:count])) for count in range(1, len(ids) + 1)]
    ends = [end for count, end in enumerate(ends, 1) if text.startswith(teacher.decode(ids[:count]))]
    starts = [0, *sorted(set(ends))]
    expected = [text[a:b] for a, b in itertools.pairwise(starts)]
    student, own = row["spans"], row["teacher_spans"]
    found = [BYTES.decode(row["targets"][student == span].tolist()) for span in range(student.max())]
    assert found == expected
    assert [teacher.decode(row["teacher_targets"][own == span].tolist()) for span in range(own.max())] == expected
    assert row["targets"][student == student.max()].tolist() == [BYTES.eos]
    assert row["teacher_targets"][own == own.max()].tolist() == [teacher.eos]
    assert (row["weights"] > 0).tolist() == (student >= 0).tolist()
    prompt = row["teacher_tokens"][: np.flatnonzero(own >= 0)[0] + 1].tolist()
    assert prompt[0] == teacher.bos and teacher.decode(prompt) == "ask: "


def test_a_text_that_does_not_fit_has_no_loss(teacher_folder: Path) -> None:
    row = TextAligner(load(teacher_folder), BYTES)(
        {**row_of("", "", 8), "targets": np.full(8, 300, np.int32), "weights": np.ones(8, np.float32)}
    )
    assert len(BYTES.encode(load(teacher_folder).decode([300] * 8))) > 8
    assert not row["weights"].any() and (row["spans"] == -1).all()


def test_a_character_of_several_tokens_ends_once() -> None:
    assert token_ends(BYTES, BYTES.encode("aé日")) == [1, None, 2, None, None, 3]


@pytest.mark.slow
def test_the_loss_is_that_of_merged_log_probs(teacher_folder: Path) -> None:
    """In NumPy, span by span, from the log-probs of each model on its own tokens."""
    teacher = load(teacher_folder)
    model = build(compose(SMALL).config.model)
    larger = build(compose([*SMALL, "model.vocab_size=400"]).config.model)
    weights, teacher_weights = (jax.jit(each.init)(jax.random.key(3)) for each in (model, larger))
    student_scorer, teacher_scorer = (Scorer(each, Sharder.single(), 0) for each in (model, larger))
    rows = [TextAligner(BYTES, teacher)(row_of("ask: ", text)) for text in TEXTS]
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    sums = aligned_loss(student_scorer, teacher_scorer)({**weights, TEACHER: teacher_weights}, batch, None)

    def logprobs(scorer: Scorer, tree: Any, prefix: str) -> np.ndarray:
        columns = {name: batch[f"{prefix}{name}"] for name in ("tokens", "targets", "positions")}
        return np.asarray(scorer(tree, columns, None, is_adapted=True), np.float64)

    own, other = logprobs(student_scorer, weights, ""), logprobs(teacher_scorer, teacher_weights, "teacher_")
    squares = distances = 0.0
    for index, row in enumerate(rows):
        for span in range(row["spans"].max() + 1):
            distance = own[index][row["spans"] == span].sum() - other[index][row["teacher_spans"] == span].sum()
            squares, distances = squares + distance**2 / 2, distances + distance
    np.testing.assert_allclose(float(sums["loss"]), squares, rtol=1e-5)
    np.testing.assert_allclose(float(sums["divergence"]), distances, rtol=1e-5)
    assert float(sums["weight"]) == sum(len(text.encode()) + 1 for text in TEXTS)
    # A teacher on its own devices adds its log-probs to the batch.
    columns = logprob_outputs(teacher_scorer)(teacher_weights, batch)
    np.testing.assert_allclose(columns[LOGPROBS], other, rtol=1e-5, atol=1e-6)
    separate = aligned_loss(student_scorer, None)(weights, {**batch, **columns}, None)
    np.testing.assert_allclose(float(separate["loss"]), squares, rtol=1e-5)


def test_a_tokenizer_that_changes_texts_is_rejected(tmp_path: Path) -> None:
    made = byte_level(MARKS["llama3"], 400)
    made.normalizer = normalizers.Lowercase()
    aligner = TextAligner(BYTES, load(save(made, tmp_path / "lower")))
    with pytest.raises(ConfigError, match=r"cannot be aligned by text: the teacher's tokenizer reads"):
        aligner.check("teacher")


def test_unsupported_keys_are_rejected() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["task=distill", "task.teacher.weights=x", "task.teacher.align=true", "task.temperature=2"])
    found = {problem.path: problem.accepted for problem in caught.value.problems}
    expected = {"divergence": "reverse_kl", "on_policy.fraction": "1.0", "temperature": "1.0"}
    assert found == {f"task.{path}": accepted for path, accepted in expected.items()}


ALIGNED = ["task=distill", "task.teacher.weights=outputs/teacher", "task.teacher.align=true"]
ALIGNED += ["task.divergence=reverse_kl", "task.on_policy.fraction=1", "task.on_policy.max_tokens=6"]
ALIGNED += ["task.on_policy.engine.max_batch=8", "task.on_policy.engine.cache_tokens=512", "data=arithmetic"]
ALIGNED += ["data.packing.method=none", "data.packing.overlong=drop", *SMALL, "train.seq_len=24"]
ALIGNED += ["train.steps=6", "checkpoint.every=3", "checkpoint.mode=synchronous", "optimizer.learning_rate=3e-3"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, teacher_folder: Path) -> Path:
    """The folder of a run with a teacher of another tokenizer."""
    cwd = tmp_path_factory.mktemp("aligned")
    tokenizer = ["data.tokenizer.kind=hf", f"data.tokenizer.path={teacher_folder}", "model.vocab_size=400"]
    text = ["data=arithmetic", "data.record_type=text", "train.steps=3"]
    run_ok(*SMALL, *text, *tokenizer, "train.eval_batches=0", "run.name=teacher", cwd=cwd)
    run_ok(*ALIGNED, "run.name=whole", cwd=cwd)
    return cwd / "outputs" / "whole"


@pytest.mark.exhaustive
def test_a_run_with_a_teacher_of_another_tokenizer_trains(whole: Path) -> None:
    found = losses(whole)
    assert len(found) == 6 and len(set(found.values())) == 6


@pytest.mark.exhaustive
def test_a_run_with_a_teacher_of_another_tokenizer_resumes(whole: Path) -> None:
    folder = rewind(whole, 3, "killed")
    run_ok(*ALIGNED, "run.name=killed", cwd=whole.parents[1])
    assert losses(folder) == losses(whole) and parameter_hash(folder, 6) == parameter_hash(whole, 6)
