"""DeepSeek and Kimi K2 in Hugging Face files: published settings and MTP layers."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from maxhydra.config.compose.composer import compose
from maxhydra.config.schema import model as config
from maxhydra.convert.compatibility import is_same
from maxhydra.convert.hf_config import build_model, find_table
from maxhydra.convert.hf_write import find_family, write_hf
from maxhydra.convert.load import load_weights
from maxhydra.convert.streaming import InMemoryArrays
from maxhydra.model import build
from tests.support.golden_models import Golden

GOLDEN = Path(__file__).parents[1] / "parity" / "golden" / "deepseek3"
# Tensors of an MTP layer in addition to those of a decoder layer (DeepSeek-V3, README_WEIGHTS.md).
MTP_TENSORS = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}


def names(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="numpy") as opened:
        return set(opened.keys())


@pytest.mark.slow
def test_mtp_layers_are_numbered_after_the_last_layer(tmp_path):
    golden = Golden(GOLDEN)
    model = build(dataclasses.replace(golden.model.config, mtp=config.Mtp(depth=1)))
    rng = np.random.default_rng(0)
    mtp_params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), model.shapes["mtp"])
    params = {**golden.params, "mtp": mtp_params}
    write_hf(
        tmp_path, model, InMemoryArrays(params), table=find_family(model, None), dtype=np.dtype("float32"), extra={}
    )
    layer_tensors = {name.removeprefix("model.layers.2.") for name in names(tmp_path) if ".layers.2." in name}
    mtp_tensors = {name.removeprefix("model.layers.3.") for name in names(tmp_path) if ".layers.3." in name}
    assert mtp_tensors - layer_tensors == MTP_TENSORS and layer_tensors <= mtp_tensors

    # Published files repeat the embedding and the head in the MTP layer.
    tensors = load_file(tmp_path / "model.safetensors")
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    tensors |= {f"model.layers.3.{copy}.weight": tensors[f"{name}.weight"] for copy, name in copies.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for target, expected in ((model, params), (golden.model, golden.params)):
        loaded = load_weights(str(tmp_path), target, shardings=None, dtype="float32")
        assert jax.tree.structure(loaded) == jax.tree.structure(expected)
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, loaded, expected)))


V2 = {
    "model_type": "deepseek_v2",
    "num_hidden_layers": 60,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "first_k_dense_replace": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "topk_method": "group_limited_greedy",
    "n_group": 8,
    "topk_group": 3,
    "routed_scaling_factor": 16.0,
    "norm_topk_prob": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
LITE = {"num_hidden_layers": 27, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408}
LITE |= {"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "n_routed_experts": 64}
LITE |= {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
V3 = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432}
V3 |= {"moe_intermediate_size": 2048, "vocab_size": 129280, "first_k_dense_replace": 3, "n_routed_experts": 256}
V3 |= {"n_shared_experts": 1, "num_experts_per_tok": 8, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
V3 |= {"topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "num_nextn_predict_layers": 1}
V3 |= {"rope_scaling": {**V2["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0}}
V32 = {"model_type": "deepseek_v32", "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
K2 = {"model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840}
K2 |= {"max_position_embeddings": 131072, "rope_theta": 50000.0, "first_k_dense_replace": 1, "n_routed_experts": 384}
K2 |= {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}
K2 |= {"rope_scaling": {**V3["rope_scaling"], "factor": 32.0, "beta_fast": 1.0}}
PUBLISHED = {
    "deepseek2-16b": V2 | LITE,
    "deepseek2-236b": V2,
    "deepseek3-671b": V2 | V3,
    "deepseek3.2-671b": V2 | V3 | V32,
    "kimi-k2-1t": V2 | V3 | K2,
}


@pytest.mark.slow
@pytest.mark.default_cases("deepseek3.2-671b")
@pytest.mark.parametrize("name", PUBLISHED)
def test_an_option_equals_the_published_settings(name):
    table = find_table("", name, PUBLISHED[name])
    option = compose([f"model={name}", "train.seq_len=128"]).config.model
    assert is_same(build_model("", name, table.to_model(PUBLISHED[name])), option)
    assert find_family(build(option), None) is table
