"""Weights published in few bits: the numbers that torch and transformers read from the same bytes."""

import json
from pathlib import Path

import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.convert.hf import hf_source
from maxhydra.convert.quantized import from_mxfp4, restored
from tests.golden_models import Golden

torch = pytest.importorskip("torch", reason="needs the parity extra")
pytest.importorskip("transformers", reason="needs the parity extra")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.parity
GOLDEN = Path(__file__).parent / "golden" / "llama"


def test_mxfp4_is_read_as_transformers_reads_it() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 6, 2, 16), dtype=np.uint8)
    scales = rng.integers(120, 131, (3, 6, 2), dtype=np.uint8)
    wanted = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
    np.testing.assert_array_equal(from_mxfp4(blocks, scales), wanted.numpy())
    tensors = {"experts.gate_up_proj_blocks": blocks, "experts.gate_up_proj_scales": scales}
    shapes, read = restored({name: array.shape for name, array in tensors.items()}, tensors.__getitem__, {})
    assert shapes == {"experts.gate_up_proj": (3, 64, 6)}
    np.testing.assert_array_equal(read("experts.gate_up_proj"), wanted.numpy())


def test_a_folder_in_blocks_of_float8_is_the_model_it_stands_for(tmp_path: Path) -> None:
    """Blocks of 16 x 16, the last ones cut; every matrix of a layer is packed, and read back as torch would."""
    block = 16
    packed, wanted = {}, {}
    for name, weight in safetensors.load_file(GOLDEN / "model.safetensors").items():
        if "proj" not in name:
            packed[name] = weight
            continue
        rows, columns = (-(-size // block) for size in weight.shape)
        scale = torch.rand(rows, columns) + 0.5
        spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[: weight.shape[0], : weight.shape[1]]
        packed[name] = (weight.float() / spread).to(torch.float8_e4m3fn)
        packed[name + "_scale_inv"] = scale
        wanted[name] = (packed[name].float() * spread).numpy()
    safetensors.save_file(packed, tmp_path / "model.safetensors")
    settings = json.loads((GOLDEN / "config.json").read_text())
    quantization = {"quant_method": "fp8", "weight_block_size": [block, block]}
    (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": quantization}))
    source = hf_source("", "", tmp_path)
    for name, numbers in wanted.items():
        np.testing.assert_array_equal(source.read(name), numbers)
    for file in ("expected.npz", "gradients.safetensors"):
        (tmp_path / file).symlink_to(GOLDEN / file)
    gate = Golden(tmp_path).params["pattern"]["0"]["mlp"]["gate"]["kernel"]
    np.testing.assert_array_equal(gate[1], wanted["model.layers.1.mlp.gate_proj.weight"].T)
    (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ConfigError, match="quant_method=gptq"):
        hf_source("", "", tmp_path)
