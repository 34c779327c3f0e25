"""task=dpo end to end: it starts at ln 2, learns the preference, survives kills, and rejects invalid configs."""

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from maxhydra.align.loss import PairScorer, preference_loss
from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.tasks.training import DpoTask, PreferenceLoss, Reference
from maxhydra.model import build, merge_trees, split_trainable
from maxhydra.sharding import Sharder
from maxhydra.tasks import Job, dpo
from tests.model.test_lora import lora, model_config
from tests.support.cli import SMALL, facts, kill_when, losses, parameter_hash, run_ok

STEPS = 24
RUN = [
    "task=dpo",
    "data=grain",
    "data.path=pairs.jsonl",
    "data.record_type=preference",
    "data.eval_fraction=0.094",
    *SMALL,
    f"train.steps={STEPS}",
    "checkpoint.every=8",
    "train.loss_chunk=8",
    "run.name=it",
]


def write_pairs(folder: Path) -> Path:
    """Prompts that request a word, which should be in lower case. 96 pairs, and 10 held out."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=4)) for _ in range(106)]
    lines = [{"prompt": f"Say {word}: ", "chosen": word, "rejected": word.upper()} for word in words]
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# Session scope, because slow tests run before all others: with module scope it would run twice.
@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("whole")
    write_pairs(cwd)
    run_ok(*RUN, cwd=cwd)
    return cwd / "outputs" / "it"


@pytest.mark.slow
def test_it_starts_at_ln_2_and_learns_the_preference(whole: Path) -> None:
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert rows[0]["reward_margin"] == pytest.approx(0, abs=1e-4)
    last = rows[-1]
    assert last["eval/accuracy"] > 0.9 and last["eval/reward_margin"] > 0.3
    assert last["eval/tokens"] == 10, "pairs; the rest of the second batch is padding"


@pytest.mark.exhaustive
def test_kto_learns_from_labels(tmp_path: Path) -> None:
    """Unpaired completions with cached reference log-probs: the loss starts at 0.5 and falls."""
    arguments = ["task=dpo", "task.loss=kto", "data=arithmetic", "data.record_type=labeled", *SMALL, "train.steps=12"]
    arguments += ["optimizer.learning_rate=1e-2", "optimizer/schedule=constant", "task.beta=0.5", "run.name=it"]
    run_ok(*arguments, cwd=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "outputs/it/metrics.jsonl").read_text().splitlines()]
    assert rows[0]["loss"] == pytest.approx(0.5, abs=1e-5) and rows[0]["kl"] == pytest.approx(0, abs=1e-4)
    assert rows[-1]["eval/loss"] < 0.5 and rows[-1]["eval/reward_margin"] > 0


@pytest.mark.exhaustive
def test_a_killed_run_resumes_bit_identically(whole: Path, tmp_path: Path) -> None:
    """Killed once while the reference log-probs are computed, with a truncated entry, and once while training."""
    write_pairs(tmp_path)
    folder = tmp_path / "outputs" / "it"
    cache = folder / "reference" / "0.logprobs"
    kill_when(RUN, cache, cwd=tmp_path)
    os.truncate(cache, cache.stat().st_size - 5)
    kill_when(RUN, folder / "metrics.jsonl", cwd=tmp_path)
    run_ok(*RUN, cwd=tmp_path)
    assert losses(folder) == losses(whole)
    assert parameter_hash(folder, STEPS) == parameter_hash(whole, STEPS)
    assert sorted_entries(cache) == sorted_entries(whole / "reference" / "0.logprobs")
    assert facts(folder)["status"] == "finished"


def sorted_entries(path: Path) -> list[bytes]:
    content = path.read_bytes()
    return sorted(content[at : at + 40] for at in range(0, len(content), 40))


@pytest.mark.slow
def test_with_an_adapter_the_model_without_it_is_the_reference() -> None:
    """Pairs of tokens 1 and 2, of which the first is chosen: the loss starts at ln 2 for any base weights."""
    model = build(model_config(num_layers=1), lora())
    loss = jax.jit(preference_loss(PairScorer(model, Sharder.single(), 0), DpoTask(), Reference.adapter_off))
    rows = {"tokens": jnp.ones((2, 4), int), "positions": jnp.tile(jnp.arange(4), (2, 1)), "weights": jnp.ones((2, 4))}
    batch = {
        f"{role}_{name}": column
        for role, target in (("chosen", 1), ("rejected", 2))
        for name, column in {**rows, "targets": jnp.full((2, 4), target)}.items()
    }
    params = jax.jit(model.init)(jax.random.key(0))
    sums = loss(params, batch, None)
    assert sums["loss"] / sums["weight"] == pytest.approx(math.log(2), abs=1e-6)
    trained, frozen = split_trainable(params)
    gradient = jax.jit(jax.grad(lambda trained: loss(merge_trees(trained, frozen), batch, None)["loss"]))(trained)
    stepped = merge_trees(jax.tree.map(lambda weight, slope: weight - 0.1 * slope, trained, gradient), frozen)
    after = loss(stepped, batch, None)
    assert after["loss"] < sums["loss"] and after["accuracy"] == 2 and after["reward_margin"] > 0


def test_all_problems_of_a_config_are_reported() -> None:
    config = compose(["task=dpo", "task.reference=adapter_off", "train.z_loss=0.1"]).config
    with pytest.raises(ConfigError) as caught:
        dpo.run(Job(config, {}, machine=None, run=None))  # type: ignore[arg-type]
    assert [problem.path for problem in caught.value.problems] == ["data.record_type", "train.z_loss", "task.reference"]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"loss": PreferenceLoss.orpo, "reference": Reference.cached}, "reference"),
        ({"reference": Reference.none}, "reference"),
        ({"loss": PreferenceLoss.simpo}, "margin"),
        ({"margin": 0.5}, "margin"),
        ({"loss": PreferenceLoss.ipo, "label_smoothing": 0.1}, "label_smoothing"),
        ({"desirable_weight": 2.0}, "desirable_weight"),
        ({"loss": PreferenceLoss.kto, "nll_weight": 1.0}, "nll_weight"),
    ],
)
def test_incompatible_fields(fields: dict[str, Any], path: str) -> None:
    assert [problem.path for problem in DpoTask(**fields).check()] == [path]
