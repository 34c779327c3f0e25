"""A mixture of experts in parallel with the MLP of a layer (Gemma 4, 2026). B batch, T tokens, D residual stream."""

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
    """The mixture of experts and the norms of both branches, resolved from the config."""

    moe: MoeSpec
    norm: NormSpec

    @classmethod
    def of(cls, model: config.Model, kind: config.Kind) -> "ParallelMoeSpec | None":
        """None for layer kinds without a parallel MoE."""
        return cls(MoeSpec.of(model, kind), NormSpec.of(model)) if kind.parallel_moe is config.ParallelMoe.moe else None


class ParallelMoe(nnx.Module):
    """first_norm(mlp_out) + out_norm(moe(norm(x))); the router's input is x itself, without the norm."""

    def __init__(self, spec: ParallelMoeSpec, make: ParamBuilder):
        D = spec.moe.experts.emb_dim
        self.first_norm = spec.norm.build(D, make)
        self.norm = spec.norm.build(D, make)
        self.moe = Moe(spec.moe, make.below("moe"))
        self.out_norm = spec.norm.build(D, make)

    def __call__(self, x_BTD: jax.Array, mlp_out_BTD: jax.Array, ctx: Context) -> FeedForwardOutput:
        moe = self.moe(self.norm(x_BTD), ctx, router_input_BTD=x_BTD)
        return FeedForwardOutput(self.first_norm(mlp_out_BTD) + self.out_norm(moe.out_BTD), moe.aux)
