"""Tile sizes: their config keys, their effect on a training step, and the candidates for tuning."""

import dataclasses
from collections import namedtuple
from collections.abc import Iterator
from functools import reduce
from typing import Any

import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractDevice

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.compose.overrides import parse
from maxhydra.config.compose.validate import section_from
from maxhydra.config.schema.kernels import MosaicTiles, Tiles, TritonTiles
from maxhydra.config.schema.tasks.analysis import TuneTask
from maxhydra.kernels import attention, grouped_matmul, linear_cross_entropy, qkv_rope, rms_norm
from maxhydra.kernels.dispatch import UnsupportedError
from maxhydra.kernels.tiles import override_sizes
from maxhydra.runtime.detect import hardware_options
from maxhydra.sharding import Sharder, abstract_mesh
from maxhydra.train.compile import trace_pretraining_step
from maxhydra.tune.space import Axis, axes

MOSAIC = {"attention": namedtuple("Forward", "forward")(attention.mosaic.TILES[64].forward)}
MEASURED: dict[str, Any] = {
    "attention": attention.triton.BLOCKS[64],
    "grouped_matmul": grouped_matmul.triton.MEASURED,
    "rms_norm": rms_norm.triton.MEASURED,
    "qkv_rope": qkv_rope.triton.MEASURED,
    "linear_cross_entropy": linear_cross_entropy.triton.MEASURED,
}
TILES = "model.kernels.tiles."
TRITON = f"{TILES}triton."
MODEL = [
    "model=mixtral-tiny",
    "model.num_layers=1",
    "model.emb_dim=256",
    "model.head_dim=64",
    "model.mlp_dim=128",
    "model.dtypes.compute=bfloat16",
    "train.seq_len=512",
    "train.per_device_batch_size=1",
    *(f"model.kernels.{operation}=triton" for operation in MEASURED),
]


def sizes_of(tile: Any) -> dict[str, int]:
    """All sizes of a kernel's tile by name."""
    sizes: dict[str, int] = {}
    for name, value in tile._asdict().items():
        below = {"": value} if isinstance(value, int) else sizes_of(value)
        sizes |= {f"{name}.{key}".rstrip("."): size for key, size in below.items()}
    return sizes


def nested(sizes: dict[str, int]) -> dict[str, Any]:
    """The same sizes as a nested mapping, as in YAML."""
    mapping: dict[str, Any] = {}
    for name, size in sizes.items():
        *path, last = name.split(".")
        reduce(lambda node, part: node.setdefault(part, {}), path, mapping)[last] = size
    return mapping


@pytest.mark.parametrize(("schema", "kernels"), [(TritonTiles, MEASURED), (MosaicTiles, MOSAIC)])
def test_the_schema_matches_the_tiles_of_the_kernels(schema: type, kernels: dict[str, Any]) -> None:
    """And accepts the measured sizes."""
    values = {operation: nested(sizes_of(measured)) for operation, measured in kernels.items()}
    tiles = vars(section_from(schema, values, path="", source=""))
    assert set(tiles) == set(kernels)
    for operation, measured in kernels.items():
        assert tiles[operation].sizes == tuple(sizes_of(measured).items())
        assert override_sizes(measured, tiles[operation].sizes) == measured
        (name, size), *_ = doubled = [(name, 2 * size) for name, size in sizes_of(measured).items()]
        assert sizes_of(override_sizes(measured, tuple(doubled[:1]))) == {**sizes_of(measured), name: size}


def test_all_problems_with_tiles_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        compose([
            "model=micro",
            "model.kernels.tiles.triton.atention.forward.keys=64",
            "model.kernels.tiles.triton.rms_norm.forward.row=2",
            "model.kernels.tiles.triton.rms_norm.backward.rows=12",
            "model.kernels.tiles.triton.grouped_matmul.weight_grad.stages=0",
        ])  # fmt: skip
    message = str(caught.value)
    for word in (
        "triton.atention",
        "did you mean 'model.kernels.tiles.triton.rms_norm.forward.rows'?",
        "such as 8 or 16",
        "grouped_matmul.weight_grad.stages",
    ):
        assert word in message
    with pytest.raises(ConfigError, match=r"set model\.kernels\.qkv_rope=triton"):
        compose(["model=micro", "model.kernels.tiles.triton.qkv_rope.tokens=32"])


def kernels(jaxpr: Any) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Name, grid and warps of every kernel in a program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            params = equation.params
            yield params["name"], params["grid_mapping"].grid, params["compiler_params"].num_warps
        for inner in jaxprs_in_params(equation.params):
            yield from kernels(inner)


def step_kernels(*overrides: str) -> dict[str, tuple[tuple[int, ...], int]]:
    config = compose([*MODEL, *overrides]).config
    mesh = abstract_mesh(config.mesh, devices=1, slices=1).update(abstract_device=AbstractDevice("H200", 1, "gpu"))
    traced = trace_pretraining_step(config, Sharder(mesh, config.mesh.rules))
    return {name: (grid, warps) for name, grid, warps in kernels(traced.jaxpr)}


@pytest.mark.slow
def test_a_training_step_uses_the_requested_tiles() -> None:
    """512 tokens, 4 heads over 2 of 64, 4 experts of 128, two of them for a token."""
    sizes = {
        "attention.forward.queries": 32,
        "attention.for_keys.keys": 128,
        "grouped_matmul.forward.columns": 64,
        "rms_norm.backward.rows": 4,
        "rms_norm.forward.warps": 2,
        "qkv_rope.tokens": 16,
        "linear_cross_entropy.warps": 8,
    }
    kernels_of_step = step_kernels(*(f"{TRITON}{name}={size}" for name, size in sizes.items()))
    assert kernels_of_step == {
        "attention_forward": ((512 // 32, 4, 1), 4),
        "attention_backward_queries": ((512 // 64, 4, 1), 4),
        "attention_backward_keys": ((512 // 128, 2, 1), 4),
        "grouped_matmul": ((12 * 256 // 64,), 8),
        "grouped_matmul_weight_grad": ((2, 4), 8),
        "copy_to_rows": ((512,), 4),
        "rms_norm": ((512 // 16,), 2),
        "rms_norm_backward": ((512 // 4,), 4),
        "qkv_rope_backward": ((512 // 16, 8), 8),
        "cross_entropy": ((512,), 8),
    }


def test_a_size_that_does_not_divide_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"tile size that divides 576, which forward\.queries=128 does not"):
        step_kernels("train.seq_len=576", "model.kernels.tiles.triton.attention.forward.queries=128")


def tile_axes(model: str, hardware: str) -> list[Axis]:
    config = compose(["task=tune", f"model={model}", "train.seq_len=4096"]).config
    assert isinstance(config.task, TuneTask)
    return [axis for axis in axes(config, config.task, hardware_options()[hardware]) if axis.under]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "missing"),
    [
        ("mixtral-8x7b", set()),
        ("gpt3-6b", {"grouped_matmul", "rms_norm", "qkv_rope"}),
    ],
)
def test_tiles_of_the_models_kernels_are_tuned_on_a_gpu(model: str, missing: set[str]) -> None:
    tile_axis_list = tile_axes(model, "gpu-h200")
    assert {axis.key.split(".")[4] for axis in tile_axis_list} == set(MEASURED) - missing
    for axis in tile_axis_list:
        sizes = [override.value() for override in parse(list(axis.values), loader=None).overrides]
        for candidate in sizes:
            tile = nested({f"{axis.key.removeprefix(TILES)}.{name}": size for name, size in candidate.items()})
            section_from(Tiles, tile, path="", source="")
    assert not tile_axes(model, "cpu")


def test_candidates_exclude_the_default_and_sizes_that_do_not_divide() -> None:
    for kernel, candidates in attention.triton.candidate_tiles(128, 64 * 9).items():
        assert {sizes["queries"] for sizes in candidates} == {sizes["keys"] for sizes in candidates} == {64}
        assert attention.triton.Block(**candidates[0]) != getattr(attention.triton.BLOCKS[128], kernel)
    assert not attention.triton.candidate_tiles(320, 4096) and not attention.mosaic.candidate_tiles(80, 4096)
    assert {sizes["logits"] for sizes in linear_cross_entropy.triton.candidate_tiles(5000)[""]} == {4096}


def test_requested_sizes_are_never_ignored() -> None:
    """A backend without a tile raises; auto selects one that has it, or gives the reason why none can."""
    call = rms_norm.Call(platform="gpu", dtype="bfloat16", rows=512, dim=256, sizes=(("forward.rows", 2),))
    assert rms_norm.OPERATION.choose("auto", call) == "triton"
    with pytest.raises(UnsupportedError, match="has no configurable tile sizes"):
        rms_norm.OPERATION.choose("xla", call)
    with pytest.raises(UnsupportedError, match=r"triton runs on gpu, not cpu; xla has no configurable tile"):
        rms_norm.OPERATION.choose("auto", dataclasses.replace(call, platform="cpu"))
