"""GPT-2 and GPT-3 (Radford et al., 2019; Brown et al., 2020): learned positions, LayerNorm, biases, ungated MLP."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import activation, activation_setting, head, layer_kinds
from maxhydra.convert.name_table import Settings, Table, UnsupportedError, Weight

HF = "transformer.h.{layer}."
SIZES = {
    "num_layers": "n_layer",
    "emb_dim": "n_embd",
    "num_heads": "n_head",
    "vocab_size": "vocab_size",
    "context_length": "n_positions",
    "norm_eps": "layer_norm_epsilon",
}
QKV = ("attention/query", "attention/key", "attention/value")
# Settings that change the result, with the supported value.
SUPPORTED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}


def _linear(path: str, hf: str, *, inputs: int = 1) -> tuple[Weight, Weight]:
    """Rows of a Conv1D, whose weight is [inputs, outputs], and its bias."""
    return (
        Weight(f"{path}/kernel", f"{hf}.weight", inputs=inputs, transposed=False),
        Weight(f"{path}/bias", f"{hf}.bias", inputs=0),
    )


def _norm(path: str, hf: str) -> tuple[Weight, Weight]:
    return Weight(f"{path}/scale", f"{hf}.weight"), Weight(f"{path}/bias", f"{hf}.bias")


def to_model(settings: Settings) -> dict[str, Any]:
    for name, supported in SUPPORTED.items():
        if settings.get(name, supported) is not supported:
            raise UnsupportedError(f"unsupported {name}={settings[name]} (supported: {supported})")
    sizes = {key: settings[hf_key] for key, hf_key in SIZES.items()}
    function = activation(settings.get("activation_function", "gelu_new"))
    layer = {
        "attention": {"bias": "all", "rope": {"kind": "none"}},
        "mlp": {"kind": "plain", "activation": function, "bias": True},
    }
    return {
        **sizes,
        "mlp_dim": settings.get("n_inner") or 4 * settings["n_embd"],
        "num_kv_heads": settings["n_head"],
        "head_dim": settings["n_embd"] // settings["n_head"],
        "norm": "layer",
        "embedding": {"positions": "learned"},
        "head": head(settings, tied=True),
        "kinds": {"layer": layer},
    }


def to_settings(model: config.Model) -> Settings | None:
    function = activation_setting(layer_kinds(model)[0].mlp.activation)
    return {
        **{hf_key: getattr(model, key) for key, hf_key in SIZES.items()},
        "n_inner": model.mlp_dim,
        "activation_function": function,
        "tie_word_embeddings": model.head is config.Head.tied,
    }


TABLE = Table(
    hf_types={"gpt2": "GPT2LMHeadModel"},
    layer=(
        *_norm("attention_norm", HF + "ln_1"),
        Weight(tuple(f"{path}/kernel" for path in QKV), HF + "attn.c_attn.weight", transposed=False),
        Weight(tuple(f"{path}/bias" for path in QKV), HF + "attn.c_attn.bias", inputs=0),
        *_linear("attention/out", HF + "attn.c_proj", inputs=2),
        *_norm("mlp_norm", HF + "ln_2"),
        *_linear("mlp/up", HF + "mlp.c_fc"),
        *_linear("mlp/down", HF + "mlp.c_proj"),
    ),
    non_layer=(
        Weight("embedding/table", "transformer.wte.weight", transposed=False),
        Weight("embedding/positions", "transformer.wpe.weight", transposed=False),
        *_norm("final_norm", "transformer.ln_f"),
        Weight("head/kernel", "lm_head.weight"),
    ),
    to_model=to_model,
    to_settings=to_settings,
    ignored=("*.attn.bias", "*.attn.masked_bias"),
)
