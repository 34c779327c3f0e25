"""Dequantization of MXFP4 and FP8 checkpoints."""

import jax.numpy as jnp
import numpy as np

from maxhydra.convert.hf import dequantized_view, read_float8
from tests.support.skips import import_optional


def dequantize_all(tensors, settings=None):
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    float_shapes, read = dequantized_view(settings or {}, shapes, tensors.__getitem__)
    assert {name: read(name).shape for name in float_shapes} == float_shapes
    return {name: read(name) for name in float_shapes}


def test_mxfp4_equals_transformers():
    torch = import_optional("torch", extra="parity")
    mxfp4 = import_optional("transformers.integrations.mxfp4", extra="parity")
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (3, 10, 2, 16)).astype(np.uint8)
    scales = random.integers(120, 133, (3, 10, 2)).astype(np.uint8)
    expected = mxfp4.convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
    tensors_out = dequantize_all({"down_proj_blocks": blocks, "down_proj_scales": scales, "down_proj_bias": np.ones(3)})
    assert sorted(tensors_out) == ["down_proj", "down_proj_bias"]
    np.testing.assert_array_equal(tensors_out["down_proj"], expected.numpy())


def test_each_fp8_tile_has_its_own_scale():
    """With a shape that is not a multiple of the tile."""
    random = np.random.default_rng(0)
    weight = np.asarray(jnp.asarray(random.normal(size=(5, 7)), jnp.float8_e4m3fn))
    scales = random.uniform(0.5, 2, (2, 3)).astype(np.float32)
    tensors = {"w.weight": weight, "w.weight_scale_inv": scales, "norm.weight": np.ones(4, np.float32)}
    tensors_out = dequantize_all(tensors, {"quantization_config": {"weight_block_size": [4, 3]}})
    assert sorted(tensors_out) == ["norm.weight", "w.weight"]
    expected = [[float(weight[i, j]) * scales[i // 4, j // 3] for j in range(7)] for i in range(5)]
    np.testing.assert_allclose(tensors_out["w.weight"], expected, rtol=1e-6)


def test_float8_is_read_from_safetensors(tmp_path):
    torch = import_optional("torch", extra="parity")
    from safetensors.torch import save_file

    tensors = {"a": torch.ones(3), "w": torch.randn(4, 5).to(torch.float8_e4m3fn), "z": torch.ones(2)}
    save_file(tensors, tmp_path / "x.safetensors")
    tensors_out = read_float8(tmp_path / "x.safetensors", "w")
    np.testing.assert_array_equal(tensors_out.astype(np.float32), tensors["w"].float().numpy())
