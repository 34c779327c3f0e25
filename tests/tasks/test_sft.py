"""task=sft end to end: an adapter over another run's weights, killed, loaded, decoded with, and moved."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from maxhydra.config import Config, ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.checkpoint import Checkpoint
from maxhydra.config.serialize import from_yaml
from maxhydra.convert.load import load_weights
from maxhydra.layers import Context
from maxhydra.model import build, merge_trees, parameter_count
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.tasks import Job, sft
from maxhydra.train import next_token_loss, plan_states
from maxhydra.train.checkpoint import open_checkpointer, read_state
from maxhydra.train.restore import initialize_or_resume
from tests.support.cli import SMALL, facts, losses, parameter_hash, rewind, run_ok

STEPS = 24
SFT = [*SMALL, "task=sft", "data=arithmetic", "model.emb_dim=64", "optimizer/schedule=constant", "train.eval_batches=0"]
ADAPTER = ["adapter.targets=[attention/,mlp/]", "adapter.dropout=0.1", "checkpoint.load_parameters=outputs/base"]
LORA = [*SFT, "adapter=lora", *ADAPTER, f"train.steps={STEPS}", "checkpoint.every=4"]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of the model itself, and one of an adapter over it."""
    cwd = tmp_path_factory.mktemp("sft")
    run_ok(*SFT, "train.steps=4", "run.name=base", cwd=cwd)
    run_ok(*LORA, "run.name=whole", cwd=cwd)
    return cwd


def config_of(folder: Path) -> Config:
    return from_yaml((folder / "config.yaml").read_text())


def stored(folder: Path, step: int) -> dict[str, np.ndarray]:
    with ocp.StandardCheckpointer() as reader:
        params = reader.restore(folder / "checkpoints" / str(step) / "params")
    return {"/".join(path): np.asarray(leaf) for path, leaf in ocp.tree.to_flat_dict(params).items()}


@pytest.mark.slow
def test_only_the_adapter_is_trained_and_saved(here: Path) -> None:
    first, last = (stored(here / "outputs/whole", step) for step in (STEPS - 4, STEPS))
    assert all("/lora/" in name for name in last) and len(last) == 14
    assert all(np.abs(last[name] - first[name]).max() > 0 for name in last)
    run_facts = facts(here / "outputs/whole")
    trained = run_facts["trained_parameters"]
    assert trained == sum(leaf.size for leaf in last.values()) < run_facts["parameters"] / 4
    step_losses = losses(here / "outputs/whole")
    assert np.mean([step_losses[step] for step in range(STEPS - 3, STEPS + 1)]) < step_losses[1] - 0.3


@pytest.mark.slow
def test_a_run_of_an_adapter_loads_as_the_merged_model(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares the adapter applied to its base weights with the merged weights of load_weights."""
    monkeypatch.chdir("/")
    config = config_of(here / "outputs/whole")
    model = build(config.model, config.adapter)
    base = load_weights(str(here / "outputs/base"), model, shardings=None, dtype="float32")
    sharder = Sharder(build_mesh(config.mesh, jax.devices()[:1]), config.mesh.rules)
    states = plan_states(config, sharder)
    trained = read_state(here / "outputs/whole/checkpoints" / str(STEPS), states.abstract()).state.params
    loaded = load_weights(str(here / "outputs/whole"), model.base, shardings=None, dtype="float32")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 250, (2, 16)))
    positions = jnp.broadcast_to(jnp.arange(16), (2, 16))
    ctx = Context(positions=positions, segments=None, sharder=Sharder.single(), cache=None, dropout_key=None)
    adapted, merged, plain = (
        item.logits(weights, item.hidden(weights, tokens, ctx)[0], Sharder.single())
        for item, weights in ((model, merge_trees(trained, base)), (model.base, loaded), (model.base, base))
    )
    np.testing.assert_allclose(merged, adapted, atol=1e-5)
    assert np.abs(plain - adapted).max() > 0.05


@pytest.mark.exhaustive
def test_a_killed_run_resumes_bit_identically(here: Path) -> None:
    folder = rewind(here / "outputs/whole", STEPS - 4, "killed")
    assert f"resuming from step {STEPS - 4}" in run_ok(*LORA, "run.name=killed", cwd=here).stderr
    assert losses(folder) == losses(here / "outputs/whole")
    assert parameter_hash(folder, STEPS) == parameter_hash(here / "outputs/whole", STEPS)


@pytest.mark.slow
def test_a_full_state_continues_with_the_same_base_weights(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    config = config_of(here / "outputs/whole")
    sharder = Sharder(build_mesh(config.mesh, jax.devices()[:1]), config.mesh.rules)
    states = plan_states(config, sharder)
    checkpoint = Checkpoint(load_full_state="outputs/whole")
    batches = type("Silent", (), {"restore": lambda self, state: None})()
    start = initialize_or_resume(states, here / "nothing", checkpoint, batches, seed=5, initial=None)
    base = load_weights("outputs/base", states.model, shardings=None, dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, start.state.frozen, base)


@pytest.mark.exhaustive
def test_a_run_with_an_adapter_can_be_decoded_with(here: Path) -> None:
    command = ["task=decode", "data=arithmetic", *SMALL[:6], "model.emb_dim=64", "task.sampling.max_tokens=4"]
    done = run_ok(*command, "checkpoint.load_parameters=outputs/whole", "task.prompt='1+2='", cwd=here)
    assert done.stdout.strip("\n")


@pytest.mark.slow
def test_missing_base_weights_are_reported(here: Path, tmp_path: Path) -> None:
    shutil.copytree(here / "outputs/whole", tmp_path / "alone")
    for name in ("config.yaml", "run.json"):
        path = tmp_path / "alone" / name
        path.write_text(path.read_text().replace(str(here), "/gone"))
    model = build(config_of(here / "outputs/whole").model)
    with pytest.raises(ConfigError) as caught:
        load_weights(str(tmp_path / "alone"), model, shardings=None, dtype="float32")
    (problem,) = caught.value.problems
    assert (
        "trained on the weights of outputs/base, which do not exist" in problem.reason and "config.yaml" in problem.hint
    )


def test_text_records_are_rejected() -> None:
    sources = "+data.sources={a: {source: arithmetic, record_type: chat}, b: {source: arithmetic}}"
    for overrides, path in (
        (["data.record_type=text"], "data.record_type"),
        (["data=mixture", sources], "data.sources.b.record_type"),
    ):
        job: Any = Job(compose([*SFT, *overrides]).config, {}, None, None)  # type: ignore[arg-type]
        with pytest.raises(ConfigError) as caught:
            sft.run(job)
        assert [(problem.path, problem.accepted) for problem in caught.value.problems] == [
            (path, "chat, image_chat, audio_chat")
        ]


@pytest.mark.slow
def test_a_checkpoint_is_under_two_percent_of_the_model(tmp_path: Path) -> None:
    """SmolLM2-135M with adapter=lora: size of the folder, optimizer included, compared with the model in float32."""
    config = compose(["model=smollm2-135m", "adapter=lora", "train.seq_len=8"]).config
    states = plan_states(config, Sharder(build_mesh(config.mesh, jax.devices()[:1]), config.mesh.rules))
    random = np.random.default_rng(0)
    state = jax.tree.map(
        lambda leaf: jnp.asarray(np.abs(random.normal(size=leaf.shape)), leaf.dtype),
        dataclasses.replace(states.abstract(), frozen={}),
    )
    saver = open_checkpointer(tmp_path, Checkpoint())
    saver.save(1, state, {}, {})
    saver.close()
    folder = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    weights = sum(path.stat().st_size for path in (tmp_path / "1/params").rglob("*") if path.is_file())
    model = 4 * parameter_count(states.model.base.shapes)
    assert weights < 0.007 * model and folder < 0.02 * model


@pytest.mark.slow
def test_frozen_weights_have_no_gradient_matmuls() -> None:
    """A step with an adapter does two of the three matmuls per base weight: not that of its gradient."""
    config = compose([*SFT, "model.mlp_dim=256", "model.scan_unroll=2", "adapter=lora", "adapter.rank=1"]).config
    flops = []
    for variant in (config, dataclasses.replace(config, adapter=compose(SFT).config.adapter)):
        sharder = Sharder(build_mesh(variant.mesh, jax.devices()[:1]), variant.mesh.rules)
        states = plan_states(variant, sharder)
        weights = states.abstract()
        loss = next_token_loss(states.model, sharder, variant.train)
        tokens = jax.ShapeDtypeStruct((8, 32), jnp.int32)
        batch = {"tokens": tokens, "targets": tokens, "positions": tokens}
        batch["weights"] = jax.ShapeDtypeStruct((8, 32), jnp.float32)
        gradient = jax.grad(
            lambda params, frozen, batch, loss=loss: loss(merge_trees(params, frozen), batch, None)["loss"]
        )
        compiled = jax.jit(gradient).lower(weights.params, weights.frozen, batch).compile()
        flops.append(compiled.cost_analysis()["flops"])
    assert flops[0] < 0.75 * flops[1]
