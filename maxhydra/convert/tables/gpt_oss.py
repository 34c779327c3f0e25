"""gpt-oss (OpenAI, 2025): attention sinks, windows in every second layer, MoE with biases and clamped SwiGLU."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import head, layer_kinds, pattern_of, rope, rope_settings, size_settings, sizes
from maxhydra.convert.name_table import Join, Settings, Table, Weight
from maxhydra.convert.tables import llama

HF = llama.HF
EXPERTS = HF + "mlp.experts."
LAYER = (
    *llama.MIXER,
    Weight("attention/query/bias", HF + "self_attn.q_proj.bias", inputs=0),
    Weight("attention/key/bias", HF + "self_attn.k_proj.bias", inputs=0),
    Weight("attention/value/bias", HF + "self_attn.v_proj.bias", inputs=0),
    Weight("attention/out/bias", HF + "self_attn.o_proj.bias", inputs=0),
    Weight("attention/sinks", HF + "self_attn.sinks"),
    Weight("mlp/router/kernel", HF + "mlp.router.weight"),
    Weight("mlp/router/bias", HF + "mlp.router.bias", inputs=0),
    Weight(
        ("mlp/experts/gate/kernel", "mlp/experts/up/kernel"),
        EXPERTS + "gate_up_proj",
        transposed=False,
        leading=1,
        join=Join.interleaved,
    ),
    Weight(
        ("mlp/experts/gate/bias", "mlp/experts/up/bias"),
        EXPERTS + "gate_up_proj_bias",
        inputs=0,
        leading=1,
        join=Join.interleaved,
    ),
    Weight("mlp/experts/down/kernel", EXPERTS + "down_proj", transposed=False, leading=1),
    Weight("mlp/experts/down/bias", EXPERTS + "down_proj_bias", inputs=0, leading=1),
)
KINDS = {"sliding_attention": "local", "full_attention": "global"}


def to_model(settings: Settings) -> dict[str, Any]:
    layers = settings["num_hidden_layers"]
    types = settings.get("layer_types") or [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]
    bias = "all" if settings.get("attention_bias", True) else "none"
    shared = {"sinks": True, "bias": bias, "rope": rope(settings)}
    attention = {"local": {**shared, "window": settings["sliding_window"]}, "global": shared}
    moe = {
        "experts": settings["num_local_experts"],
        "top_k": settings["num_experts_per_tok"],
        "bias": True,
        "clamp": settings.get("swiglu_limit", 7.0),
        "clamp_slope": settings.get("swiglu_alpha", 1.702),
        "router": {"scores": "softmax_of_chosen", "bias": True},
    }
    names = [KINDS[name] for name in types]
    return {
        **sizes(settings),
        "head": head(settings, tied=False),
        "kinds": {
            name: {"attention": attention[name], "feed_forward": "moe", "moe": moe} for name in dict.fromkeys(names)
        },
        "pattern": pattern_of(names),
    }


def to_settings(model: config.Model) -> Settings | None:
    kinds = layer_kinds(model)
    first, windows = kinds[0], [kind.attention.window for kind in kinds]
    return {
        **size_settings(model),
        **rope_settings(first.attention.rope),
        "tie_word_embeddings": model.head is config.Head.tied,
        "attention_bias": first.attention.bias is config.AttentionBias.all,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        "sliding_window": next((window for window in windows if window is not None), 128),
        "num_local_experts": first.moe.experts,
        "num_experts_per_tok": first.moe.top_k,
        "swiglu_limit": first.moe.clamp,
        "swiglu_alpha": first.moe.clamp_slope,
    }


TABLE = Table(
    hf_types={"gpt_oss": "GptOssForCausalLM"},
    layer=LAYER,
    non_layer=llama.NON_LAYER,
    to_model=to_model,
    to_settings=to_settings,
)
