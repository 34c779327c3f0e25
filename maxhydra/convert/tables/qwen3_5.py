"""Qwen3.5 (Qwen Team, 2026), dense, text: the layers of Qwen3-Next with separate DeltaNet projections."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import activation_setting, layer_kinds
from maxhydra.convert.name_table import Settings, Table, Weight
from maxhydra.convert.tables import llama, qwen3_next
from maxhydra.convert.tables.qwen3_next import DELTA, HF, MIXERS

SEPARATE = (
    Weight(
        ("attention/query/kernel", "attention/key/kernel", "attention/value/kernel"),
        HF + "linear_attn.in_proj_qkv.weight",
        requires=DELTA,
    ),
    Weight("attention/gate/kernel", HF + "linear_attn.in_proj_z.weight", requires=DELTA),
    Weight("attention/rate/kernel", HF + "linear_attn.in_proj_b.weight"),
    Weight("attention/decay/kernel", HF + "linear_attn.in_proj_a.weight"),
)
LAYER = (*qwen3_next.NORMS, *qwen3_next.ATTENTION, *qwen3_next.STATE, *SEPARATE)


def to_model(settings: Settings) -> dict[str, Any]:
    types = qwen3_next.mixers(settings)
    kinds = {MIXERS[name]: qwen3_next.kind(settings, name, qwen3_next.mlp(settings)) for name in types}
    return qwen3_next.model_values(settings, kinds, [MIXERS[name] for name in types])


def to_settings(model: config.Model) -> Settings | None:
    first = layer_kinds(model)[0]
    return {
        **qwen3_next.common_settings(model),
        "intermediate_size": model.mlp_dim,
        "hidden_act": activation_setting(first.mlp.activation),
    }


TABLE = Table(
    hf_types={"qwen3_5_text": "Qwen3_5ForCausalLM"},
    layer=(*LAYER, *llama.MLP),
    non_layer=llama.NON_LAYER,
    to_model=to_model,
    to_settings=to_settings,
    ignored=("*.rotary_emb.inv_freq", "mtp.*"),
)
