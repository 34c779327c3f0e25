"""transformers' Llama with the sizes of a maxhydra model and random weights, for the peer scripts."""

import torch
import transformers

from maxhydra.config.schema.model import Head, Model


def random_llama(config: Model, *, dtype: torch.dtype, device: str) -> transformers.LlamaForCausalLM:
    """Only RoPE's theta is used: its scaling does not affect speed."""
    (kind,) = config.kinds.values()
    settings = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.emb_dim,
        intermediate_size=config.mlp_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.norm_eps,
        max_position_embeddings=config.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": kind.attention.rope.theta},
        tie_word_embeddings=config.head is Head.tied,
        attn_implementation="sdpa",
    )
    with torch.device(device):
        return transformers.LlamaForCausalLM(settings).to(dtype)
