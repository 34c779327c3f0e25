"""The mechanisms that layers are made of, each in a file of its own, and the context that travels between them."""

from maxhydra.layers.attention import Attention, AttentionSpec
from maxhydra.layers.context import Context
from maxhydra.layers.dropout import dropout
from maxhydra.layers.embedding import Embedding, Head, VocabularySpec
from maxhydra.layers.experts import ExpertMap
from maxhydra.layers.gated_delta import DeltaSpec
from maxhydra.layers.interfaces import Fed, FeedForward, FeedForwardSpec, Mixed, Mixer, MixerSpec, Side
from maxhydra.layers.kv_cache import Cache, DenseRoom, PagedRoom, Room, Rows
from maxhydra.layers.linear import LoraSpec, ProductSpec, Projection
from maxhydra.layers.mla import Mla, MlaSpec
from maxhydra.layers.mlp import Mlp, MlpSpec
from maxhydra.layers.moe import Moe, MoeSpec
from maxhydra.layers.norm import LayerNorm, Norm, NormSpec, RMSNorm, tapped
from maxhydra.layers.parallel_moe import Beside, BesideSpec
from maxhydra.layers.params import Dtypes, WeightMaker
from maxhydra.layers.per_layer_embedding import PerLayerEmbedding, PerLayerInput, PerLayerSpec
from maxhydra.layers.quant.rules import Format, formats_of

__all__ = [
    "Attention",
    "AttentionSpec",
    "Beside",
    "BesideSpec",
    "Cache",
    "Context",
    "DeltaSpec",
    "DenseRoom",
    "Dtypes",
    "Embedding",
    "ExpertMap",
    "Fed",
    "FeedForward",
    "FeedForwardSpec",
    "Format",
    "Head",
    "LayerNorm",
    "LoraSpec",
    "Mixed",
    "Mixer",
    "MixerSpec",
    "Mla",
    "MlaSpec",
    "Mlp",
    "MlpSpec",
    "Moe",
    "MoeSpec",
    "Norm",
    "NormSpec",
    "PagedRoom",
    "PerLayerEmbedding",
    "PerLayerInput",
    "PerLayerSpec",
    "ProductSpec",
    "Projection",
    "RMSNorm",
    "Room",
    "Rows",
    "Side",
    "VocabularySpec",
    "WeightMaker",
    "dropout",
    "formats_of",
    "tapped",
]
