"""Options of model equal the published settings of their families, and settings without support are rejected."""

from typing import Any

import pytest

from maxhydra.config import ConfigError
from maxhydra.config.options import model_option
from maxhydra.convert.compatibility import is_same
from maxhydra.convert.hf_config import build_model, find_table, to_model_values
from maxhydra.convert.hf_write import find_family
from maxhydra.convert.tables import glm
from maxhydra.model import build
from tests.support.skips import import_optional

transformers = import_optional("transformers", extra="parity")

# Settings of published files that differ from the defaults of the config class.
GLM45 = {"head_dim": 128, "attention_bias": True, "rope_theta": 1e6}
GLM45_355B = {"hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 92, "first_k_dense_replace": 3}
GLM45_355B |= {"n_routed_experts": 160, "moe_intermediate_size": 1536, "routed_scaling_factor": 2.5}
NEMOTRON3: dict[str, Any] = {"hybrid_override_pattern": "MEMEM*E" * 5 + "MEMEMEM*EMEMEMEME", "hidden_size": 2688}
NEMOTRON3 |= {"intermediate_size": 1856, "num_key_value_heads": 2, "max_position_embeddings": 262144}
NEMOTRON3 |= {"mamba_num_heads": 64, "n_routed_experts": 128, "num_experts_per_tok": 6, "routed_scaling_factor": 2.5}
NEMOTRON3 |= {"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712}
PUBLISHED = {
    "smollm3-3b": ("smollm3", {"rope_theta": 5e6, "max_position_embeddings": 65536}),
    "glm4.5-106b-a12b": ("glm4_moe", GLM45),
    "glm4.5-355b-a32b": ("glm4_moe", GLM45 | GLM45_355B | {"use_qk_norm": True}),
    "glm4.7-30b-a3b": ("glm4_moe_lite", {"rope_theta": 1e6}),
    "glm5-744b-a40b": ("glm_moe_dsa", {"rope_theta": 1e6}),
    "nemotron3-30b-a3b": ("nemotron_h", NEMOTRON3),
    "minimax-m2-230b-a10b": ("minimax_m2", {"rotary_dim": 64}),
    "mistral4-119b": ("mistral4", {}),
}


@pytest.mark.slow
@pytest.mark.default_cases("nemotron3-30b-a3b", "minimax-m2-230b-a10b")
@pytest.mark.parametrize("name", PUBLISHED)
def test_an_option_equals_the_published_settings(name: str) -> None:
    model_type, differences = PUBLISHED[name]
    settings = transformers.AutoConfig.for_model(model_type, **differences).to_dict()
    table = find_table("", name, settings)
    option = model_option(name)
    assert is_same(build_model("", name, table.to_model(settings)), option)
    assert find_family(build(option), None) is table


@pytest.mark.parametrize("settings", [{"index_topk_freq": 4}, {"index_topk_freq": 3, "index_skip_topk_offset": 5}])
def test_layers_with_an_indexer_are_those_of_transformers(settings: dict[str, int]) -> None:
    expected = transformers.AutoConfig.for_model("glm_moe_dsa", num_hidden_layers=20, **settings).indexer_types
    assert glm.indexer_types({"num_hidden_layers": 20, **settings}) == expected and "shared" in expected


REJECTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "window without use": ("smollm3", {"layer_types": ["sliding_attention"] * 36}, "but use_sliding_window=false"),
    "unknown layer type": ("smollm3", {"layer_types": ["chunked_attention"] * 36}, "unsupported layer_types"),
    "short list": ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers of 2 layers"),
    "no indexer to share": ("glm_moe_dsa", {"indexer_types": ["shared", "full"] * 39}, "unsupported indexer_types"),
    "biased experts": ("nemotron_h", {"mlp_bias": True}, "unsupported mlp_bias=true of moe layers"),
    "bias": ("glm_moe_dsa", {"attention_bias": True}, "unsupported attention_bias=true"),
    "QK norm": ("minimax_m2", {"qk_norm_type": "per_head"}, "unsupported qk_norm_type=per_head (supported: per_layer)"),
    "other text decoder": ("mistral3", {}, "a text decoder of model_type=mistral (supported: mistral4)"),
    "no temperature": (
        "mistral4",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "original_max_position_embeddings": 8192}},
        "lacks llama_4_scaling_beta",
    ),
}


@pytest.mark.parametrize("case", REJECTED)
def test_unsupported_settings_are_rejected(case: str) -> None:
    model_type, changes, message = REJECTED[case]
    settings = transformers.AutoConfig.for_model(model_type).to_dict() | changes
    with pytest.raises(ConfigError) as error:
        to_model_values("model.path", "folder", find_table("", "", settings), settings)
    assert message in str(error.value)
