"""Sizes of tiles: what a config can ask for, that a training step is cut by it, and what can be tried."""

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
from maxhydra.config.schema.tasks.tune import TuneTask
from maxhydra.config.schema.tiles import MosaicTiles, Tiles, TritonTiles
from maxhydra.kernels import attention, grouped_matmul, linear_cross_entropy, qkv_rope, rms_norm
from maxhydra.kernels.dispatch import UnsupportedError
from maxhydra.kernels.tiles import resized
from maxhydra.runtime.hardware_options import hardware_options
from maxhydra.sharding import Sharder, abstract_mesh
from maxhydra.train.compile_report import traced_step
from maxhydra.tune.space import Axis, axes

MOSAIC = {"attention": namedtuple("Forward", "forward")(attention.mosaic.TILES[64].forward)}
MEASURED: dict[str, Any] = {
    "attention": attention.triton.BLOCKS[64],
    "grouped_matmul": grouped_matmul.triton.MEASURED,
    "rms_norm": rms_norm.triton.MEASURED,
    "rotated_heads": qkv_rope.triton.MEASURED,
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
    """All sizes of a tile, as the kernels have it, by name."""
    found: dict[str, int] = {}
    for name, value in tile._asdict().items():
        below = {"": value} if isinstance(value, int) else sizes_of(value)
        found |= {f"{name}.{one}".rstrip("."): size for one, size in below.items()}
    return found


def nested(sizes: dict[str, int]) -> dict[str, Any]:
    """The same as YAML has it."""
    found: dict[str, Any] = {}
    for name, size in sizes.items():
        *path, last = name.split(".")
        reduce(lambda node, part: node.setdefault(part, {}), path, found)[last] = size
    return found


@pytest.mark.parametrize(("schema", "kernels"), [(TritonTiles, MEASURED), (MosaicTiles, MOSAIC)])
def test_the_schema_has_the_sizes_that_the_kernels_have(schema: type, kernels: dict[str, Any]) -> None:
    """And takes those that were measured."""
    given = {operation: nested(sizes_of(measured)) for operation, measured in kernels.items()}
    tiles = vars(section_from(schema, given, path="", source=""))
    assert set(tiles) == set(kernels)
    for operation, measured in kernels.items():
        assert tiles[operation].sizes == tuple(sizes_of(measured).items())
        assert resized(measured, tiles[operation].sizes) == measured
        (name, size), *_ = doubled = [(name, 2 * size) for name, size in sizes_of(measured).items()]
        assert sizes_of(resized(measured, tuple(doubled[:1]))) == {**sizes_of(measured), name: size}


def test_all_that_is_wrong_with_tiles_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        compose([
            "model=micro",
            "model.kernels.tiles.triton.atention.forward.keys=64",
            "model.kernels.tiles.triton.rms_norm.forward.row=2",
            "model.kernels.tiles.triton.rms_norm.backward.rows=12",
            "model.kernels.tiles.triton.grouped_matmul.sums.stages=0",
        ])  # fmt: skip
    said = str(caught.value)
    for word in (
        "triton.atention",
        "did you mean 'model.kernels.tiles.triton.rms_norm.forward.rows'?",
        "such as 8 or 16",
        "grouped_matmul.sums.stages",
    ):
        assert word in said
    with pytest.raises(ConfigError, match=r"set model\.kernels\.rotated_heads=triton"):
        compose(["model=micro", "model.kernels.tiles.triton.rotated_heads.tokens=32"])


def kernels(jaxpr: Any) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Name, programs and warps of every kernel in a program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            params = equation.params
            yield params["name"], params["grid_mapping"].grid, params["compiler_params"].num_warps
        for inner in jaxprs_in_params(equation.params):
            yield from kernels(inner)


def step_kernels(*overrides: str) -> dict[str, tuple[tuple[int, ...], int]]:
    config = compose([*MODEL, *overrides]).config
    mesh = abstract_mesh(config.mesh, devices=1, slices=1).update(abstract_device=AbstractDevice("H200", 1, "gpu"))
    traced = traced_step(config, Sharder(mesh, config.mesh.rules))
    return {name: (grid, warps) for name, grid, warps in kernels(traced.jaxpr)}


def test_a_training_step_is_cut_as_asked() -> None:
    """512 tokens, 4 heads over 2 of 64, 4 experts of 128, two of them for a token."""
    asked = {
        "attention.forward.queries": 32,
        "attention.for_keys.keys": 128,
        "grouped_matmul.products.columns": 64,
        "rms_norm.backward.rows": 4,
        "rms_norm.forward.warps": 2,
        "rotated_heads.tokens": 16,
        "linear_cross_entropy.warps": 8,
    }
    found = step_kernels(*(f"{TRITON}{name}={size}" for name, size in asked.items()))
    assert found == {
        "attention_forward": ((512 // 32, 4, 1), 4),
        "attention_backward_queries": ((512 // 64, 4, 1), 4),
        "attention_backward_keys": ((512 // 128, 2, 1), 4),
        "grouped_matmul": ((12 * 256 // 64,), 8),
        "grouped_matmul_summed": ((2, 4), 8),
        "rms_norm": ((512 // 16,), 2),
        "rms_norm_backward": ((512 // 4,), 4),
        "rotated_heads": ((512 // 16, 8), 8),
        "cross_entropy": ((512,), 8),
    }


def test_a_size_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot cut 576 by forward\.queries=128, which does not divide it"):
        step_kernels("train.seq_len=576", "model.kernels.tiles.triton.attention.forward.queries=128")


def tile_axes(model: str, hardware: str) -> list[Axis]:
    config = compose(["task=tune", f"model={model}", "train.seq_len=4096"]).config
    assert isinstance(config.task, TuneTask)
    return [axis for axis in axes(config, config.task, hardware_options()[hardware]) if axis.under]


@pytest.mark.parametrize(
    ("model", "missing"),
    [
        ("mixtral-8x7b", set()),
        ("gpt3-6b", {"grouped_matmul", "rms_norm", "rotated_heads"}),
    ],
)
def test_tiles_of_kernels_that_a_model_calls_are_tried_on_a_gpu(model: str, missing: set[str]) -> None:
    found = tile_axes(model, "gpu-h200")
    assert {axis.key.split(".")[4] for axis in found} == set(MEASURED) - missing
    for axis in found:
        sizes = [override.value() for override in parse(list(axis.values), loader=None).overrides]
        for one in sizes:
            tile = nested({f"{axis.key.removeprefix(TILES)}.{name}": size for name, size in one.items()})
            section_from(Tiles, tile, path="", source="")
    assert not tile_axes(model, "cpu")


def test_no_tile_is_tried_that_is_known_or_does_not_divide() -> None:
    for kernel, offered in attention.triton.tried(128, 64 * 9).items():
        assert {sizes["queries"] for sizes in offered} == {sizes["keys"] for sizes in offered} == {64}
        assert attention.triton.Block(**offered[0]) != getattr(attention.triton.BLOCKS[128], kernel)
    assert not attention.triton.tried(320, 4096) and not attention.mosaic.tried(80, 4096)
    assert {sizes["logits"] for sizes in linear_cross_entropy.triton.tried(5000)[""]} == {4096}


def test_sizes_are_never_left_out() -> None:
    """A backend without them refuses; auto takes one that has them, or says why none can."""
    call = rms_norm.Call(platform="gpu", devices=1, dtype="bfloat16", rows=512, dim=256, sizes=(("forward.rows", 2),))
    assert rms_norm.OPERATION.choose("auto", call) == "triton"
    with pytest.raises(UnsupportedError, match="has no tile whose sizes can be chosen"):
        rms_norm.OPERATION.choose("xla", call)
    with pytest.raises(UnsupportedError, match=r"triton runs on gpu, not cpu; xla has no tile"):
        rms_norm.OPERATION.choose("auto", dataclasses.replace(call, platform="cpu"))
