"""task=distill and task=teacher_logits end to end: kills change nothing, and an incompatible teacher is rejected."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from array_record.python.array_record_module import ArrayRecordReader

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.config import Config
from maxhydra.data.formats.payload import decode_arrays
from maxhydra.distill.teacher import plan_teacher
from maxhydra.layers import Context
from maxhydra.model import build
from maxhydra.record.rollout_store import search
from maxhydra.record.rollouts import Query
from maxhydra.sharding import Sharder
from tests.support.cli import ROOT, SMALL, facts, kill_when, losses, parameter_hash, rewind, run_ok

TEXT = ["data=grain", "data.path=text.jsonl", "data.eval_fraction=0.1"]
DATA = [*TEXT, *SMALL]
SIZES = [size for size in SMALL if size.startswith("model.")]
TEACHER = ["task.teacher.weights=teacher", "task.teacher.model=tiny", f"task.teacher.overrides={json.dumps(SIZES)}"]
STEPS = 24
STUDENT = [
    *("task=distill", *TEACHER, "task.temperature=2", "task.temperature_end=1", "task.alpha=0.8"),
    *(*DATA, "model.num_layers=1", f"train.steps={STEPS}", "checkpoint.every=8", "train.loss_chunk=8"),
]
LOGITS = ["task=teacher_logits", "checkpoint.load_parameters=teacher", "task.output=logits", "task.k=5", *TEXT]
LOGITS += [*SIZES, "train.seq_len=32", "train.per_device_batch_size=8"]


def teacher_config() -> Config:
    return compose(SMALL).config


@pytest.fixture(scope="module")
def cwd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text file and an untrained teacher."""
    folder = tmp_path_factory.mktemp("school")
    lines = (ROOT / "maxhydra/data/text/shakespeare.txt").read_text().splitlines()[300:1500]
    texts = ["\n".join(lines[at : at + 8]) for at in range(0, len(lines), 8)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with ocp.StandardCheckpointer() as writer:
        writer.save(folder / "teacher" / "params", weights())
    return folder


def weights() -> dict:
    return jax.jit(build(teacher_config().model).init)(jax.random.key(7))


@pytest.mark.exhaustive
def test_a_killed_run_resumes_bit_identically(cwd: Path) -> None:
    run_ok(*STUDENT, "run.name=whole", cwd=cwd)
    whole = cwd / "outputs" / "whole"
    killed = rewind(whole, 16, "killed")
    assert "resuming from step 16" in run_ok(*STUDENT, "run.name=killed", cwd=cwd).stderr
    assert losses(killed) == losses(whole)
    assert parameter_hash(killed, STEPS) == parameter_hash(whole, STEPS)
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    first, last = rows[0], rows[-2]
    assert last["divergence"] < first["divergence"] and last["cross_entropy"] < first["cross_entropy"]
    assert first["loss"] == pytest.approx(0.8 * first["divergence"] + 0.2 * first["cross_entropy"], rel=1e-5)


@pytest.mark.exhaustive
def test_an_on_policy_run_ends_early_with_a_sample_and_its_best_checkpoint(cwd: Path) -> None:
    """target_eval_loss, early_stop, sample and keep_best are those of the held-out data."""
    early = ["train.steps=4", "train.eval_every=1", "train.eval_batches=1", "checkpoint.every=1"]
    early += [
        "train.sample.tokens=3",
        "train.sample.at_evaluations=true",
        "train.target_eval_loss=0",
        "train.early_stop.min_delta=100",
    ]
    best = ["checkpoint.keep=1", "checkpoint.keep_best=1", "checkpoint.best_metric=eval/kl"]
    run_ok(*ON_POLICY, *early, *best, "train.early_stop.patience=2", "run.name=patience", cwd=cwd)
    folder = cwd / "outputs" / "patience"
    assert facts(folder)["end_step"] == 3 and "did not improve" in facts(folder)["reason"]
    sampled = search(folder / "rollouts", Query(kind="eval", order="oldest")).records
    assert [record["step"] for record in sampled] == [1, 2, 3]
    assert sampled[-1]["prompt"] + sampled[-1]["completion"] == facts(folder)["sample"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    divergences = {line["step"]: line["eval/kl"] for line in lines if "eval/kl" in line}
    stored = {int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit()}
    assert stored == {min(divergences, key=divergences.__getitem__), 3}


ON_POLICY = [
    *("task=distill", *TEACHER, "task.divergence=reverse_kl", "task.on_policy.fraction=0.7", "task.alpha=0.5"),
    *("task.on_policy.max_tokens=6", "task.on_policy.engine.max_batch=8", "task.on_policy.engine.cache_tokens=512"),
    *("data=arithmetic", "data.packing.method=none", "data.packing.overlong=drop", *SMALL, "model.num_layers=1"),
    *("train.steps=10", "checkpoint.every=3", "checkpoint.mode=synchronous", "train.seq_len=20"),
]


@pytest.mark.exhaustive
def test_a_killed_on_policy_run_resumes_bit_identically(cwd: Path) -> None:
    """Which batches are sampled, and every sampled token, are the same; no rollout is lost or stored twice."""
    run_ok(*ON_POLICY, "run.name=sampled", cwd=cwd)
    whole = cwd / "outputs" / "sampled"
    killed = rewind(whole, 6, "sampled_killed")
    assert "resuming from step 6" in run_ok(*ON_POLICY, "run.name=sampled_killed", cwd=cwd).stderr
    assert losses(killed) == losses(whole)
    assert parameter_hash(killed, 10) == parameter_hash(whole, 10)
    rollouts = [(folder / "rollouts" / "train-00000.jsonl").read_text() for folder in (whole, killed)]
    assert rollouts[0] == rollouts[1]
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row.get("on_policy") == 1]
    assert 0 < len(steps) < 10
    records = [json.loads(line) for line in rollouts[0].splitlines()]
    assert sorted({record["step"] for record in records}) == steps and len(records) == 8 * len(steps)
    # Without cross-entropy in sampled batches: their loss is the divergence alone.
    assert all(row["loss"] == pytest.approx(row["divergence"], rel=1e-5) for row in rows if row.get("on_policy") == 1)


@pytest.mark.exhaustive
def test_a_teacher_on_its_own_devices_trains_the_same_student(cwd: Path) -> None:
    """Four of eight devices train and four run the teacher, against four that do both; a resume is bit-identical."""
    arguments = [*ON_POLICY, "train.steps=4", "checkpoint.every=2", "train.eval_every=4", "train.eval_batches=1"]
    run_ok(*arguments, "train.per_device_batch_size=2", "run.name=shared_devices", cwd=cwd, devices=4)
    arguments += ["train.per_device_batch_size=2", "task.teacher.devices=0.5", "task.teacher.mesh=ddp"]
    run_ok(*arguments, "run.name=own_devices", cwd=cwd, devices=8)
    shared, own = cwd / "outputs" / "shared_devices", cwd / "outputs" / "own_devices"
    assert losses(own) == pytest.approx(losses(shared), rel=1e-4)
    assert facts(own)["metrics"]["eval/kl"] == pytest.approx(facts(shared)["metrics"]["eval/kl"], rel=1e-4)
    assert facts(own)["sequences_per_step"] == facts(shared)["sequences_per_step"] == 8
    killed = rewind(own, 2, "own_killed")
    resumed = run_ok(*arguments, "run.name=own_killed", cwd=cwd, devices=8)
    assert "resuming from step 2" in resumed.stderr
    assert losses(killed) == losses(own) and parameter_hash(killed, 4) == parameter_hash(own, 4)


@pytest.mark.slow
def test_logits_written_in_two_sessions_are_those_of_the_teacher(cwd: Path) -> None:
    kill_when(LOGITS, cwd / "logits" / "index.json", cwd=cwd)
    assert not json.loads((cwd / "logits" / "index.json").read_text())["complete"]
    run_ok(*LOGITS, cwd=cwd)
    index = json.loads((cwd / "logits" / "index.json").read_text())
    assert index["complete"] and len(index["shards"]) == 8

    model = build(teacher_config().model)
    reader = ArrayRecordReader(str(sorted((cwd / "logits").glob("*.array_record"))[3]))
    record = decode_arrays(reader.read([5])[0])
    tokens = jnp.asarray(record["tokens"][:-1][None].astype(np.int32))
    context = Context(
        positions=jnp.arange(tokens.shape[1])[None],
        segments=None,
        sharder=Sharder.single(),
        cache=None,
        dropout_key=None,
    )

    def logits(weights: dict) -> jax.Array:
        return model.logits(weights, model.hidden(weights, tokens, context)[0], Sharder.single())

    expected = np.asarray(jax.nn.log_softmax(jax.jit(logits)(weights())))[0]
    assert record["teacher_ids"].shape == (len(expected), 5)
    np.testing.assert_allclose(record["teacher_logits"], -np.sort(-expected, -1)[:, :5], atol=0.01)
    teacher_logprobs = np.take_along_axis(expected, record["teacher_ids"].astype(np.int64), -1)
    np.testing.assert_allclose(record["teacher_logits"], teacher_logprobs, atol=0.01)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([*TEACHER, "model.vocab_size=300"], "has a vocabulary of 320, but the student's is 300"),
        (["task.teacher.weights=teacher"], "is not a run folder with a config, so its model is unknown"),
        (["task.teacher.weights=teacher", "task.teacher.model=tinny"], "task.teacher.model"),
        ([*TEACHER, "model.context_length=4096", "train.seq_len=2048"], "exceeds the teacher's context_length=1024"),
    ],
)
def test_an_incompatible_teacher_is_rejected(overrides: list[str], reason: str) -> None:
    config = compose(["task=distill", *overrides]).config
    with pytest.raises(ConfigError) as caught:
        plan_teacher(config, config.task.teacher, Sharder.single())
    assert reason in str(caught.value)
