"""GPT-2 and GPT-3 (Radford et al., 2019; Brown et al., 2020): learned positions, LayerNorm, biases, a plain mlp."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.kinds import layer_kinds
from maxhydra.convert.name_table import Settings, Table, UnsupportedError, Weight
from maxhydra.convert.settings import activation, activation_setting, head

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
# Settings that change the result, and the value for which there is a mechanism.
PLAIN = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}


def _both(path: str, theirs: str, *, inputs: int = 1) -> tuple[Weight, Weight]:
    """A projection of theirs, inputs first, and its bias."""
    return (
        Weight(f"{path}/kernel", f"{theirs}.weight", inputs=inputs, turned=False),
        Weight(f"{path}/bias", f"{theirs}.bias", inputs=0),
    )


def _norm(path: str, theirs: str) -> tuple[Weight, Weight]:
    return Weight(f"{path}/scale", f"{theirs}.weight"), Weight(f"{path}/bias", f"{theirs}.bias")


def to_model(settings: Settings) -> dict[str, Any]:
    for name, served in PLAIN.items():
        if settings.get(name, served) is not served:
            raise UnsupportedError(f"{name}={settings[name]}, where {served} is served")
    sizes = {ours: settings[theirs] for ours, theirs in SIZES.items()}
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
        **{theirs: getattr(model, ours) for ours, theirs in SIZES.items()},
        "n_inner": model.mlp_dim,
        "activation_function": function,
        "tie_word_embeddings": model.head is config.Head.tied,
    }


TABLE = Table(
    hf_types={"gpt2": "GPT2LMHeadModel"},
    layer=(
        *_norm("attention_norm", HF + "ln_1"),
        Weight(tuple(f"{path}/kernel" for path in QKV), HF + "attn.c_attn.weight", turned=False),
        Weight(tuple(f"{path}/bias" for path in QKV), HF + "attn.c_attn.bias", inputs=0),
        *_both("attention/out", HF + "attn.c_proj", inputs=2),
        *_norm("mlp_norm", HF + "ln_2"),
        *_both("mlp/up", HF + "mlp.c_fc"),
        *_both("mlp/down", HF + "mlp.c_proj"),
    ),
    ends=(
        Weight("embedding/table", "transformer.wte.weight", turned=False),
        Weight("embedding/positions", "transformer.wpe.weight", turned=False),
        *_norm("final_norm", "transformer.ln_f"),
        Weight("head/kernel", "lm_head.weight"),
    ),
    to_model=to_model,
    to_settings=to_settings,
    ignored=("*.attn.bias", "*.attn.masked_bias"),
)
