"""Weights in four and eight bits, as plain ones."""

import jax.numpy as jnp
import numpy as np

from maxhydra.convert.dequantize import dequantized_view, read_float8
from tests.support.skips import import_optional


def through(tensors, settings=None):
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    plain, read = dequantized_view(settings or {}, shapes, tensors.__getitem__)
    assert {name: read(name).shape for name in plain} == plain
    return {name: read(name) for name in plain}


def test_four_bits_are_those_of_transformers():
    torch = import_optional("torch", extra="parity")
    mxfp4 = import_optional("transformers.integrations.mxfp4", extra="parity")
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (3, 10, 2, 16)).astype(np.uint8)
    scales = random.integers(120, 133, (3, 10, 2)).astype(np.uint8)
    theirs = mxfp4.convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
    found = through({"down_proj_blocks": blocks, "down_proj_scales": scales, "down_proj_bias": np.ones(3)})
    assert sorted(found) == ["down_proj", "down_proj_bias"]
    np.testing.assert_array_equal(found["down_proj"], theirs.numpy())


def test_tiles_of_float8_are_scaled_each_by_its_own():
    """With sides that the tiles do not divide."""
    random = np.random.default_rng(0)
    weight = np.asarray(jnp.asarray(random.normal(size=(5, 7)), jnp.float8_e4m3fn))
    scales = random.uniform(0.5, 2, (2, 3)).astype(np.float32)
    tensors = {"w.weight": weight, "w.weight_scale_inv": scales, "norm.weight": np.ones(4, np.float32)}
    found = through(tensors, {"quantization_config": {"weight_block_size": [4, 3]}})
    assert sorted(found) == ["norm.weight", "w.weight"]
    by_hand = [[float(weight[i, j]) * scales[i // 4, j // 3] for j in range(7)] for i in range(5)]
    np.testing.assert_allclose(found["w.weight"], by_hand, rtol=1e-6)


def test_float8_is_read_from_safetensors(tmp_path):
    torch = import_optional("torch", extra="parity")
    from safetensors.torch import save_file

    tensors = {"a": torch.ones(3), "w": torch.randn(4, 5).to(torch.float8_e4m3fn), "z": torch.ones(2)}
    save_file(tensors, tmp_path / "x.safetensors")
    found = read_float8(tmp_path / "x.safetensors", "w")
    np.testing.assert_array_equal(found.astype(np.float32), tensors["w"].float().numpy())
