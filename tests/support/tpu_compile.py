"""`python tests/support/tpu_compile.py CHIP` compiles every kernel and one train and decode step for a TPU.

One line of JSON each. A process compiles for one chip, since libtpu reads the compiler flags of the hardware once.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from maxhydra.config.compose.composer import compose
from maxhydra.decode.adapters import StepWeights
from maxhydra.decode.step_inputs import StepShape
from maxhydra.decode.steps import CompiledSteps
from maxhydra.decode.weight_layout import choose_weight_layout
from maxhydra.layers import PagedCacheSpec
from maxhydra.measure.compiled import compile_report
from maxhydra.model import build
from maxhydra.runtime.topology import absent_devices
from maxhydra.sharding import Sharder, build_mesh
from tests.support.tpu_programs import PROGRAMS, Program

CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
MODEL = ["model=llama3.2-1b", "model.num_layers=2", "train.seq_len=2048", "train.per_device_batch_size=2"]


def devices_of(chip: str) -> Sequence[jax.Device]:
    return absent_devices(CHIPS[chip], slices=1, hardware=compose([f"hardware=tpu-{chip}"], None).config.hardware)


def compile_all(chip: str) -> Iterator[dict[str, Any]]:
    devices = devices_of(chip)
    for name, make in PROGRAMS.items():
        yield {"program": name, **_compile_kernels(make(), devices[0])}
    yield {"program": "training step", **_compile_training(chip, devices)}
    yield {"program": "decoding step", **_compile_decoding(devices[0])}


def _compile_kernels(program: Program, device: jax.Device) -> dict[str, Any]:
    """Number of kernels in the compiled program, and the minimum expected."""
    text = jax.jit(program.run).lower(*program.shapes(SingleDeviceSharding(device))).compile().as_text()
    return {"kernels": text.count('custom_call_target="tpu_custom_call"'), "least": program.kernels}


def _compile_training(chip: str, devices: Sequence[jax.Device]) -> dict[str, Any]:
    """The kernels that `auto` selects, and the required fraction of a device's memory."""
    config = compose([*MODEL, f"hardware=tpu-{chip}", "mesh=fsdp"], None).config
    report, _ = compile_report(config, Sharder(build_mesh(config.mesh, devices), config.mesh.rules))
    fraction = sum(report.bytes_per_device.values()) / (config.hardware.memory_gib * 2**30)
    return {"names": list(report.kernels), "memory": fraction}


def _compile_decoding(device: jax.Device) -> dict[str, Any]:
    config = compose(MODEL, None).config
    sharder = Sharder(build_mesh(config.mesh, [device]), config.mesh.rules)
    model = build(config.model, None, None)
    params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        model.shapes,
        sharder.tree(model.axes),
    )
    cache_spec = PagedCacheSpec(512, 16, slots=16, storage=None)
    programs = CompiledSteps(
        choose_weight_layout(model, sharder, "tpu"),
        StepWeights(params),
        cache_spec,
        sharder=sharder,
        deterministic=True,
    )
    step = programs._compile_forward(StepShape(rows=16, tokens=1, pages=64, is_prefill=False))
    programs.close()
    return {"has_pages_kernel": "paged_attention" in step.as_text()}


if __name__ == "__main__":
    start = time.perf_counter()
    for line in compile_all(sys.argv[1]):
        print(json.dumps({"chip": sys.argv[1], **line, "at_s": round(time.perf_counter() - start, 1)}), flush=True)
