"""An XLA:CPU fusion that gives wrong results is disabled."""

import subprocess
import sys

import pytest

from tests.support.cli import environment

CASE = """
import jax, jax.numpy as jnp
from maxhydra import runtime
from maxhydra.config.compose.composer import compose
runtime.start(compose(["hardware={option}"]).config.hardware)
x = jnp.stack([jnp.arange(40_000.0), jnp.zeros(40_000), jnp.zeros(40_000)], axis=1)
squares = jax.jit(jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2)))(x)
print(float(abs(squares - x[:, 0] ** 2).max()))
"""


@pytest.mark.slow
@pytest.mark.default_cases("auto")
@pytest.mark.parametrize("option", ["cpu", "auto"])
def test_matmul_followed_by_reduction_is_correct(option: str) -> None:
    """Row i holds (i, 0, 0), so its squared norm is i^2; without the flags jaxlib 0.10.2 gets the last rows wrong."""
    done = subprocess.run(
        [sys.executable, "-c", CASE.format(option=option)], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 0.0
