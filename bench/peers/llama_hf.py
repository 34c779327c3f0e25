"""transformers' Llama in the sizes of one of ours, with fresh weights, for the scripts beside this one."""

import torch
import transformers

from maxhydra.config.schema.model import Head, Model


def fresh_llama(ours: Model, *, dtype: torch.dtype, device: str) -> transformers.LlamaForCausalLM:
    """Positions turn by rope's theta alone: how they are stretched costs no time."""
    (kind,) = ours.kinds.values()
    settings = transformers.LlamaConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.emb_dim,
        intermediate_size=ours.mlp_dim,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_kv_heads,
        head_dim=ours.head_dim,
        rms_norm_eps=ours.norm_eps,
        max_position_embeddings=ours.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": kind.attention.rope.theta},
        tie_word_embeddings=ours.head is Head.tied,
        attn_implementation="sdpa",
    )
    with torch.device(device):
        return transformers.LlamaForCausalLM(settings).to(dtype)
