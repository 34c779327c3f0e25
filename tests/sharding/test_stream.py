"""The residual stream under tensor parallelism: split along the length between the branches of a block."""

import jax
import numpy as np
import pytest

from maxhydra.measure import hlo
from tests.train.test_loss_over_mesh import B, D, T, gradients

MESH = ["mesh.fsdp=2", "mesh.tensor=4"]


def gathers(length: int, *overrides: str) -> set[str]:
    """Operands of the all-gathers of activations in the layers."""
    step, arguments = gradients(*MESH, *overrides, length=length)
    program = hlo.parse_program(step.lower(*arguments).compile().as_text())
    found = (each for each in hlo.collectives(program) if each.kind == "all-gather" and "loss" not in each.source)
    return {each.operand for each in found if each.operand.startswith(f"f32[{B // 2},")}


@pytest.mark.slow
def test_norms_run_on_parts_of_the_length_unless_the_rule_says_otherwise() -> None:
    assert gathers(T) == {f"f32[{B // 2},{T // 4},{D}]"}
    assert gathers(T, "mesh.rules.act_stream_length=[sequence]") == set()


@pytest.mark.exhaustive
def test_a_length_that_does_not_divide_is_not_split() -> None:
    assert gathers(30) == set()


@pytest.mark.exhaustive
def test_gradients_of_a_length_that_does_not_divide_equal_one_device() -> None:
    one, arguments = gradients("mesh.fsdp=1", devices=1, length=30)
    many, sharded = gradients(*MESH, length=30)
    for got, want in zip(jax.tree.leaves(many(*sharded)), jax.tree.leaves(one(*arguments)), strict=True):
        assert np.linalg.norm(np.asarray(got) - want) < 2e-5 * np.linalg.norm(want)
