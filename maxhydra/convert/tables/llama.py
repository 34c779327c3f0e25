"""Llama and what shares its names, such as Mistral and SmolLM2."""

from maxhydra.convert.table import Table, Weight

HF, GGUF = "model.layers.{layer}.", "blk.{layer}."

TABLE = Table(
    hf_types=("llama", "mistral"),
    gguf_architectures=("llama",),
    layer=(
        Weight("attention_norm/scale", HF + "input_layernorm.weight", GGUF + "attn_norm.weight"),
        Weight(
            "attention/query/kernel", HF + "self_attn.q_proj.weight", GGUF + "attn_q.weight", gguf_is_interleaved=True
        ),
        Weight(
            "attention/key/kernel", HF + "self_attn.k_proj.weight", GGUF + "attn_k.weight", gguf_is_interleaved=True
        ),
        Weight("attention/value/kernel", HF + "self_attn.v_proj.weight", GGUF + "attn_v.weight"),
        Weight("attention/out/kernel", HF + "self_attn.o_proj.weight", GGUF + "attn_output.weight", inputs=2),
        Weight("mlp_norm/scale", HF + "post_attention_layernorm.weight", GGUF + "ffn_norm.weight"),
        Weight("mlp/gate/kernel", HF + "mlp.gate_proj.weight", GGUF + "ffn_gate.weight"),
        Weight("mlp/up/kernel", HF + "mlp.up_proj.weight", GGUF + "ffn_up.weight"),
        Weight("mlp/down/kernel", HF + "mlp.down_proj.weight", GGUF + "ffn_down.weight"),
    ),
    ends=(
        Weight("embedding/table", "model.embed_tokens.weight", "token_embd.weight", inputs=0),
        Weight("final_norm/scale", "model.norm.weight", "output_norm.weight"),
        Weight("head/kernel", "lm_head.weight", "output.weight"),
    ),
    hf_facts={
        "num_layers": "num_hidden_layers",
        "emb_dim": "hidden_size",
        "mlp_dim": "intermediate_size",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "vocab_size": "vocab_size",
        "norm_eps": "rms_norm_eps",
        "activation": "hidden_act",
        "window": "sliding_window",
    },
    gguf_facts={
        "num_layers": "block_count",
        "emb_dim": "embedding_length",
        "mlp_dim": "feed_forward_length",
        "num_heads": "attention.head_count",
        "num_kv_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "vocab_size": "vocab_size",
        "norm_eps": "attention.layer_norm_rms_epsilon",
        "window": "attention.sliding_window",
    },
    ignored=("*.rotary_emb.inv_freq", "rope_freqs.weight"),
    hf_classes={"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"},
    hf_blind={"llama": ("window",)},
)
