"""Rematerialisation (Chen et al., 2016): which activations of a layer wait for the backward pass, and where."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from maxhydra.config.schema import model as config
from maxhydra.kernels.attention.spec import KEPT


@dataclasses.dataclass(frozen=True)
class Remat:
    """A policy of `config.Remat`, ready to wrap a layer."""

    policy: config.RematPolicy
    save: tuple[str, ...]
    offload: tuple[str, ...]

    @classmethod
    def of(cls, remat: config.Remat) -> "Remat":
        return cls(remat.policy, tuple(remat.save), tuple(remat.offload))

    def wrap(self, function: Callable[..., Any], *, in_loop: bool) -> Callable[..., Any]:
        """The function with its activations kept by the policy.

        Outside a loop the compiler must be kept from merging the second computation with the first, which would keep
        everything after all. In a loop the two lie in different bodies, and the barrier would only cost.
        """
        if self.policy is config.RematPolicy.none:
            return function
        return jax.checkpoint(function, policy=self._saveable(), prevent_cse=not in_loop)

    def _saveable(self) -> Callable[..., Any]:
        policies = jax.checkpoint_policies
        if self.policy is config.RematPolicy.full:
            return policies.nothing_saveable
        if self.policy is config.RematPolicy.minimal:
            # The projections; products with a batch dimension are attention's, whose results grow with length squared.
            return _with_fused_attention(policies.dots_with_no_batch_dims_saveable)
        named = policies.save_only_these_names(*self.save)
        if self.offload:
            named = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=list(self.save),
                names_which_can_be_offloaded=list(self.offload),
                offload_src="device",
                offload_dst="pinned_host",
            )
        # The kernel's result under that name is not enough: its backward pass also reads the softmax's normaliser.
        return _with_fused_attention(named) if "context" in self.save else named


def _with_fused_attention(policy: Callable[..., Any]) -> Callable[..., Any]:
    """The policy, keeping also what an attention kernel returns: as small as its inputs, and dear to compute."""

    def keeps(primitive: Any, *args: Any, **params: Any) -> Any:
        is_kept = primitive.name.startswith("dot_product_attention_fwd") or params.get("name") == KEPT
        return is_kept or policy(primitive, *args, **params)

    return keeps
