"""Lowers and compiles kernels and whole steps for TPUs, without a TPU.

Lowering by Pallas runs everywhere. Compilation needs libtpu, which exists for Linux on x86-64:
`pip install 'jax[tpu]'`, then `MAXHYDRA_TPU=1 pytest -n 0 tests/kernels/test_tpu.py`.
"""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import pytest
from jax.sharding import AbstractDevice

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.measure.compiled import compile_report
from maxhydra.sharding import Sharder, abstract_mesh, build_mesh
from maxhydra.train.compile import trace_pretraining_step
from tests.support import skips, tpu_compile
from tests.support.tpu_compile import CHIPS, MODEL, devices_of
from tests.support.tpu_programs import PROGRAMS

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
ON_TPU = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(not (HAS_LIBTPU and "MAXHYDRA_TPU" in os.environ), reason=skips.TPU_COMPILER),
]
KERNEL = "stablehlo.custom_call @tpu_custom_call"


@pytest.mark.slow
@pytest.mark.default_cases(
    "attention_everything", "attention_chunk", "attention_latent", "gated_delta", "grouped_matmul", "paged_attention"
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_are_lowered_for_a_tpu(name):
    program = PROGRAMS[name]()
    lowered = jax.jit(program.run).trace(*program.shapes()).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count(KERNEL) == program.kernels


@pytest.mark.slow
@pytest.mark.default_cases("minimal")
@pytest.mark.parametrize("policy", ["none", "minimal"])
def test_a_training_step_is_lowered_with_the_kernels_that_auto_selects(policy):
    """The forward attention kernel once, the backward kernels for queries and keys; on four abstract devices."""
    config = compose([*MODEL, "mesh=fsdp", f"model.remat.policy={policy}"], None).config
    mesh = abstract_mesh(config.mesh, devices=4, slices=1).update(abstract_device=AbstractDevice("TPU v5e", 1, "tpu"))
    sharder = Sharder(mesh, config.mesh.rules)
    assert (sharder.platform, Sharder.single().platform) == ("tpu", "cpu")
    assert trace_pretraining_step(config, sharder).lower(lowering_platforms=("tpu",)).as_text().count(KERNEL) == 3


@pytest.mark.parametrize("chip", [pytest.param(chip, marks=ON_TPU) for chip in CHIPS])
def test_everything_compiles(chip):
    """Each chip in a separate process."""
    process = subprocess.run([sys.executable, tpu_compile.__file__, chip], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-4000:]
    *kernels, training, decoding = map(json.loads, process.stdout.splitlines())
    assert [line["program"] for line in kernels] == list(PROGRAMS)
    assert [line for line in kernels if line["kernels"] < line["least"]] == []
    assert any("splash" in name for name in training["names"])
    assert 0 < training["memory"] < 1
    assert decoding["has_pages_kernel"]


def test_without_libtpu_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(ConfigError, match="libtpu is not installed"):
        devices_of("v5e")


@pytest.mark.exhaustive
def test_a_step_is_compiled_ahead_of_time_for_the_devices_of_a_mesh():
    """On simulated CPU devices, where no kernels are used; two layers, so that a loop counts as one."""
    overrides = ["model=llama3-tiny", "model.num_layers=2", "train.seq_len=32", "train.per_device_batch_size=1"]
    config = compose([*overrides, "mesh=fsdp"], None).config
    report, _ = compile_report(config, Sharder(build_mesh(config.mesh, jax.devices()[:2]), config.mesh.rules))
    assert (report.devices, report.kernels) == (2, {})
    assert report.bytes_per_device["state and batch"] > 0 < report.tflop_per_device
