"""transformers' model of the same family and sizes as a maxhydra model, with random weights, for the peer scripts."""

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.utils import parametrize
from transformers.integrations.flex_attention import flex_attention_forward

from maxhydra import model as decoder
from maxhydra.config.schema.model import Model
from maxhydra.convert.hf_config import to_hf_settings
from maxhydra.convert.hf_write import find_family

sys.path.append(str(Path(__file__).parent.parent))
from turn import wait_for_turn as wait_for_turn

EXPERTS = "grouped_mm"
"""transformers' fastest experts in training; `generate` replaces it by batched_mm after the prompt."""


def random_model(
    config: Model, *, dtype: torch.dtype, device: str, attention: str | None = None
) -> transformers.PreTrainedModel:
    """The model whose config.json an export of `config` would write. `attention`: default sdpa where supported."""
    table = find_family(decoder.build(config), None)
    settings = dict(to_hf_settings(table, config) or {})
    hf_config = transformers.AutoConfig.for_model(table.model_type, **settings)
    model_class: Any = getattr(transformers, settings["architectures"][0])
    if attention is None:
        # gpt-oss has no sdpa, because of its sinks.
        attention = "sdpa" if model_class._supports_sdpa else "eager"
    experts = {"experts_implementation": EXPERTS} if model_class._can_set_experts_implementation() else {}
    with torch.device(device):
        return model_class._from_config(hf_config, dtype=dtype, attn_implementation=attention, **experts)


def flex_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **settings: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Flex attention in the dtype of the values.

    Under autocast, rotary embeddings make queries and keys float32, and flex attention takes only one dtype.
    """
    return flex_attention_forward(module, query.to(value.dtype), key.to(value.dtype), value, *args, **settings)


transformers.AttentionInterface.register("flex_attention", flex_attention)


class BFloat16(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(torch.bfloat16)


def cast_experts(model: torch.nn.Module) -> None:
    """Cast float32 expert weights to bfloat16 in each forward pass.

    Autocast does so for linear layers, but not for grouped_mm, which is a loop over experts in float32.
    """
    for module in list(model.modules()):
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.ndim == 3 and name.endswith("_proj"):
                parametrize.register_parametrization(module, name, BFloat16(), unsafe=True)
