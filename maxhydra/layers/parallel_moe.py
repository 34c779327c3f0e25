"""A mixture of experts beside the feed-forward of a layer (Gemma 4, 2026). B batch, T tokens, D residual stream."""

import dataclasses

import jax
from flax import nnx

from maxhydra.config.schema import model as config
from maxhydra.layers.context import Context
from maxhydra.layers.interfaces import FeedForwardOutput
from maxhydra.layers.moe import Moe, MoeSpec
from maxhydra.layers.norm import NormSpec
from maxhydra.layers.params import ParamBuilder


@dataclasses.dataclass(frozen=True)
class ParallelMoeSpec:
    """The mixture, and the norms around it."""

    moe: MoeSpec
    norm: NormSpec

    @classmethod
    def of(cls, model: config.Model, kind: config.Kind) -> "ParallelMoeSpec | None":
        """None where the feed-forward stands alone."""
        return cls(MoeSpec.of(model, kind), NormSpec.of(model)) if kind.parallel_moe is config.ParallelMoe.moe else None


class ParallelMoe(nnx.Module):
    """first_norm(first) + out_norm(moe(norm(x))): the router sees the stream x itself."""

    def __init__(self, spec: ParallelMoeSpec, make: ParamBuilder):
        D = spec.moe.experts.emb_dim
        self.first_norm = spec.norm.build(D, make)
        self.norm = spec.norm.build(D, make)
        self.moe = Moe(spec.moe, make.below("moe"))
        self.out_norm = spec.norm.build(D, make)

    def __call__(self, x_BTD: jax.Array, first_BTD: jax.Array, ctx: Context) -> FeedForwardOutput:
        fed = self.moe(self.norm(x_BTD), ctx, seen_BTD=x_BTD)
        return FeedForwardOutput(self.first_norm(first_BTD) + self.out_norm(fed.out_BTD), fed.aux)
