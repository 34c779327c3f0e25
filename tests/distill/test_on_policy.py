"""On-policy batches: prompts and completions in rows, which batches are sampled, positions, teachers."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.data import Data, Packing, PackingMethod, Tokenizer
from maxhydra.config.schema.hardware import RULES
from maxhydra.config.schema.tasks.distill import DistillTask, OnPolicy, Teacher
from maxhydra.data import BatchSpec, RowSpec, host_loader, load_tokenizer
from maxhydra.distill.loss import TEACHER, ScheduledBatches
from maxhydra.distill.on_policy import OnPolicyBatches, prompt_of, sampled_row
from maxhydra.distill.teacher import check_tokenizer
from maxhydra.record.rollout_store import RolloutWriter, search
from maxhydra.record.rollouts import Query
from maxhydra.sharding import Sharder
from maxhydra.tasks.distill import _problems
from tests.distill.test_distill import one_device
from tests.support.vocabularies import byte_level, save

SEQ_LEN, BATCH = 20, 4
DATA = Data(
    source="arithmetic",
    record_type="chat",
    tokenizer=Tokenizer(chat_template="lines"),
    packing=Packing(method=PackingMethod.none),
)
ONE = Sharder(one_device(), RULES)
SPEC = BatchSpec(RowSpec(seq_len=SEQ_LEN, vocab_size=320, seed=0), BATCH, ONE.sharding((None, None)))


def row(weights: list[int]) -> dict[str, np.ndarray]:
    columns = {name: np.arange(10, 10 + len(weights), dtype=np.int32) for name in ("tokens", "targets", "positions")}
    return {**columns, "weights": np.array(weights, np.float32)}


def test_the_prompt_is_everything_before_the_last_assistant_turn() -> None:
    assert prompt_of(row([0, 0, 1, 1, 0])) == [10, 11, 12]
    assert prompt_of(row([0, 1, 1, 0, 0, 1, 1])) == [10, 11, 12, 13, 14, 15]
    assert prompt_of(row([0, 0, 0])) == []


def test_a_sampled_row_trains_on_the_completion() -> None:
    made = sampled_row(row([0, 0, 1, 1, 1, 1]), [5, 6, 7], [8, 9])
    assert made["tokens"].tolist() == [5, 6, 7, 8, 0, 0] and made["targets"].tolist() == [6, 7, 8, 9, 0, 0]
    assert made["weights"].tolist() == [0, 0, 1, 1, 0, 0] and made["positions"].tolist() == [0, 1, 2, 3, 0, 0]
    cut = sampled_row(row([0, 0, 1, 1]), [5, 6, 7], [8, 9, 1, 2])
    assert cut["targets"].tolist() == [6, 7, 8, 9] and cut["weights"].tolist() == [0, 0, 1, 1]


def sampler(weights: Any, prompts: Sequence[Sequence[int]], number: int) -> list[Any]:
    """Completes prompt n with [n, n + 1], as `weights` has no influence here."""
    assert set(weights) == {"student"}
    return [
        SimpleNamespace(tokens=[n, n + 1], text=str(n), finish="stop") for n in range(number, number + len(prompts))
    ]


@pytest.fixture
def batches(tmp_path: Path) -> Iterator[Any]:
    opened = []

    def open_batches(fraction: float) -> ScheduledBatches:
        task = DistillTask(on_policy=OnPolicy(fraction=fraction), alpha=0.5, teacher=Teacher(weights="x"))
        writer = RolloutWriter(tmp_path, "train", keep=1000)
        loader = host_loader(DATA, SPEC)
        source = OnPolicyBatches(loader, SPEC, task.on_policy, sampler, tokenizer=load_tokenizer(DATA), writer=writer)
        opened.append(source)
        return ScheduledBatches(source, task, SPEC, steps=10)

    yield open_batches
    for source in opened:
        source.close()


STATE: Any = SimpleNamespace(step=jnp.zeros((), jnp.int32), weights={"student": 1, TEACHER: 2})


def test_a_fraction_of_the_batches_is_sampled(batches: Any, tmp_path: Path) -> None:
    source = batches(0.5)
    taken = [source.take(step, STATE) for step in range(1, 9)]
    alphas = [float(batch["alpha"][0]) for batch in taken]
    assert set(alphas) == {0.5, 1.0} and 2 <= alphas.count(1.0) <= 6
    expected = {name: (column.shape, column.dtype) for name, column in source.peek().items()}
    for batch in taken:
        assert {name: (column.shape, column.dtype) for name, column in batch.items()} == expected
    number = 0
    for batch in (batch for batch, alpha in zip(taken, alphas, strict=True) if alpha == 1):
        for index in range(BATCH):
            sampled = batch["targets"][index][np.asarray(batch["weights"][index]) > 0]
            assert sampled.tolist() == [number, number + 1]
            number += 1
    page = search(tmp_path, Query(order="oldest", limit=100))
    assert page.total == number and [record["completion"] for record in page.records[:3]] == ["0", "1", "2"]
    assert "=" in page.records[0]["prompt"]


def test_a_position_repeats_batches_exactly(batches: Any) -> None:
    source = batches(0.5)
    for step in range(1, 4):
        source.take(step, STATE)
    position = source.state()
    after = [source.take(step, STATE) for step in range(4, 9)]
    other = batches(0.5)
    other.restore(position)
    for step, batch in enumerate(after, 4):
        jax.tree.map(np.testing.assert_array_equal, other.take(step, STATE), batch)


def test_an_interrupted_batch_is_repeated(batches: Any) -> None:
    source = batches(1.0)
    source.take(1, STATE)
    position = source.state()
    with pytest.raises(AssertionError):
        source.take(2, SimpleNamespace(step=STATE.step, weights={}))
    assert source.state() == position


CHAT = ["task=distill", "task.teacher.weights=x", "task.on_policy.fraction=0.5", "data=arithmetic"]
FOLDERS = {"ours": ["<a>", "<b>"], "same": ["<a>", "<b>"], "other": ["<b>", "<a>"]}
NONE, DROP = "data.packing.method=none", "data.packing.overlong=drop"


@pytest.mark.parametrize(
    ("overrides", "paths"),
    [
        ([NONE, DROP], []),
        ([NONE], ["data.packing.overlong"]),
        ([DROP], ["data.packing.method"]),
        ([NONE, DROP, "data.loss_on=all", "data.thinking=mask"], ["data.loss_on", "data.thinking"]),
        ([NONE, DROP, "data.record_type=text"], ["data.record_type"]),
        ([NONE, DROP, "data.record_type=prompts"], ["data.record_type"]),
    ],
)
def test_data_without_prompts_is_rejected(overrides: list[str], paths: list[str]) -> None:
    config = compose([*CHAT, *overrides]).config
    assert isinstance(config.task, DistillTask)
    assert [problem.path for problem in _problems(config, config.task)] == paths


def test_a_teacher_with_another_tokenizer_is_rejected(tmp_path: Path) -> None:
    own, same, other = (save(byte_level(marks), tmp_path / name) for name, marks in FOLDERS.items())
    data = dataclasses.replace(DATA, tokenizer=Tokenizer(kind="hf", path=str(own)))
    for folder in (own, same, tmp_path):
        check_tokenizer(data, Teacher(weights=str(folder)))
    with pytest.raises(ConfigError, match="has another tokenizer than the student: <a> is id 1 there"):
        check_tokenizer(data, Teacher(weights=str(other)))
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    (run / "config.yaml").write_text("data: {tokenizer: {kind: byte, path: null}}")
    with pytest.raises(ConfigError, match="id 0 is"):
        check_tokenizer(data, Teacher(weights=str(run)))
