"""Kernels and whole steps for TPUs, without a TPU.

Pallas' part of the way runs everywhere. The compiler's needs libtpu, which there is for Linux on x86-64:
`pip install 'jax[tpu]'`, then `MAXHYDRA_TPU=1 pytest -n 0 tests/test_tpu.py`.
"""

import importlib.util
import os

import jax
import pytest
from jax.sharding import AbstractDevice, SingleDeviceSharding
from tpu_programs import PROGRAMS

from maxhydra.config import ConfigError
from maxhydra.config.compose import compose
from maxhydra.decode.arrange import arrange
from maxhydra.decode.programs import Programs
from maxhydra.decode.work import Shape
from maxhydra.layers import PagedRoom
from maxhydra.model import build
from maxhydra.runtime.topology import slice_devices
from maxhydra.sharding import Sharder, abstract_mesh, build_mesh
from maxhydra.train.ahead import compile_ahead, traced_step

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
ON_TPU = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(not (HAS_LIBTPU and "MAXHYDRA_TPU" in os.environ), reason="needs libtpu and MAXHYDRA_TPU=1"),
]
KERNEL = "stablehlo.custom_call @tpu_custom_call"
CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
MODEL = ["model=llama3.2-1b", "model.num_layers=2", "train.seq_len=2048", "train.per_device_batch_size=2"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_are_lowered_for_a_tpu(name):
    program = PROGRAMS[name]()
    lowered = jax.jit(program.run).trace(*program.shapes()).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count(KERNEL) == program.kernels


@pytest.mark.parametrize("policy", ["none", "minimal"])
def test_a_training_step_is_lowered_with_the_kernels_that_auto_takes(policy):
    """Attention forward, once, and backward for queries and for keys; on four devices that are only named."""
    config = compose([*MODEL, "mesh=fsdp", f"model.remat.policy={policy}"], None).config
    mesh = abstract_mesh(config.mesh, devices=4, slices=1).update(abstract_device=AbstractDevice("TPU v5e", 1, "tpu"))
    sharder = Sharder(mesh, config.mesh.rules)
    assert (sharder.platform, Sharder.single().platform) == ("tpu", "cpu")
    assert traced_step(config, sharder).lower(lowering_platforms=("tpu",)).as_text().count(KERNEL) == 3


def devices_of(chip: str):
    return slice_devices(CHIPS[chip], slices=1, hardware=compose([f"hardware=tpu-{chip}"], None).config.hardware)


@pytest.mark.parametrize("chip", [pytest.param(chip, marks=ON_TPU) for chip in CHIPS])
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_compile(name, chip):
    program = PROGRAMS[name]()
    compiled = jax.jit(program.run).lower(*program.shapes(SingleDeviceSharding(devices_of(chip)[0]))).compile()
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') >= program.kernels


@pytest.mark.parametrize("chip", [pytest.param(chip, marks=ON_TPU) for chip in CHIPS])
def test_a_training_step_compiles_with_the_kernels_that_auto_takes(chip):
    config = compose([*MODEL, f"hardware=tpu-{chip}", "mesh=fsdp"], None).config
    ahead = compile_ahead(config, Sharder(build_mesh(config.mesh, devices_of(chip)), config.mesh.rules))
    assert any("splash" in kernel for kernel in ahead.kernels)
    assert 0 < sum(ahead.bytes_per_device.values()) < config.hardware.memory_gib * 2**30


@pytest.mark.parametrize("chip", [pytest.param(chip, marks=ON_TPU) for chip in CHIPS])
def test_a_decoding_step_compiles_with_the_kernel_over_pages(chip):
    config = compose(MODEL, None).config
    sharder = Sharder(build_mesh(config.mesh, devices_of(chip)[:1]), config.mesh.rules)
    model = build(config.model, None, None)
    params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        model.shapes,
        sharder.tree(model.axes),
    )
    room = PagedRoom(512, 16, slots=16, storage=None)
    programs = Programs(arrange(model, sharder, "tpu"), params, room, sharder=sharder, steady=True)
    compiled = programs._compile_forward(Shape(rows=16, tokens=1, pages=64, is_prompt=False))
    programs.close()
    assert "paged_attention" in compiled.as_text()


@pytest.mark.skipif(HAS_LIBTPU, reason="libtpu is installed")
def test_without_libtpu_the_way_to_get_it_is_told():
    with pytest.raises(ConfigError, match="libtpu is not installed"):
        devices_of("v5e")


def test_a_step_is_compiled_ahead_for_the_devices_of_a_mesh():
    """Over simulated devices, where XLA alone makes the kernels; two layers, so that loops are counted as one."""
    overrides = ["model=llama3-tiny", "model.num_layers=2", "train.seq_len=32", "train.per_device_batch_size=1"]
    config = compose([*overrides, "mesh=fsdp"], None).config
    ahead = compile_ahead(config, Sharder(build_mesh(config.mesh, jax.devices()[:2]), config.mesh.rules))
    assert (ahead.devices, ahead.kernels) == (2, {})
    assert ahead.bytes_per_device["state and batch"] > 0 < ahead.tflop_per_device
