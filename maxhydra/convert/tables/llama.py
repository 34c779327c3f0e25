"""Llama (Touvron et al., 2023; Dubey et al., 2024) and models with the same tensor names, such as SmolLM2."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import (
    activation,
    activation_setting,
    head,
    rope,
    rope_settings,
    size_settings,
    sizes,
)
from maxhydra.convert.name_table import Gguf, Settings, Table, Weight

HF, GGUF = "model.layers.{layer}.", "blk.{layer}."
MIXER = (
    Weight("attention_norm/scale", HF + "input_layernorm.weight", GGUF + "attn_norm.weight"),
    Weight(
        "attention/query/kernel", HF + "self_attn.q_proj.weight", GGUF + "attn_q.weight", gguf_interleaved_rope=True
    ),
    Weight("attention/key/kernel", HF + "self_attn.k_proj.weight", GGUF + "attn_k.weight", gguf_interleaved_rope=True),
    Weight("attention/value/kernel", HF + "self_attn.v_proj.weight", GGUF + "attn_v.weight"),
    Weight("attention/out/kernel", HF + "self_attn.o_proj.weight", GGUF + "attn_output.weight", inputs=2),
    Weight("mlp_norm/scale", HF + "post_attention_layernorm.weight", GGUF + "ffn_norm.weight"),
)
MLP = (
    Weight("mlp/gate/kernel", HF + "mlp.gate_proj.weight", GGUF + "ffn_gate.weight"),
    Weight("mlp/up/kernel", HF + "mlp.up_proj.weight", GGUF + "ffn_up.weight"),
    Weight("mlp/down/kernel", HF + "mlp.down_proj.weight", GGUF + "ffn_down.weight"),
)
LAYER = (*MIXER, *MLP)
# Additional tensors of models with attention_bias or mlp_bias, and in layers of other families.
PROJECTIONS = {"query": "q", "key": "k", "value": "v", "out": "o"}
BIASES = tuple(
    Weight(f"attention/{name}/bias", HF + f"self_attn.{letter}_proj.bias", inputs=0)
    for name, letter in PROJECTIONS.items()
)
MLP_BIASES = tuple(
    Weight(f"mlp/{name}/bias", HF + f"mlp.{name}_proj.bias", inputs=0) for name in ("gate", "up", "down")
)
QK_NORMS = (
    Weight("attention/query_norm/scale", HF + "self_attn.q_norm.weight"),
    Weight("attention/key_norm/scale", HF + "self_attn.k_norm.weight"),
)
# MoE instead of an MLP.
EXPERTS = (
    Weight("mlp/router/kernel", HF + "mlp.gate.weight"),
    Weight("mlp/experts/gate/kernel", HF + "mlp.experts.{expert}.gate_proj.weight"),
    Weight("mlp/experts/up/kernel", HF + "mlp.experts.{expert}.up_proj.weight"),
    Weight("mlp/experts/down/kernel", HF + "mlp.experts.{expert}.down_proj.weight"),
)
# Norms after attention and feed-forward.
POST_NORMS = (
    Weight("attention_post_norm/scale", HF + "post_attention_layernorm.weight"),
    Weight("mlp_post_norm/scale", HF + "post_feedforward_layernorm.weight"),
)
BODY = tuple(row for row in LAYER if row.path not in ("attention_norm/scale", "mlp_norm/scale"))
NON_LAYER = (
    Weight("embedding/table", "model.embed_tokens.weight", "token_embd.weight", transposed=False),
    Weight("final_norm/scale", "model.norm.weight", "output_norm.weight"),
    Weight("head/kernel", "lm_head.weight", "output.weight"),
)


# Key of config.json -> GGUF key.
GGUF_SETTINGS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}


def to_model(settings: Settings) -> dict[str, Any]:
    layer = {"attention": {"rope": rope(settings)}, "mlp": {"activation": activation(settings["hidden_act"])}}
    return {**sizes(settings), "head": head(settings, tied=False), "kinds": {"layer": layer}}


def to_settings(model: config.Model) -> Settings | None:
    kind = model.kinds[model.pattern[0]]
    return {
        **size_settings(model),
        **rope_settings(kind.attention.rope),
        "hidden_act": activation_setting(kind.mlp.activation),
        "tie_word_embeddings": model.head is config.Head.tied,
    }


def llama_to_model(settings: Settings) -> dict[str, Any]:
    values = to_model(settings)
    layer = values["kinds"]["layer"]
    layer["attention"]["bias"] = "all" if settings.get("attention_bias") else "none"
    layer["mlp"]["bias"] = bool(settings.get("mlp_bias"))
    return values


def llama_to_settings(model: config.Model) -> Settings | None:
    kind, settings = model.kinds[model.pattern[0]], to_settings(model)
    assert settings is not None
    has_bias = kind.attention.bias is config.AttentionBias.all
    return {**settings, "attention_bias": has_bias, "mlp_bias": kind.mlp.bias}


TABLE = Table(
    hf_types={"llama": "LlamaForCausalLM"},
    layer=(*LAYER, *BIASES, *MLP_BIASES),
    non_layer=NON_LAYER,
    to_model=llama_to_model,
    to_settings=llama_to_settings,
    ignored=("*.rotary_emb.inv_freq", "rope_freqs.weight"),
    gguf=Gguf(architectures=("llama",), settings=GGUF_SETTINGS),
)
