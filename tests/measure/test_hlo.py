"""HLO text as data: trip counts, bytes of collectives and their groups, against hand-counted programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxhydra.measure import hlo

TEXT = """\
HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %sum = f32[] add(%a, %a)
}

%body (state: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %state = (s32[], bf16[4,8]{1,0}) parameter(0)
  %x = bf16[4,8]{1,0} get-tuple-element(%state), index=1
  %gather = (bf16[4,8]{1,0}, bf16[32,8]{1,0}) all-gather-start(%x), replica_groups=[2,4]<=[8], dimensions={0}
  %gathered = bf16[32,8]{1,0} all-gather-done(%gather)
  ROOT %out = (s32[], bf16[4,8]{1,0}) tuple(%x, %x)
}

%condition (state: (s32[], bf16[4,8])) -> pred[] {
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (p: bf16[4,8]) -> f32[2] {
  %p = bf16[4,8]{1,0} parameter(0)
  %start = (s32[], /*index=1*/bf16[4,8]{1,0}) tuple(%p, %p)
  %loop = (s32[], bf16[4,8]{1,0}) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  %big = f32[64,1024]{1,0} custom-call(%p), custom_call_target="__cublas$lt$matmul"
  %total = f32[16]{0} slice(%big)
  %sums = f32[16]{0} all-reduce(%total), replica_groups={{0,2},{1,3}}, to_apply=%add
  ROOT %scattered = f32[2]{0} reduce-scatter(%sums), replica_groups=[1,8]<=[8], to_apply=%add
}
"""


def test_collectives_of_a_program_text() -> None:
    program = hlo.parse_program(TEXT)
    found = {one.kind: one for one in hlo.collectives(program)}
    assert {kind: (one.count, one.bytes, one.dtype) for kind, one in found.items()} == {
        "all-gather": (5, 4 * 4 * 8 * 2, "bf16"),
        "all-reduce": (1, 64, "f32"),
        "reduce-scatter": (1, 64, "f32"),
    }
    assert {kind: one.wire_bytes for kind, one in found.items()} == {
        "all-gather": 256 * 3 / 4,
        "all-reduce": 2 * 64 / 2,
        "reduce-scatter": 64 * 7 / 8,
    }
    assert hlo.kernel_calls(program) == {"__cublas$lt$matmul": 1}
    assert hlo.largest_arrays(program, 1) == [("f32[64,1024]", 2**18, "")]
    assert program.unknown_loops == 0


@pytest.mark.parametrize(("pairs", "wire_bytes"), [("{0,0},{1,1}", 0), ("{0,0},{1,2},{2,1}", 8)])
def test_a_permutation_of_every_device_to_itself_sends_nothing(pairs: str, wire_bytes: int) -> None:
    line = f"  %moved = f32[2]{{0}} collective-permute(%p), source_target_pairs={{{pairs}}}"
    text = f"ENTRY %main (p: f32[2]) -> f32[2] {{\n  %p = f32[2]{{0}} parameter(0)\n{line}\n}}\n"
    assert [one.wire_bytes for one in hlo.collectives(hlo.parse_program(text))] == [wire_bytes]


@pytest.mark.parametrize(
    "attributes, devices, axes",
    [
        ("replica_groups={{0,1},{2,3}}", (0, 1), "tensor"),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3), "sequence+tensor"),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4), "fsdp"),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", (0, 4), "fsdp"),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", (0, 1, 4, 5), "fsdp+tensor"),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}, x=1", (0, 4), "fsdp"),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", (0, 1, 2, 3), "sequence+tensor"),
        ("source_target_pairs={{0,2},{2,0},{1,3}}", (0, 2), "sequence"),
    ],
)
def test_groups_of_devices(attributes: str, devices: tuple[int, ...], axes: str) -> None:
    assert hlo.first_group(attributes) == devices
    assert hlo.axes_of(devices, {"data": 1, "fsdp": 2, "sequence": 2, "tensor": 2}) == axes


def test_a_gather_inside_a_compiled_scan_counts_once_per_iteration() -> None:
    mesh = jax.make_mesh((len(jax.devices()),), ("fsdp",))
    if mesh.size == 1:
        pytest.skip("needs several devices")
    weights = jax.ShapeDtypeStruct((3, 64, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, "fsdp")))
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))

    def run(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, weights)[0]

    program = hlo.parse_program(jax.jit(run).lower(weights, x).compile().as_text())
    gathers = [one for one in hlo.collectives(program) if one.kind == "all-gather"]
    assert sum(one.bytes * one.count for one in gathers) == np.prod(weights.shape) * 4
    assert {hlo.axes_of(one.devices, {"fsdp": mesh.size}) for one in gathers} == {"fsdp"}
