"""A step compiled by task=compile trains exactly as one compiled at the start, and is rejected for any other run."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest

from maxhydra import data
from maxhydra.config import Config, ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.measure.compiled import compile_report
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.train import next_token_loss, plan_batches, plan_states
from maxhydra.train.compile import obtain_steps
from maxhydra.train.executable import EXECUTABLE, MANIFEST, Manifest, check_executable, write_executable

CONFIG = ["model=micro", "train.seq_len=32", "train.per_device_batch_size=1", "mesh.fsdp=2", "train.steps=3"]


def make(*overrides: str, compiled: Path | None = None) -> tuple[Config, Sharder]:
    config = compose([*CONFIG, *overrides, f"hardware.compiled={compiled or 'null'}"]).config
    return config, Sharder.from_config(config.mesh, build_mesh(config.mesh, jax.devices()[:2]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compiled") / "step"
    config, sharder = make()
    report, step = compile_report(config, sharder, segments=False)
    assert report.devices == 2 and report.mesh == {"fsdp": 2} and report.collectives
    assert write_executable(path, step, Manifest.of(config, sharder)) == (path / EXECUTABLE).stat().st_size
    return path


def losses(compiled: Path | None, dump: Path | None = None) -> list[float]:
    config, sharder = make(compiled=compiled)
    if compiled is not None:
        check_executable(str(compiled), config, sharder)
    states = plan_states(config, sharder)
    loader = data.train_loader(config.data, plan_batches(config, sharder))
    loss = next_token_loss(states.model, sharder, config.train)
    step, *_ = obtain_steps(states, loss, config, loader.peek(), dump=dump)
    state, seen = states.create(0), []
    for _ in range(3):
        state, metrics = step(state, next(loader))
        seen.append(float(metrics["loss"]))
    loader.close()
    return seen


@pytest.mark.exhaustive
def test_losses_of_a_loaded_step_are_bit_equal(folder: Path, tmp_path: Path) -> None:
    assert losses(folder, tmp_path / "loaded") == losses(None, tmp_path / "compiled")
    for path in (tmp_path / "loaded", tmp_path / "compiled"):
        # hardware.dump_step: every stage of the step, whether it is compiled or loaded.
        for name, text in (("jaxpr.txt", "lambda"), ("stablehlo.mlir", "stablehlo.dot"), ("hlo.txt", "HloModule")):
            assert text in (path / f"step.{name}").read_text(), name
        assert json.loads((path / "memory.json").read_text())["temp_size_in_bytes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides, message",
    [
        (["train.seq_len=64"], "train.seq_len=64: hardware.compiled was compiled with 32"),
        (["optimizer.learning_rate=0.5"], "optimizer.learning_rate=0.5: hardware.compiled was compiled with"),
        (
            ["hardware.matmul_precision=highest"],
            "hardware.matmul_precision=highest: hardware.compiled was",
        ),
        (["task=sft"], "holds the step of task=pretrain, not of task=sft"),
        (["train.ramp.start=0.5"], "train.ramp.start"),
    ],
)
def test_another_config_is_rejected_by_key_and_both_values(folder: Path, overrides: list[str], message: str) -> None:
    config, sharder = make(*overrides)
    with pytest.raises(ConfigError, match=message):
        check_executable(str(folder), config, sharder)


def test_settings_that_the_program_does_not_depend_on_may_change(folder: Path) -> None:
    check_executable(str(folder), *make("train.log_every=7", "train.eval_every=3", "checkpoint.every=5"))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"device_kind": "NVIDIA H200"}, "device kind: NVIDIA H200, now cpu"),
        ({"devices": 16}, "number of devices: 16, now 2"),
        ({"versions": {"jax": "0.1.0", "jaxlib": "0.1.0"}}, "version of jax: 0.1.0, now "),
        ({"source": "0" * 64}, "source of maxhydra"),
    ],
)
def test_other_devices_versions_and_sources_are_rejected(change: dict, message: str) -> None:
    now = Manifest.of(*make())
    problems = list(dataclasses.replace(now, **change).differences(now))
    assert any(message in problem.reason for problem in problems)
    assert not list(now.differences(now))


@pytest.mark.slow
def test_a_folder_that_others_may_write_or_change_is_rejected(folder: Path, tmp_path: Path) -> None:
    config, sharder = make()
    copy = tmp_path / "copy"
    with pytest.raises(ConfigError, match="does not exist"):
        check_executable(str(copy), config, sharder)
    copy.mkdir()
    for name in (EXECUTABLE, MANIFEST):
        (copy / name).write_bytes((folder / name).read_bytes())
    (copy / EXECUTABLE).chmod(0o664)
    with pytest.raises(ConfigError, match="other users may write"):
        check_executable(str(copy), config, sharder)
    (copy / EXECUTABLE).chmod(0o644)
    (copy / EXECUTABLE).write_bytes(b"other code")
    with pytest.raises(ConfigError, match="damaged"):
        losses(copy)
    (copy / MANIFEST).write_text(json.dumps({"format": 1}))
    with pytest.raises(ConfigError, match="is not a manifest"):
        check_executable(str(copy), config, sharder)
