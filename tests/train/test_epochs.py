"""train.epochs: the number of steps, from rows that are counted."""

import json
import math

import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.data import Row, RowSpec
from maxhydra.data.pipeline import Pipeline, count_training_rows
from maxhydra.sharding import Sharder
from maxhydra.train.batches import plan_batches, resolve_epochs
from tests.support.cli import SMALL

RECORDS = [
    "data=grain",
    "data.format=jsonl",
    "data.eval_fraction=0.1",
    "model.vocab_size=512",
    "data.tokenizer.kind=byte",
]

# On the eight simulated devices of the tests.
BATCH = 64


def resolved(*overrides: str) -> int:
    return resolve_epochs(compose([*SMALL, *overrides]).config).train.steps


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": "abc" * (n % 30 + 1)}) + "\n" for n in range(200)))
    return str(path)


def rows_of_an_epoch(config) -> list[Row]:
    pipeline, rows = Pipeline(config.data, RowSpec.of(config)), []
    stream = pipeline._stream("", "train", share=(0, 1), epochs=1, shuffle=False)
    while True:
        try:
            rows.append(stream.take())
        except StopIteration:
            pipeline.close()
            return rows


def test_rows_by_index():
    config = compose(SMALL).config
    (source,) = Pipeline(config.data, RowSpec.of(config)).sources.values()
    assert resolved("train.epochs=1.5") == math.ceil(round(1.5 * len(source.train)) / BATCH)


@pytest.mark.parametrize("packing", ["none", "first_fit"])
def test_records_are_packed_to_be_counted(texts, packing):
    overrides = [*RECORDS, f"data.path={texts}", f"data.packing.method={packing}"]
    config = compose([*SMALL, *overrides]).config
    rows = len(rows_of_an_epoch(config))
    assert rows == count_training_rows(config.data, RowSpec.of(config)) > 20
    assert resolved(*overrides, "train.epochs=2") == math.ceil(2 * rows / BATCH)


def test_a_ramp_takes_more_steps():
    ramp = ["train.ramp.start=2", "train.ramp.increment=2", "train.ramp.sequences=24", "train.epochs=1"]
    config = compose([*SMALL, *ramp]).config
    spec, sequences, steps = plan_batches(config, Sharder.from_config(config.mesh)), 0, 0
    rows = count_training_rows(config.data, spec.rows)
    while sequences < rows:
        sequences, steps = sequences + spec.batch_at(sequences), steps + 1
    assert resolve_epochs(config).train.steps == steps > math.ceil(rows / BATCH)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.overfit_batches=1"], "has no size"),
        (["optimizer/schedule=wsd", "optimizer.schedule.decay_steps=100000"], "is less than the 100000 steps"),
    ],
)
def test_unknown_sizes_are_rejected(overrides, message):
    with pytest.raises(ConfigError, match=message):
        resolved(*overrides, "train.epochs=1")


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["task=bench"], "train.epochs"),
        (["train.elastic=true"], "train.elastic"),
        (["train.steps=5"], "train.steps"),
    ],
)
def test_keys_that_contradict_epochs_are_rejected(overrides, path):
    with pytest.raises(ConfigError) as error:
        compose([*SMALL, *overrides, "train.epochs=1"])
    assert path in [problem.path for problem in error.value.problems]
