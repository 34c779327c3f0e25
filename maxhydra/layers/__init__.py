"""Building blocks of transformer layers: attention variants, feed-forwards, norms, embeddings, caches."""

from maxhydra.layers.attention import Attention, AttentionSpec
from maxhydra.layers.context import AudioClips, Context
from maxhydra.layers.embedding import (
    Embedding,
    Head,
    PerLayerEmbedding,
    PerLayerInput,
    PerLayerSpec,
    ScoreHead,
    VocabularySpec,
)
from maxhydra.layers.experts import ExpertLinear
from maxhydra.layers.gated_delta import DeltaSpec
from maxhydra.layers.interfaces import (
    AuxOutputs,
    FeedForward,
    FeedForwardOutput,
    FeedForwardSpec,
    Mixer,
    MixerOutput,
    MixerSpec,
    with_aux_losses,
)
from maxhydra.layers.kv_cache import Cache, CacheSpec, DenseCacheSpec, PageTable, SequenceIndex
from maxhydra.layers.linear import Linear, LoraSpec, MatmulSpec, dropout
from maxhydra.layers.mla import Mla, MlaSpec
from maxhydra.layers.mlp import Mlp, MlpSpec
from maxhydra.layers.moe import Moe, MoeSpec, ParallelMoe, ParallelMoeSpec
from maxhydra.layers.norm import LayerNorm, Norm, NormSpec, RMSNorm, norm_with_residual
from maxhydra.layers.paged_cache import PagedCacheSpec
from maxhydra.layers.params import Dtypes, ParamBuilder
from maxhydra.layers.quant.training import QuantRule, resolve_rules
from maxhydra.layers.vision import VisionSpec

__all__ = [
    "Attention",
    "AttentionSpec",
    "AudioClips",
    "AuxOutputs",
    "Cache",
    "CacheSpec",
    "Context",
    "DeltaSpec",
    "DenseCacheSpec",
    "Dtypes",
    "Embedding",
    "ExpertLinear",
    "FeedForward",
    "FeedForwardOutput",
    "FeedForwardSpec",
    "Head",
    "LayerNorm",
    "Linear",
    "LoraSpec",
    "MatmulSpec",
    "Mixer",
    "MixerOutput",
    "MixerSpec",
    "Mla",
    "MlaSpec",
    "Mlp",
    "MlpSpec",
    "Moe",
    "MoeSpec",
    "Norm",
    "NormSpec",
    "PageTable",
    "PagedCacheSpec",
    "ParallelMoe",
    "ParallelMoeSpec",
    "ParamBuilder",
    "PerLayerEmbedding",
    "PerLayerInput",
    "PerLayerSpec",
    "QuantRule",
    "RMSNorm",
    "ScoreHead",
    "SequenceIndex",
    "VisionSpec",
    "VocabularySpec",
    "dropout",
    "norm_with_residual",
    "resolve_rules",
    "with_aux_losses",
]
